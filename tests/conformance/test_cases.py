"""The cases themselves: what each has to say, how narrow its allowance is, and who passes them.

regardant's implementations and an attention that shares no line with them pass all; every mutant is caught and named.
"""

import dataclasses
import functools
import re
from pathlib import Path

import independent
import ml_dtypes
import mutants
import numpy as np
import pytest

from regardant.conformance import Mismatch, NotOffered, adapter, cases, select
from regardant.conformance.budget import expected, unit
from regardant.conformance.target import find
from regardant.conformance.worker import put

TYPES = ("float64", "float32", "float16", "bfloat16")
OURS = ["regardant", "regardant:blocked", "regardant:reference", "regardant.torch"]
COPIES = {"regardant:reference", "regardant.torch"}  # they do not read a view of 2**31 elements as it is

# Cases that take long and look at nothing that the allowance of others does not show.
LONG = {case.name for case in select("long,repeats/same-bits,repeats/threads")}


def remembering(case):
    """The case with its calls and expectations kept: two hundred mutants and five targets are put to it."""
    make = functools.cache(case.calls)
    kept = {}

    def expect(call):
        if id(call) not in kept:
            kept[id(call)] = (case.expect or expected)(call)
        return kept[id(call)]

    return dataclasses.replace(case, make=lambda _: make(), expect=expect)


def work(case):
    """How many pairs of queries and keys a case has, in all heads."""
    if case.views:
        return np.inf
    return sum(np.prod([call.sizes[i] for i in (0, 1, 3, 4)]) for call in case.calls())


# The small ones first: the others are needed only by what no small one catches.
SORTED = sorted(cases, key=work)
REMEMBERED = [remembering(case) for case in SORTED]


def test_there_are_many_and_each_says_what_it_is():
    assert len(cases) >= 60
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert re.fullmatch(r"[a-z0-9-]+/[a-zA-Z0-9-]+", case.name)
        assert case.tests.endswith(".")
        assert case.right
        assert case.report == "" or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", case.report), case.report


def test_inputs_come_from_the_seed_alone():
    for case in select("heads,mask,gradients/plain"):
        for one, other in zip(case.calls(), case.calls(), strict=True):
            np.testing.assert_array_equal(one.q_BHTD, other.q_BHTD)
            np.testing.assert_array_equal(one.v_BGSE, other.v_BGSE)
            assert one.describe() == other.describe()


def test_patterns_choose_by_family_and_by_name():
    assert {case.family for case in select("heads")} == {"heads"}
    assert [case.name for case in select("heads/grouped, mask/polarity")] == [
        "mask/polarity",
        "heads/grouped",
    ]
    for patterns in ("nothing", "heads,nothing/*"):
        with pytest.raises(ValueError, match="no case is named 'nothing"):
            select(patterns)


@pytest.mark.parametrize("case", [case for case in REMEMBERED if case.name not in LONG], ids=str)
def test_the_allowance_is_narrow(case):
    for call in case.calls():
        for name, want in (case.expect or expected)(call).items():
            finite = np.isfinite(want.exact)
            largest = np.abs(want.exact[finite]).max(initial=0)
            # A score may be some tens of units large, and the weights err by as many units of rounding.
            assert want.allowed.max(initial=0) <= 256 * unit(want.dtype) * largest, name


@pytest.mark.parametrize("target", OURS)
@pytest.mark.parametrize("case", REMEMBERED, ids=str)
def test_regardant_passes(case, target):
    try:
        case.check(find(target))
    except NotOffered:
        assert target in COPIES
        assert case.views


@pytest.mark.parametrize("case", REMEMBERED, ids=str)
def test_an_independent_attention_passes(case):
    try:
        case.check(adapter(types=TYPES)(independent.attention))
    except NotOffered:
        assert case.views


def test_the_independent_attention_shares_no_code():
    source = Path(independent.__file__).read_text(encoding="utf-8")
    assert "regardant" not in source.split('"""', 2)[2]


# Where to look first for what few cases catch.
FIRST = {
    "keys end at 65,536": "long/keys",
    "keys wrap at 16 bits": "long/edges",
    "ALiBi in float16": "alibi/far",
    "noise": "repeats",
}


def caught(name, function, words):
    """The first cases that catch a mutant, up to the one that names its mistake."""
    target = adapter(types=TYPES)(function)
    # What writes into its inputs must not write into those that are kept.
    among = SORTED if name.startswith("writes into") else REMEMBERED
    first = {case.name for case in select(FIRST.get(name, "*"))}
    wrong = []
    for case in sorted(among, key=lambda case: case.name not in first):
        try:
            case.check(target)
        except NotOffered:
            continue
        except Mismatch as found:
            wrong.append((case.name, found.cause))
            if words in found.cause:
                return wrong
    raise AssertionError(f"not caught as {words!r}: {wrong}")


@pytest.mark.parametrize(
    ("name", "right", "wrong", "words"), mutants.MUTANTS, ids=[row[0] for row in mutants.MUTANTS]
)
def test_a_mutant_is_caught_and_named(name, right, wrong, words):
    assert caught(name, mutants.mutant(right, wrong), words)


@pytest.mark.parametrize(("name", "function", "words"), mutants.stateful(), ids=lambda row: str(row)[:20])
def test_what_is_kept_between_calls_is_caught_and_named(name, function, words):
    assert caught(name, function, words)


def test_what_is_no_array_is_told_from_a_wrong_answer():
    for given in (None, [1.0], "out"):
        with pytest.raises(
            TypeError, match=f"out must be a NumPy array; the adapter gave {type(given).__name__}"
        ):
            select("alignment/square")[0].check(lambda *_, given=given: given)


def test_the_clock_stops_when_the_target_has_answered():
    def wrong(q, *_):
        return np.zeros_like(q)

    def raising(*_):
        raise RuntimeError("\x1b[31m")

    for function, kind, times in (
        (independent.attention, "passed", 1),
        (wrong, "failed", 1),
        (raising, "failed", 0),
    ):
        told = []
        found = put(
            select("alignment/square")[0], adapter()(function), lambda told=told: told.append("answered")
        )
        assert (found.verdict, len(told)) == (kind, times)
    assert found.detail == "raised RuntimeError: ⟨U+001B⟩[31m"


def test_a_function_offers_what_its_keywords_name():
    def plain(q, k, v, *, causal=True):
        return independent.attention(q, k, v, causal=causal)

    def causal_alone(q, k, v):
        return independent.attention(q, k, v)

    select("alignment/square")[0].check(plain)
    select("alignment/square")[0].check(causal_alone)
    select("alignment/full")[0].check(plain)
    for name, function, lacking in (
        ("alignment/full", causal_alone, "causal=False"),
        ("window/width", plain, "window"),
        ("lse/natural", plain, "return_lse"),
        ("gradients/plain", plain, "dout"),
        ("types/bfloat16", plain, "bfloat16"),
        ("repeats/threads", plain, "threads"),
        ("gradients/sinks", plain, "sinks, dout"),
    ):
        with pytest.raises(NotOffered, match=lacking):
            select(name)[0].check(function)


def test_what_is_missing_from_gradients_is_not_offered():
    def no_sinks(q, k, v, *, causal=True, sinks=None, dout=None):
        return independent.attention(q, k, v, causal=causal, sinks=sinks, dout=dout)[:3]

    select("gradients/plain")[0].check(no_sinks)
    with pytest.raises(NotOffered, match="dsinks"):
        select("gradients/sinks")[0].check(no_sinks)


def test_bfloat16_is_what_ml_dtypes_has():
    assert select("types/bfloat16")[0].calls()[0].q_BHTD.dtype == ml_dtypes.bfloat16
