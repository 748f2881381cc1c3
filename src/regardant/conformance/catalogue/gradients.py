"""Cases on gradients: of every option, against finite differences, through masked rows and hidden numbers.

A target gives dq, dk, dv (and dsinks, dbias) from the gradient arriving at out, and at lse if it takes that.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regardant.conformance.case import Case
from regardant.conformance.catalogue.inputs import (
    backwards,
    documents,
    draw,
    every_option,
    normal,
    paper_slopes,
    some_mask,
    spoil,
    with_arrays,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from regardant.conformance.case import Call

CHAIN = "The chain rule through the very scores that the forward pass had."
NOTHING = "A row that sees nothing passes nothing on, and a key that nobody sees gets 0: never NaN."


def _case(
    name: str,
    tests: str,
    make: Callable[[np.random.Generator], list[Call]],
    right: str = CHAIN,
    report: str = "",
    **asked: bool,
) -> Case:
    def calls(rng: np.random.Generator) -> list[Call]:
        return [backwards(rng, call, **asked) for call in make(rng)]

    return Case(f"gradients/{name}", tests, right, calls, report)


def _dead(rng: np.random.Generator) -> list[Call]:
    mask = some_mask(rng, 2, 1, 9, 9)
    mask[0, 0, [2, 5]], mask[1] = False, False
    return [draw(rng, causal=False, mask=mask)]


def _dead_by_bias(rng: np.random.Generator) -> list[Call]:
    bias = normal(rng, 9, 9)
    bias[[1, 4]] = -np.inf
    return [draw(rng, causal=False, bias=bias)]


def _masked(rng: np.random.Generator, bad: float) -> Call:
    mask = some_mask(rng, 2, 1, 9, 9)
    mask[..., 4] = False
    return spoil(draw(rng, causal=False, mask=mask), ~mask.any(axis=(1, 2)), bad)


def _hidden_queries(rng: np.random.Generator) -> list[Call]:
    """NaN in queries that see nothing: their rows are dead, and no key hears of them."""
    mask = some_mask(rng, 9, 9) & (np.arange(9) > 4)[:, None]
    call = draw(rng, causal=False, mask=mask)
    q = call.q_BHTD.copy()
    q[:, :, :5] = np.nan
    return [with_arrays(call, q=q)]


def _strided(rng: np.random.Generator) -> list[Call]:
    """The gradient of a sum: one number shown as all, stride 0."""
    import dataclasses

    call = backwards(rng, draw(rng))
    one = np.broadcast_to(np.float32(1), call.q_BHTD.shape)
    turned = np.ascontiguousarray(rng.standard_normal((2, 9, 4, 8)).astype(np.float32)).swapaxes(1, 2)
    return [dataclasses.replace(call, dout_BHTE=one), dataclasses.replace(call, dout_BHTE=turned)]


def _large_scores(rng: np.random.Generator) -> list[Call]:
    return [draw(rng, spread=30.0, softcap=20.0), draw(rng, D=16, spread=6.0)]


HIDDEN = (
    ("by-mask", "that a mask hides", _masked),
    (
        "in-padding",
        "from lengths on",
        lambda rng, bad: spoil(draw(rng, lengths=np.array([6, 6])), np.arange(9) >= 6, bad),
    ),
    (
        "in-the-future",
        "after all queries",
        lambda rng, bad: spoil(draw(rng, T=4, S=9, offset=2), np.arange(9) > 5, bad),
    ),
    (
        "behind-the-window",
        "that no window reaches",
        lambda rng, bad: spoil(draw(rng, T=4, S=12, window=3), np.arange(12) < 6, bad),
    ),
)

CASES = (
    _case(
        "plain",
        "Gradients of causal attention.",
        lambda rng: [draw(rng), draw(rng, T=90, S=90, D=16, spread=1.0)],
    ),
    _case(
        "full",
        "Gradients without causality, of one query and of more queries than keys.",
        lambda rng: [draw(rng, causal=False, T=T, S=S) for T, S in ((9, 9), (1, 7), (11, 4))],
    ),
    _case(
        "fewer-queries",
        "Gradients with fewer queries than keys.",
        lambda rng: [draw(rng, T=4, S=9), draw(rng, T=4, S=9, offset=1), draw(rng, T=1, S=40)],
    ),
    _case("offset-zero", "Gradients aligned top-left.", lambda rng: [draw(rng, T=4, S=9, offset=0)]),
    _case(
        "mask",
        "Gradients through a mask.",
        lambda rng: [draw(rng, causal=False, mask=some_mask(rng, 2, 4, 9, 9))],
    ),
    _case(
        "dead-rows",
        "Gradients where a mask leaves queries nothing to see.",
        _dead,
        NOTHING,
        "pytorch/pytorch#41508",
    ),
    _case(
        "dead-rows-before-keys",
        "Gradients of queries that come before all keys.",
        lambda rng: [draw(rng, T=9, S=4)],
        NOTHING,
    ),
    _case(
        "dead-rows-by-bias",
        "Gradients where a bias of −∞ leaves queries nothing to see.",
        _dead_by_bias,
        NOTHING,
    ),
    _case(
        "dead-rows-by-length",
        "Gradients where a batch row has no keys.",
        lambda rng: [draw(rng, lengths=np.array([0, 5])), draw(rng, causal=False, lengths=np.array([9, 0]))],
        NOTHING,
    ),
    *(
        _case(f"hidden-{bad}-{name}", f"Gradients with {bad} in keys and values {where}.", make, NOTHING)
        for name, where, hide in HIDDEN
        for bad, make in (
            ("nan", lambda rng, hide=hide: [hide(rng, np.nan)]),
            ("inf", lambda rng, hide=hide: [hide(rng, -np.inf)]),
        )
    ),
    _case("hidden-nan-queries", "Gradients with NaN in queries that see nothing.", _hidden_queries, NOTHING),
    _case(
        "grouped-heads",
        "Gradients of shared kv heads are sums over their query heads.",
        lambda rng: [draw(rng, H=6, G=2), draw(rng, H=5, G=1), draw(rng, H=3, G=3)],
    ),
    _case(
        "window",
        "Gradients through a window.",
        lambda rng: [draw(rng, window=3), draw(rng, T=4, S=12, window=3)],
    ),
    _case(
        "segments",
        "No gradient leaks from one packed document into another.",
        lambda rng: [draw(rng, segments=(documents(2, 2, 4, 3),) * 2)],
        "Documents do not see each other, in either direction.",
    ),
    _case(
        "padding",
        "Gradients of padding are 0.",
        lambda rng: [draw(rng, causal=False, starts=np.array([2, 0]), lengths=np.array([9, 6]))],
        NOTHING,
    ),
    _case(
        "scale",
        "Gradients have the scale in them.",
        lambda rng: [draw(rng, scale=0.9), draw(rng, D=40, E=8, spread=1.0)],
    ),
    _case(
        "softcap",
        "Gradients go through the softcap's derivative.",
        lambda rng: [draw(rng, softcap=1.5), draw(rng, softcap=1.5, scale=0.6)],
    ),
    _case(
        "bias-added",
        "Gradients of q, k and v where a bias is added.",
        lambda rng: [draw(rng, bias=normal(rng, 2, 4, 9, 9))],
    ),
    _case(
        "bias",
        "The bias's own gradient, summed over every axis that it is repeated along.",
        lambda rng: [
            draw(rng, bias=normal(rng, *shape))
            for shape in ((2, 4, 9, 9), (4, 9, 9), (9, 9), (2, 1, 1, 9), (1, 9))
        ],
        bias=True,
    ),
    _case(
        "bias-and-softcap",
        "The bias's own gradient does not go through the softcap.",
        lambda rng: [draw(rng, softcap=1.0, bias=normal(rng, 4, 9, 9))],
        bias=True,
    ),
    _case(
        "alibi",
        "Gradients of q, k and v where ALiBi is added.",
        lambda rng: [draw(rng, alibi=paper_slopes(4))],
    ),
    _case(
        "sinks",
        "Gradients where sinks are, and of the sinks.",
        lambda rng: [draw(rng, sinks=normal(rng, 4)), draw(rng, T=9, S=4, sinks=normal(rng, 4))],
        "A sink only takes: its gradient is minus the sum of its weight times δ.",
    ),
    _case(
        "lse",
        "The gradient arriving at lse.",
        lambda rng: [draw(rng), draw(rng, T=9, S=4), draw(rng, softcap=1.5, sinks=normal(rng, 4))],
        "∂lse/∂s is the weight: what is merged by lse is trained through it.",
        dlse=True,
    ),
    _case(
        "values-of-another-width",
        "Gradients where values are wider or narrower.",
        lambda rng: [draw(rng, D=8, E=24), draw(rng, D=24, E=5)],
    ),
    _case(
        "everything",
        "Gradients with all options together.",
        lambda rng: [
            draw(rng, T=9, S=12, **every_option(rng, 2, 4, 9, 12)),
            draw(rng, T=40, S=150, **every_option(rng, 2, 4, 40, 150)),
        ],
        bias=True,
    ),
    _case("large-scores", "Gradients where one key takes nearly all.", _large_scores),
    _case("float64", "Gradients in float64.", lambda rng: [draw(rng, dtype="float64", T=24, S=24, D=16)]),
    _case(
        "float16",
        "Gradients in float16.",
        lambda rng: [draw(rng, dtype="float16", T=24, S=24, D=16, spread=1.0)],
    ),
    _case(
        "bfloat16",
        "Gradients in bfloat16.",
        lambda rng: [draw(rng, dtype="bfloat16", T=24, S=24, D=16, spread=1.0)],
    ),
    _case("no-keys", "Gradients where there are no keys.", lambda rng: [draw(rng, S=0)], NOTHING),
    Case(
        "gradients/strided",
        "A gradient that arrives as one number shown as all, or permuted.",
        CHAIN,
        _strided,
        usual="memory is read as if it were contiguous",
    ),
)
