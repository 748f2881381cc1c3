"""The benchmarks' helpers: they count right, tell right answers from wrong ones, and hide nothing that is absent."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks import answers, decode, look, peers, report, timing

import regardant

ROOT = Path(__file__).parent.parent


def module(name, *arguments):
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


@pytest.fixture
def work():
    return answers.random_work(2, 4, 2, 40, 8)


@pytest.mark.parametrize(("T", "S", "window"), [(7, 7, None), (7, 7, 3), (1, 9, None), (1, 9, 4), (5, 9, 20)])
def test_pairs_are_counted_as_they_are_visible(T, S, window):
    seen = [
        [S - T + i >= j and (window is None or S - T + i - j < window) for j in range(S)] for i in range(T)
    ]
    np.testing.assert_array_equal(answers.visible(T, S, window), seen)
    assert answers.visible_pairs(T, S, window) == sum(map(sum, seen))


def test_flops_are_four_for_each_pair_and_width(work):
    assert work.pairs == 2 * 4 * 40 * 41 // 2
    assert work.flops == 4 * 8 * work.pairs


@pytest.mark.parametrize("window", [None, 5])
def test_the_sample_is_the_definition(work, window):
    work = work._replace(window=window)
    exact = answers.sample(work, count=10**6)
    assert len(exact.places) == len(set(exact.places)) == 2 * 4 * 40
    q, k, v = (array.astype(np.float64) for array in work[:3])
    reference = regardant.attention(q, k, v, window=window, impl="reference")
    assert exact.error_in(reference) < 1e-14


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_right_answer_is_right(dtype):
    work = answers.random_work(2, 4, 2, 40, 8, dtype=dtype)
    exact = answers.sample(work)
    assert exact.error_in(regardant.attention(*work[:3])) <= exact.budget


def one_key_too_few(work):
    return regardant.attention(*work[:3], lengths=[39, 39])


def one_key_late(work):
    return regardant.attention(*work[:3], offset=1)


def heads_tiled(work):
    k, v = (np.tile(array, (1, 2, 1, 1)) for array in work[1:3])
    return regardant.attention(work.q_BHTD, k, v)


def not_a_number(work):
    return np.full_like(work.q_BHTD, np.nan)


@pytest.mark.parametrize("wrong", [one_key_too_few, one_key_late, heads_tiled, not_a_number])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_answer_gets_no_time(wrong, dtype):
    work = answers.random_work(2, 4, 2, 40, 8, dtype=dtype)
    exact = answers.sample(work, count=320)
    error = exact.error_in(wrong(work))
    outcomes = timing.contest({"regardant": timing.Contender(pytest.fail, error, exact.budget)}, rounds=1)
    assert outcomes["regardant"].seconds is None
    assert outcomes["regardant"].reason.startswith("wrong answer: error ")


def test_a_look_with_wrong_statistics_is_found_out(work):
    work = work._replace(q_BHTD=work.q_BHTD[:1], k_BGSD=work.k_BGSD[:1], v_BGSE=work.v_BGSE[:1])
    truth = look.Truth(work)
    seen = regardant.look(*work[:3], top=look.TOP, received=True)
    names = ("out", "top_keys", "top_weights", "entropy", "received")
    right = {name: getattr(seen, name) for name in names}
    error, budget = truth.worst(right)
    assert error <= budget
    for name in names:
        if name == "top_keys":
            wrongs = [(right[name] + 1) % 40]
        else:
            wrongs = [right[name] * np.float32(1.001), right[name] * np.float32(math.nan)]
        for wrong in wrongs:
            assert not answers.right(*truth.worst(right | {name: wrong}))


def test_turns_and_medians():
    calls = []
    outcomes = timing.contest(
        {
            "regardant": timing.Contender(lambda: calls.append("a"), 0, 1),
            "other": timing.Contender(lambda: calls.append("b"), 0, 1),
            "absent": "not offered: no such thing",
        },
        rounds=2,
    )
    turn = 1 + timing.MOST  # a call that warms up, and those that count
    assert "".join(calls) == "ab" + 2 * ("a" * turn + "b" * turn)
    assert outcomes["other"].seconds > 0
    assert outcomes["absent"] == timing.Outcome(reason="not offered: no such thing")


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_peer_goes_through_its_inputs_in_turn(dtype, window):
    works = [answers.random_work(1, 4, 2, 9, 8, dtype=dtype, window=window, seed=seed) for seed in range(2)]
    ready = peers.pytorch(works, 1)
    for at in (0, 1, 0):
        exact = answers.sample(works[at])
        assert answers.right(exact.error_in(ready.read(ready.run())), exact.budget)


def test_a_peer_that_cannot_says_why(work):
    def lacks(_works, _threads):
        raise peers.NotOfferedError("no such type")

    def breaks(_works, _threads):
        return peers.Ready(lambda: 1 / 0, np.asarray)

    exact = answers.sample(work)
    assert peers.contender(lacks, [work], exact, 1) == "not offered: no such type"
    assert peers.contender(breaks, [work], exact, 1) == "failed: ZeroDivisionError: division by zero"


def test_the_matrix_is_refused_where_it_is_too_large():
    q = np.broadcast_to(np.float32(0), (1, 8, 16384, 64))
    with pytest.raises(peers.NotOfferedError, match="holds the whole matrix, 9 GB here"):
        peers.check_matrix(answers.Work(q, q, q), 1)


def test_marks_are_judged(monkeypatch):
    figures = {"torch": 1.4, "time / ideal": 1.4}
    assert report.Mark("torch", 1.3).judge(figures)["state"] == "met"
    assert report.Mark("torch", 1.5).judge(figures)["state"] == "unmet"
    assert report.Mark("time / ideal", 1.35, most=True).judge(figures)["state"] == "unmet"
    assert report.Mark("share", 0.85).judge(figures)["state"] == "not measured"
    for instruction_set, state in (("avx2", "for AVX-512"), ("avx512bf16", "met")):
        found = regardant.capabilities()._replace(instruction_set=instruction_set)
        monkeypatch.setattr(regardant, "capabilities", lambda found=found: found)
        assert report.Mark("torch", 1.3, avx512=True).judge(figures)["state"] == state


def test_a_row_shows_rates_ratios_and_who_is_absent():
    outcomes = {
        "regardant": timing.Outcome(0.5, 2e-7, 1e-7),
        "torch": timing.Outcome(1, 1e-7, 1e-7, "eager"),
        "flex": timing.Outcome(reason="not offered: gives no weights"),
        "jax": timing.Outcome(reason="not offered: gives no weights"),
    }
    case = report.Case(label="a [case]", marks=(report.Mark("torch", 1.3),))
    row = report.Row(outcomes, amount=10**9, remark="a remark").finish(case, peak=4e9)
    assert json.loads(json.dumps(row)) == row
    assert report.cells(row) == (
        "a [case]\na remark",
        "500 ms",
        "2.0",
        "0.50",
        "2.0e-07",
        "torch 2.00 × (1.0e-07), eager\nflex, jax not offered: gives no weights",
        "torch ≥ 1.3: 2.00 met\nerror / budget ≤ 1: 2.00 unmet",
    )


def test_a_row_without_a_time_says_so():
    outcomes = {"regardant": timing.Outcome(None, 1.0, 1e-7, reason="wrong answer: error 1.0e+00")}
    row = report.Row(outcomes, amount=10**9).finish(report.Case(label="a case"), peak=4e9)
    assert row["seconds"] is row["rate"] is row["share"] is None
    assert report.cells(row)[1] == "wrong answer: error 1.0e+00"


def test_decode_goes_through_layers_beyond_the_last_cache(monkeypatch):
    monkeypatch.setattr(decode, "LEAST", 10**6)
    monkeypatch.setattr(timing, "last_level_cache", lambda: 10**5)
    works = decode.layers_of(4, 2, 64, 8, "float16")
    assert len(works) == -(-(10**6) // (2 * 2 * 64 * 8 * 2))
    assert not works[0].k_BGSD.flags.c_contiguous
    assert np.shares_memory(works[0].k_BGSD.base, works[1].k_BGSD)
    assert not np.array_equal(works[0].k_BGSD, works[1].k_BGSD)


def test_peaks_are_positive():
    multiply_adds = timing.MultiplyAdds(1)
    multiply_adds.measure()
    assert multiply_adds.best > 0
    assert timing.last_level_cache() > 0


def test_the_command_prints_json():
    told = module("look", "--rounds", "1", "--peers", "none", "--cases", "rows()", "--json")
    (row,) = told["cases"]
    assert row["seconds"] > 0
    assert row["others"] == {}
    assert told["versions"]["regardant"] == regardant.__version__
    assert told["instruction_set"] == regardant.capabilities().instruction_set


def test_memory_is_measured_in_a_process_of_its_own():
    told = module("memory", "regardant", "2", "512", "16")
    assert 0 <= told["beyond"] < 64e6
    assert answers.right(told["error"], told["budget"])


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        (["--cases", "no such case"], "no case has"),
        (["--peers", "nobody"], "'nobody' is none of torch"),
        (["--rounds", "0"], "0 is not at least 1"),
    ],
)
def test_what_is_not_there_is_refused(option, complaint):
    command = [sys.executable, "-m", "benchmarks.look", *option]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode
    assert complaint in done.stderr


def test_attention_is_timed_alone_and_beside_a_neighbour():
    found = module("neighbour", "--json", "--rounds", "1")
    assert [row["work"][:7] for row in found] == ["prefill", "decode,"]
    for row in found:
        assert row["error"] < 1e-5
        assert (
            min(row[f"{part}_{how}"] for part in ("attention", "product") for how in ("alone", "between")) > 0
        )
