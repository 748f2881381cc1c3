"""What only the compiled kernels can get wrong: instruction sets, threads, forks, memory that is not theirs."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import regardant as rg
from op import NATIVE, TYPES, attention_errors_within_budget, option_sets, tensors
from regardant import native

FIELDS = ("out", "lse", "max_logit", "entropy", "top_keys", "top_weights", "received", "pooled")


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


# Instruction sets.


def test_the_best_instruction_set_present_is_used():
    seen = rg.capabilities()
    assert seen.instruction_set == seen.present[-1]
    assert "scalar" in seen.present
    assert set(seen.present) <= set(seen.built)
    assert seen.threads >= 1


@pytest.mark.parametrize("isa", native.capabilities().present)
def test_an_instruction_set_can_be_forced(isa):
    done = run("import regardant as rg; print(rg.capabilities().instruction_set)", REGARDANT_ISA=isa)
    assert done.stdout.strip() == isa


def test_an_instruction_set_that_is_not_there_is_refused_by_name():
    done = run(
        "import regardant as rg, numpy as np; x = np.ones((4, 4)); rg.attention(x, x, x)",
        REGARDANT_ISA="altivec",
    )
    assert "ValueError: REGARDANT_ISA must be one of this machine's instruction sets, scalar" in done.stderr
    assert done.stderr.rstrip().endswith("got 'altivec'")


# Threads.


@pytest.fixture
def threads():
    """Set the number of threads inside a test only."""
    before = rg.capabilities().threads
    yield rg.set_num_threads
    rg.set_num_threads(before)


@pytest.mark.parametrize("impl", NATIVE)
@pytest.mark.parametrize(("T", "S"), [(700, 900), (3, 5000), (1, 1300)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_same_bits_for_any_thread_count(impl, T, S, dtype, threads):
    q, k, v = tensors(1, 2, 6, 2, T, S, 64, 64, dtype)
    looks = []
    for count in (1, 2, 3, 8, 8):
        threads(count)
        looks.append(rg.look(q, k, v, impl=impl, received=True, pooled=(3, 5)))
    for look in looks[1:]:
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(look, field), getattr(looks[0], field), err_msg=field)
        np.testing.assert_array_equal(look.rows([0, T - 1]), looks[0].rows([0, T - 1]))


@pytest.mark.parametrize("impl", NATIVE)
@pytest.mark.parametrize(("H", "G", "T", "S"), [(1, 1, 1500, 1500), (6, 2, 300, 700), (2, 1, 3, 2000)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_same_gradients_for_any_thread_count(impl, H, G, T, S, dtype, threads):
    # More chunks of keys than threads, and fewer; chunks of one head add to the same gradients of queries.
    q, k, v = tensors(1, 2, H, G, T, S, 64, 64, dtype)
    ids = np.sort(np.random.default_rng(2).integers(0, 4, (2, T + S)), axis=-1)
    options = {
        "segments": (ids[:, :T], ids[:, -S:]),
        "sinks": np.zeros(H),
        "bias": np.zeros((1, H, 1, S), np.float32),
    }
    out, lse = rg.attention(q, k, v, return_lse=True, **options)
    results = []
    for count in (1, 2, 3, 8, 8):
        threads(count)
        results.append(
            rg.attention_backward(q, k, v, out, lse, out, bias_gradient=True, impl=impl, **options)
        )
    for result in results[1:]:
        for name, got, expected in zip(result._fields, result, results[0], strict=True):
            np.testing.assert_array_equal(got, expected, err_msg=name)


def test_many_python_threads_at_once(threads):
    threads(3)
    problems = [tensors(seed, 1, 4, 2, 150 + seed, 400, 32, 32) for seed in range(8)]
    want = [rg.attention(*arrays) for arrays in problems]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for got, expected in zip(pool.map(lambda a: rg.attention(*a), problems), want, strict=True):
                np.testing.assert_array_equal(got, expected)


def _digest_in_child(arrays, answer):
    answer.put(rg.attention(*arrays).tobytes())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_computes_after_its_parent_has(threads):
    threads(2)
    arrays = tensors(2, 1, 8, 8, 600, 600, 64, 64)
    want = rg.attention(*arrays).tobytes()
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        answer = context.Queue()
        child = context.Process(target=_digest_in_child, args=(arrays, answer))
        child.start()
        assert answer.get(timeout=60) == want
        child.join(timeout=60)
        assert child.exitcode == 0


AFFINITY = """
import os
import numpy as np
import regardant as rg

allowed = os.sched_getaffinity(0)
x = np.random.default_rng(0).standard_normal((1, 8, 600, 64), dtype=np.float32)
rg.set_num_threads(3)
first = rg.attention(x, x, x).tobytes()
assert os.sched_getaffinity(0) == allowed, "the caller's processors have changed"
one = {min(allowed)}
os.sched_setaffinity(0, one)
for _ in range(20):
    assert rg.attention(x, x, x).tobytes() == first
assert os.sched_getaffinity(0) == one
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system does not tell a thread's processors"
)
def test_the_callers_processors_stay_as_they_were():
    done = run(AFFINITY)
    assert done.returncode == 0, done.stderr


# Memory.


@pytest.mark.parametrize("impl", NATIVE)
@pytest.mark.parametrize(("B", "H", "T", "S"), [(2, 4, 70, 90), (2, 4, 3, 700), (1, 2, 5, 0), (1, 2, 40, 0)])
def test_every_number_of_a_result_is_written(impl, B, H, T, S, monkeypatch):
    q, k, v = tensors(3, B, H, 2, T, S, 8, 24)
    options = {"lengths": np.full(B, S // 2)}
    clean = rg.look(q, k, v, impl=impl, received=True, pooled=(3, 4), **options)
    empty = np.empty

    def poisoned(*shape, **kind):
        array = empty(*shape, **kind)
        array.fill(77)
        return array

    monkeypatch.setattr(native.np, "empty", poisoned)
    again = rg.look(q, k, v, impl=impl, received=True, pooled=(3, 4), **options)
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(again, field), getattr(clean, field), err_msg=field)


@pytest.mark.parametrize("impl", NATIVE)
@pytest.mark.parametrize(
    ("B", "H", "T", "S"), [(2, 4, 70, 90), (1, 2, 300, 500), (1, 2, 5, 0), (1, 2, 40, 0)]
)
def test_every_number_of_a_gradient_is_written(impl, B, H, T, S, monkeypatch):
    q, k, v = tensors(3, B, H, 2, T, S, 8, 24)
    options = {"lengths": np.full(B, S // 2), "sinks": np.ones(H), "bias": np.zeros((1, H, 1, S), np.float32)}
    out, lse = rg.attention(q, k, v, return_lse=True, **options)

    def back():
        return rg.attention_backward(q, k, v, out, lse, out, bias_gradient=True, impl=impl, **options)

    clean = back()
    empty = np.empty

    def poisoned(*shape, **kind):
        array = empty(*shape, **kind)
        array.fill(77)
        return array

    monkeypatch.setattr(native.np, "empty", poisoned)
    for name, got, expected in zip(clean._fields, back(), clean, strict=True):
        np.testing.assert_array_equal(got, expected, err_msg=name)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="this system does not tell a process's memory"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_going_back_holds_no_matrix(dtype):
    # 20,000 tokens: the matrix would take 1.6 GB, and part of it for each of some hundred chunks of keys is not held
    # either.
    code = f"""
import ml_dtypes, numpy as np, regardant as rg
from pathlib import Path
x = np.ones((20000, 16), np.float32).astype("{dtype}")
out, lse = rg.attention(x, x, x, return_lse=True)
def told(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))
Path("/proc/self/clear_refs").write_text("5")
before = told("VmRSS")
rg.attention_backward(x, x, x, out, lse, x)
print(told("VmHWM") - before)
"""
    done = run(code)
    assert not done.stderr
    assert int(done.stdout) < 20_000  # kilobytes, of which the results are at most 3,840


@pytest.mark.parametrize("impl", NATIVE)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("T", [1, 5, 8])
@pytest.mark.parametrize("S", [31, 513, 1500])
def test_few_queries_over_a_slice_of_a_cache(impl, dtype, T, S):
    q, k, v = tensors(4 + S + T, 2, 6, 2, T, 1600, 64, 40, dtype, spread=1)
    k, v = k[:, :, 37 : 37 + S], v[:, :, 37 : 37 + S]
    options = option_sets(5, 2, 6, T, S)
    for name in ("plain", "window", "starts", "mask", "sinks", "all"):
        out, lse = rg.attention(q, k, v, impl=impl, return_lse=True, **options[name])
        attention_errors_within_budget(out, lse, q, k, v, **options[name])


@pytest.mark.parametrize("impl", NATIVE)
@pytest.mark.parametrize("T", [4, 40])
def test_a_hidden_value_beside_a_visible_one_in_the_same_tile(impl, T):
    # One row sees the NaN, its neighbours in the same vectors do not.
    q, k, v = tensors(6, 1, 2, 1, T, 64, 8, 8)
    mask = np.ones((T, 64), np.bool)
    mask[1::2, 20] = False
    clean = rg.attention(q, k, v, impl=impl, mask=mask)
    for bad in (np.nan, np.inf):
        v[..., 20, 3] = bad
        out = rg.attention(q, k, v, impl=impl, mask=mask)
        np.testing.assert_allclose(out[:, :, 1::2], clean[:, :, 1::2], rtol=1e-6, atol=1e-7)
        hit = out[:, :, ::2][:, :, mask[::2, 20] & (np.arange(64 - T, 64)[::2] >= 20)]
        assert not np.isfinite(hit[..., 3]).any()
        assert np.isfinite(hit[..., [0, 1, 2, 4, 5, 6, 7]]).all()


@pytest.mark.parametrize("impl", NATIVE)
def test_unaligned_arrays_are_read_right(impl):
    q, k, v = tensors(7, 1, 2, 2, 20, 20)
    raw = np.zeros(q.nbytes + 1, np.uint8)
    shifted = raw[1:].view(np.float32).reshape(q.shape)
    shifted[...] = q
    assert not shifted.flags.aligned
    np.testing.assert_array_equal(rg.attention(shifted, k, v, impl=impl), rg.attention(q, k, v, impl=impl))


@pytest.mark.parametrize("impl", NATIVE)
@pytest.mark.parametrize("top", [0, 1, 7, 8, 9, 20, 300])
@pytest.mark.parametrize("T", [3, 50])
def test_the_heaviest_keys_are_those_of_the_rows(impl, top, T):
    q, k, v = tensors(8, 1, 3, 1, T, 260, 16, 16)
    k[:, :, 100:110] = k[:, :, 90:100]  # equal scores: the earlier key comes first
    look = rg.look(q, k, v, impl=impl, top=top)
    rows = look.rows(range(T))
    order = np.argsort(-rows, axis=-1, kind="stable")[..., :top]
    want = np.take_along_axis(rows, order, axis=-1)
    seen = look.top_keys[..., : want.shape[-1]]
    np.testing.assert_allclose(look.top_weights[..., : want.shape[-1]], want, rtol=2e-5)
    differs = np.where(want > 0, seen != order, seen != -1)
    # Where the order differs, the weights do not.
    there = np.take_along_axis(rows, np.maximum(seen, 0), axis=-1)
    np.testing.assert_allclose(there[differs & (want > 0)], want[differs & (want > 0)], rtol=2e-6)
    twins = (seen >= 100) & (seen < 110)
    for b, h, t, n in np.argwhere(twins):
        assert seen[b, h, t, n] - 10 in seen[b, h, t, :n]
