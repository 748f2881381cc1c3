"""Cases on the numbers: element types, overflow, scale, softcap, bias, sinks, ALiBi, lse.

Shape legend: B batch, H query heads, T queries, S keys, D query/key width.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant.conformance.case import Case
from regardant.conformance.catalogue.inputs import (
    draw,
    every_option,
    normal,
    paper_slopes,
    some_mask,
    with_arrays,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from regardant.conformance.case import Call

WIDE = (
    "Scores and sums are float32 at least, whatever the input's type: float16 ends at 65,504, and both half types "
    "stop counting after a few hundred or thousand equal terms."
)


def _whole_numbers(rng: np.random.Generator, call: Call, highest: int) -> Call:
    """Queries and keys of small whole numbers, so that scores are exact in any type and only softmax is tested."""
    dtype = call.q_BHTD.dtype
    q, k = (
        rng.integers(-highest, highest + 1, array.shape).astype(dtype) for array in (call.q_BHTD, call.k_BGSD)
    )
    return with_arrays(call, q=q, k=k)


def _overflowing(rng: np.random.Generator) -> list[Call]:
    call = draw(rng, D=64, dtype="float16", spread=1.0)
    factor = np.float16(96)
    big = with_arrays(call, q=call.q_BHTD * factor, k=call.k_BGSD * factor)
    return [big, big.but(scale=2.0**-10)]


def _large_values(rng: np.random.Generator) -> list[Call]:
    # The mean of values near the end of the type is in the type, their sum is not.
    call = draw(rng, T=20, S=90, causal=False, dtype="float16")
    v = np.where(rng.random(call.v_BGSE.shape) < 0.5, 1.0, 0.75) * 60_000
    return [with_arrays(call, v=v.astype(call.v_BGSE.dtype))]


def _equal_keys(rng: np.random.Generator, dtype: str) -> list[Call]:
    # Each key weighs 1/S, and values alternate: counting in the half type stops long before S.
    call = draw(rng, B=1, H=2, G=1, T=2, S=6000, causal=False, dtype=dtype, lse=True)
    k = np.broadcast_to(call.k_BGSD[:, :, :1], call.k_BGSD.shape).copy()
    v = np.abs(call.v_BGSE) + call.v_BGSE.dtype.type(0.5)
    return [with_arrays(call, k=k, v=v)]


def _far_away(rng: np.random.Generator) -> list[Call]:
    # All scores near +1600, then near −1600: softmax does not change, exp without a maximum overflows or vanishes.
    calls = []
    for sign in (1, -1):
        call = draw(rng, causal=False)
        q, k = call.q_BHTD.copy(), call.k_BGSD.copy()
        q[..., 0], k[..., 0] = 64, 64 * sign
        calls.append(_rounded(with_arrays(call, q=q, k=k).but(scale=0.375)))
    return calls


def _rounded(call: Call) -> Call:
    """The same with queries and keys in quarters, so that the scores are exact in float32."""
    return with_arrays(call, q=np.round(call.q_BHTD * 4) / 4, k=np.round(call.k_BGSD * 4) / 4)


def _steep(rng: np.random.Generator) -> list[Call]:
    call = _whole_numbers(rng, draw(rng), 3)
    return [call.but(scale=2.0**13), call.but(scale=2.0**13, causal=False)]


def _ramps(rng: np.random.Generator) -> list[Call]:
    calls = []
    for slope in (0.03125, -0.03125):
        call = draw(rng, B=1, H=2, G=1, T=20, S=2600, causal=False, spread=1.0, lse=False)
        q, k = call.q_BHTD.copy(), call.k_BGSD.copy()
        q[..., 0], k[..., 0] = 1, slope * np.arange(2600)
        calls.append(_rounded_32(with_arrays(call, q=q, k=k).but(scale=0.5)))
    return calls


def _rounded_32(call: Call) -> Call:
    return with_arrays(call, q=np.round(call.q_BHTD * 32) / 32, k=np.round(call.k_BGSD * 32) / 32)


def _wide(rng: np.random.Generator) -> dict[str, Any]:
    """All options, in float64 where they have a type."""
    options = every_option(rng, 2, 4, 9, 12)
    wide = {name: np.asarray(options[name], np.float64) for name in ("bias", "alibi", "sinks")}
    return dict(options) | wide | {"bias": wide["bias"] + rng.standard_normal((4, 9, 12))}


TYPES = (
    Case(
        "types/float32",
        "float32, with several tiles of queries and keys.",
        "The error is that of doing the same sums naively in float32.",
        lambda rng: [
            draw(rng, T=130, S=300, D=64, spread=1.0, causal=False),
            draw(rng, T=200, S=200, D=64, spread=1.0),
        ],
    ),
    Case(
        "types/float64",
        "float64 is computed in float64.",
        "Somebody who passes float64 wants its precision.",
        lambda rng: [draw(rng, dtype="float64"), draw(rng, dtype="float64", T=40, S=150, causal=False)],
    ),
    Case(
        "types/float64-options",
        "float64 with all options together.",
        "Somebody who passes float64 wants its precision, of every term.",
        lambda rng: [draw(rng, T=9, S=12, dtype="float64", **_wide(rng))],
    ),
    Case(
        "types/float16",
        "float16, as exact as rounding the result allows.",
        WIDE,
        lambda rng: [
            draw(rng, dtype="float16"),
            draw(rng, dtype="float16", T=40, S=150, D=64, spread=1.0, causal=False),
        ],
    ),
    Case(
        "types/bfloat16",
        "bfloat16, as exact as rounding the result allows.",
        WIDE,
        lambda rng: [
            draw(rng, dtype="bfloat16"),
            draw(rng, dtype="bfloat16", T=40, S=150, D=64, spread=1.0, causal=False),
        ],
    ),
    Case(
        "types/float16-decoding",
        "float16, one query over many keys.",
        WIDE,
        lambda rng: [draw(rng, dtype="float16", T=1, S=700, D=64, spread=1.0, causal=False)],
    ),
    Case(
        "types/bfloat16-decoding",
        "bfloat16, one query over many keys.",
        WIDE,
        lambda rng: [draw(rng, dtype="bfloat16", T=1, S=700, D=64, spread=1.0, causal=False)],
    ),
    Case(
        "types/float16-options",
        "float16 with all options together.",
        WIDE,
        lambda rng: [draw(rng, T=9, S=12, dtype="float16", **every_option(rng, 2, 4, 9, 12))],
    ),
    Case(
        "types/float16-scores-overflow",
        "Products of float16 queries and keys beyond 65,504.",
        WIDE,
        _overflowing,
        report="pytorch/pytorch#119131",
    ),
    Case(
        "types/float16-large-values",
        "float16 values whose sum is beyond the type, and whose mean is not.",
        WIDE,
        _large_values,
        usual="unnormalised sums are kept in float16",
    ),
    Case(
        "types/float16-many-equal-keys",
        "6,000 equal keys in float16: each weighs 1/6,000.",
        WIDE,
        lambda rng: _equal_keys(rng, "float16"),
        usual="sums are kept in float16",
    ),
    Case(
        "types/bfloat16-many-equal-keys",
        "6,000 equal keys in bfloat16: each weighs 1/6,000.",
        WIDE,
        lambda rng: _equal_keys(rng, "bfloat16"),
        usual="sums are kept in bfloat16",
    ),
)


SCALES = (
    Case(
        "scale/default",
        "The scale is 1/√D where none is given, D the width of queries and keys.",
        "E, the values' width, has no part in the scores.",
        lambda rng: [draw(rng, D=D, E=E, spread=1.0) for D, E in ((64, 16), (16, 64), (5, 3))],
    ),
    Case(
        "scale/given",
        "A given scale replaces the default.",
        "It does not multiply it.",
        lambda rng: [draw(rng, scale=0.3), draw(rng, scale=1.0), draw(rng, T=1, scale=0.9, causal=False)],
    ),
    Case(
        "scale/large",
        "A scale that makes one key, or the equal ones, take all.",
        "The row maximum is subtracted before exponentiating: what remains is at most 1.",
        _steep,
        usual="exponentials overflow: the row maximum is not subtracted",
    ),
    Case(
        "scale/tiny",
        "Scales of nearly 0: all visible keys weigh nearly the same.",
        "softmax of equal scores is uniform.",
        lambda rng: [draw(rng, scale=scale) for scale in (1e-30, 1e-3)],
    ),
    Case(
        "scale/zero",
        "A scale of 0: all visible keys weigh the same.",
        "softmax of equal scores is uniform; what is hidden stays hidden, whatever it would be multiplied by.",
        lambda rng: [draw(rng, scale=0.0), draw(rng, scale=0.0, causal=False)],
    ),
    Case(
        "scale/negative",
        "A negative scale: the least similar keys weigh most.",
        "The scale is a factor like any other; what is hidden stays hidden.",
        lambda rng: [draw(rng, scale=-0.5), draw(rng, scale=-0.5, causal=False)],
    ),
    Case(
        "scale/far-from-zero",
        "All scores near +1,600 or −1,600.",
        "softmax does not change if a number is added to all scores.",
        _far_away,
        usual="exponentials overflow or vanish: the row maximum is not subtracted",
    ),
    Case(
        "scale/rising-maximum",
        "Scores that rise, and that fall, from key to key over many tiles.",
        "Online softmax must rescale what it has whenever it meets a larger score.",
        _ramps,
        usual="what was summed before a new maximum is not rescaled",
    ),
    Case(
        "scale/rows-sum-to-one",
        "Where all values are 1, out is 1.",
        "Weights of a row sum to 1.",
        lambda rng: [
            with_arrays(call, v=np.ones_like(call.v_BGSE))
            for call in (draw(rng, T=90, S=90), draw(rng, T=1, S=70, causal=False))
        ],
    ),
)


CAP = "s = softcap · tanh(scale · q·k / softcap), before anything is added or hidden (Gemma 2)."
SOFTCAPS = (
    Case(
        "softcap/plain",
        "A softcap bounds the scores smoothly.",
        CAP,
        lambda rng: [
            draw(rng, softcap=1.5),
            draw(rng, T=1, S=30, causal=False, softcap=1.5),
            draw(rng, T=40, S=150, causal=False, softcap=5.0),
        ],
        report="vllm-project/vllm-metal#665",
    ),
    Case(
        "softcap/and-scale",
        "The scale is applied before the softcap.",
        CAP,
        lambda rng: [draw(rng, softcap=1.5, scale=1.3)],
    ),
    Case(
        "softcap/before-bias",
        "A bias larger than the softcap is not capped.",
        CAP,
        lambda rng: [draw(rng, softcap=1.0, bias=4 * normal(rng, 4, 9, 9))],
    ),
    Case(
        "softcap/before-alibi",
        "ALiBi is added after the softcap.",
        CAP,
        lambda rng: [draw(rng, softcap=1.0, alibi=4 * paper_slopes(4))],
    ),
    Case(
        "softcap/before-mask",
        "What is hidden stays hidden: capping −∞ would make it −softcap.",
        CAP,
        lambda rng: [
            draw(rng, softcap=1.0, causal=False, mask=some_mask(rng, 9, 9)),
            draw(rng, softcap=0.5, T=90, S=90),
        ],
    ),
    Case(
        "softcap/overflow",
        "Scores far beyond the softcap.",
        "tanh of a large number is 1, not NaN.",
        lambda rng: [
            _whole_numbers(rng, draw(rng, softcap=30.0, scale=2.0**20), 3),
            _whole_numbers(rng, draw(rng, softcap=0.0625, scale=2.0**60), 3),
        ],
        usual="tanh made of exponentials that overflow",
    ),
    Case(
        "softcap/float16",
        "A softcap in float16.",
        f"{CAP} {WIDE}",
        lambda rng: [draw(rng, dtype="float16", softcap=2.0)],
    ),
)

BIASES = (
    Case(
        "bias/plain",
        "A bias is added to the scaled scores.",
        "It is neither scaled nor capped.",
        lambda rng: [
            draw(rng, bias=normal(rng, 2, 4, 9, 9)),
            draw(rng, T=1, S=12, causal=False, bias=normal(rng, 4, 1, 12)),
        ],
    ),
    Case(
        "bias/broadcast",
        "A bias of any shape that broadcasts to (B, H, T, S), by NumPy's rule.",
        "Axes are matched from the last.",
        lambda rng: [
            draw(rng, causal=causal, bias=2 * normal(rng, *shape))
            for shape in ((9,), (9, 9), (4, 1, 9), (2, 1, 1, 9), (1, 4, 9, 9), (1, 9), (4, 9, 9))
            for causal in (True, False)
        ],
        raising="biases do not broadcast along every axis",
    ),
    Case(
        "bias/axes-of-one-length",
        "Biases of few axes where batch, heads, queries and keys are all of one length.",
        "Axes are matched from the last, even where another one would fit.",
        lambda rng: [
            draw(rng, B=3, H=3, G=3, T=3, S=3, causal=False, bias=2 * normal(rng, *shape))
            for shape in ((3, 3, 3), (3, 1, 1, 3), (3, 3))
        ],
        raising="biases do not broadcast along every axis",
    ),
    Case(
        "bias/minus-infinity",
        "A bias of −∞ hides its key.",
        "exp(−∞) is 0: its key takes no part.",
        lambda rng: [
            draw(rng, causal=causal, bias=np.where(shown, 0.5, -np.inf).astype(np.float32))
            for causal, shown in (
                (False, some_mask(rng, 2, 1, 9, 9)),
                (True, np.tile(np.arange(9) % 3 < 2, (9, 1))),
            )
        ],
    ),
    Case(
        "bias/and-causality",
        "A bias and causality together, with fewer queries than keys.",
        "A bias does not switch causality off.",
        lambda rng: [
            draw(rng, T=4, S=9, bias=normal(rng, 4, 9)),
            draw(rng, T=50, S=150, bias=normal(rng, 50, 150)),
        ],
    ),
    Case(
        "bias/float16",
        "A bias in float16, beside float16 queries.",
        WIDE,
        lambda rng: [draw(rng, dtype="float16", causal=False, bias=normal(rng, 4, 9, 9, dtype="float16"))],
    ),
)

DENOMINATOR = (
    "The sink is one more term of the denominator and has no value: weights sum to less than 1 (GPT-OSS)."
)
SINKS = (
    Case(
        "sinks/plain",
        "One sink for each query head takes part of the weight.",
        DENOMINATOR,
        lambda rng: [
            draw(rng, sinks=2 * normal(rng, 4)),
            draw(rng, T=1, S=30, causal=False, sinks=2 * normal(rng, 4)),
            draw(rng, T=70, S=300, causal=False, sinks=2 * normal(rng, 4)),
        ],
        report="vllm-project/vllm-metal#550",
    ),
    Case(
        "sinks/large",
        "Sinks far above and far below all scores.",
        f"{DENOMINATOR} It takes part in the maximum that is subtracted.",
        lambda rng: [draw(rng, causal=False, sinks=np.array([300.0, -300.0, 90.0, 0.0], np.float32))],
        usual="the sink is left out of the maximum",
    ),
    Case(
        "sinks/large-lse",
        "lse with sinks far above and far below all scores.",
        f"{DENOMINATOR} It takes part in the maximum that is subtracted.",
        lambda rng: [
            draw(rng, lse=True, causal=False, sinks=np.array([300.0, -300.0, 95.0, 0.0], np.float32)),
            draw(rng, T=1, S=300, lse=True, causal=False, sinks=np.array([1e4, -1e4, 95.0, 0.0], np.float32)),
        ],
        usual="the sink is left out of the maximum",
    ),
    Case(
        "sinks/none",
        "A sink of −∞ is none.",
        "exp(−∞) is 0.",
        lambda rng: [draw(rng, sinks=np.array([-np.inf, 1.0, -np.inf, 0.0], np.float32))],
    ),
    Case(
        "sinks/are-not-scores",
        "Sinks are neither scaled nor capped.",
        DENOMINATOR,
        lambda rng: [
            draw(rng, scale=0.2, softcap=1.0, sinks=3 * normal(rng, 4)),
            draw(rng, D=64, sinks=normal(rng, 4)),
        ],
    ),
    Case(
        "sinks/and-window",
        "Sinks and a window together.",
        "The sink is no key: a window does not reach beyond it or lose it.",
        lambda rng: [
            draw(rng, window=3, sinks=normal(rng, 4)),
            draw(rng, T=90, S=90, window=20, sinks=normal(rng, 4)),
        ],
    ),
    Case(
        "sinks/lse",
        "lse has the sink in it.",
        "lse is the logarithm of the denominator, of all of it.",
        lambda rng: [draw(rng, lse=True, sinks=2 * normal(rng, 4))],
    ),
)

ALIBI = (
    Case(
        "alibi/power-of-two",
        "ALiBi slopes for 4 and 8 heads.",
        "s −= slope · (p − j), by query head (Press et al. 2022).",
        lambda rng: [draw(rng, H=H, G=2, alibi=paper_slopes(H)) for H in (4, 8)],
    ),
    Case(
        "alibi/other-numbers-of-heads",
        "ALiBi slopes for 6 and 12 heads, as the paper's rule gives them.",
        "For a number that is no power of two, every other slope of the next power's follows: they are not in order.",
        lambda rng: [draw(rng, H=H, G=3, alibi=paper_slopes(H)) for H in (6, 12)],
        report="ml-explore/mlx#3071",
    ),
    Case(
        "alibi/full",
        "Without causality, keys ahead are raised as those behind are lowered.",
        "The distance p − j has its sign.",
        lambda rng: [draw(rng, causal=False, alibi=2 * paper_slopes(4))],
    ),
    Case(
        "alibi/over-a-cache",
        "With a cache, distances are counted from each query's position; lse shows it.",
        "p is offset + i. (A number added to a whole row changes lse and nothing else.)",
        lambda rng: [
            draw(rng, T=4, S=12, lse=True, alibi=paper_slopes(4)),
            draw(rng, T=1, S=300, lse=True, alibi=paper_slopes(4)),
            draw(rng, T=4, S=12, offset=2, lse=True, alibi=paper_slopes(4)),
        ],
    ),
    Case(
        "alibi/far",
        "Distances that half types cannot count.",
        "A distance is a whole number; what it lowers a score by is made in the type of scores.",
        lambda rng: [
            draw(rng, B=1, H=2, G=1, T=3, S=5_001, lse=True, alibi=np.array([1e-3, 3e-4], np.float32))
        ],
        usual="distances are kept in a half type",
    ),
    Case(
        "alibi/and-bias",
        "ALiBi and a bias together.",
        "Both are added.",
        lambda rng: [draw(rng, alibi=paper_slopes(4), bias=normal(rng, 9, 9))],
    ),
)


def _lse(
    name: str,
    tests: str,
    make: Callable[[np.random.Generator], list[Call]],
    right: str = "",
    report: str = "",
) -> Case:
    reason = right or "lse is the natural logarithm of the row's denominator, by the same scores as out."
    return Case(f"lse/{name}", tests, reason, make, report)


LSE = (
    _lse(
        "natural",
        "lse is a natural logarithm.",
        lambda rng: [
            draw(rng, lse=True),
            draw(rng, T=70, S=300, causal=False, lse=True),
            draw(rng, T=1, S=30, causal=False, lse=True),
        ],
        report="vllm-project/vllm#28840",
    ),
    _lse(
        "type",
        "lse is float32 for half types.",
        lambda rng: [draw(rng, dtype="float16", lse=True)],
        "It is a sum's logarithm, kept to go on computing with: a half type would lose three digits.",
    ),
    _lse(
        "type-of-float64", "lse is float64 for float64.", lambda rng: [draw(rng, dtype="float64", lse=True)]
    ),
    _lse("of-bfloat16", "lse is float32 for bfloat16.", lambda rng: [draw(rng, dtype="bfloat16", lse=True)]),
    _lse("window", "lse counts the window's keys alone.", lambda rng: [draw(rng, lse=True, window=3)]),
    _lse(
        "mask",
        "lse counts the keys alone that a mask shows.",
        lambda rng: [draw(rng, lse=True, causal=False, mask=some_mask(rng, 2, 1, 9, 9))],
    ),
    _lse(
        "padding",
        "lse leaves padding out.",
        lambda rng: [
            draw(rng, lse=True, causal=False, starts=np.array([2, 0])),
            draw(rng, lse=True, causal=False, lengths=np.array([9, 5])),
        ],
    ),
    _lse("softcap", "lse is of capped scores.", lambda rng: [draw(rng, lse=True, softcap=1.5)]),
    _lse(
        "bias",
        "lse has the bias in it.",
        lambda rng: [draw(rng, lse=True, causal=False, bias=normal(rng, 9, 9))],
    ),
    _lse("alibi", "lse has ALiBi in it.", lambda rng: [draw(rng, lse=True, alibi=paper_slopes(4))]),
    _lse(
        "far-from-zero",
        "lse of scores near ±1,600.",
        lambda rng: [dataclasses.replace(call, lse=True) for call in _far_away(rng)],
        "lse is the maximum and the logarithm of what is left: neither overflows.",
    ),
    _lse(
        "scale",
        "lse is of scaled scores.",
        lambda rng: [draw(rng, lse=True, scale=0.9), draw(rng, lse=True, D=40)],
    ),
)

CASES = (*TYPES, *SCALES, *SOFTCAPS, *BIASES, *SINKS, *ALIBI, *LSE)
