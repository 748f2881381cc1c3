"""Cases on what must not be read, what must be seen, and inputs that lie in memory as they please.

Shape legend: B batch, H query heads, T queries, S keys, D query/key width, E value width.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant.conformance.case import Case
from regardant.conformance.catalogue.inputs import documents, draw, normal, some_mask, spoil, with_arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from regardant.conformance.case import Call
    from regardant.problem import Array

UNREAD = (
    "What is invisible is never read into the arithmetic: padding and unfilled caches hold whatever was in memory, "
    "and 0 · NaN is NaN."
)
REPORT = "pytorch/pytorch#101967"


def _keys_hidden_by_mask(rng: np.random.Generator, bad: float, where: str = "kv") -> list[Call]:
    mask = some_mask(rng, 2, 1, 9, 9)
    mask[..., 4], mask[0, ..., 7] = False, False
    call = draw(rng, causal=False, mask=mask)
    unseen = ~mask.any(axis=(1, 2))
    return [spoil(call, unseen, bad, where)]


def _future(rng: np.random.Generator, bad: float) -> list[Call]:
    return [spoil(draw(rng, T=4, S=9, offset=2), np.arange(9) > 5, bad), _partly(rng, bad)]


def _partly(rng: np.random.Generator, bad: float) -> Call:
    # Key 40 is visible to some queries, of the same tile, and not to others.
    return spoil(draw(rng, B=1, T=70, S=70), np.arange(70) == 40, bad, "v")


def _behind_window(rng: np.random.Generator, bad: float) -> list[Call]:
    one = spoil(draw(rng, T=1, S=40, window=9), np.arange(40) < 31, bad)
    return [spoil(draw(rng, T=4, S=12, window=3), np.arange(12) < 6, bad), one]


def _padding(rng: np.random.Generator, bad: float) -> list[Call]:
    starts, lengths = np.array([3, 0]), np.array([9, 5])
    unseen = (np.arange(9) < starts[:, None]) | (np.arange(9) >= lengths[:, None])
    calls = [draw(rng, T=T, causal=False, starts=starts, lengths=lengths) for T in (9, 1)]
    causal = spoil(draw(rng, lengths=lengths), np.arange(9) >= lengths[:, None], bad)
    return [causal, *(spoil(call, unseen, bad) for call in calls)]


def _documents(rng: np.random.Generator, bad: float) -> list[Call]:
    ids = documents(2, 2, 4, 3)
    # Queries of the third document only, keys of all three.
    call = draw(rng, T=3, S=9, segments=(ids[:, 6:], ids))
    return [spoil(call, np.arange(9) < 6, bad)]


def _by_bias(rng: np.random.Generator, bad: float) -> list[Call]:
    bias = normal(rng, 9, 9)
    bias[:, [1, 6]] = -np.inf
    return [spoil(draw(rng, causal=False, bias=bias), np.isin(np.arange(9), (1, 6)), bad)]


def _bias_itself(rng: np.random.Generator) -> list[Call]:
    bias = normal(rng, 9, 9)
    ahead = np.where(np.tri(9, dtype=np.bool), bias, np.nan).astype(np.float32)
    infinite = np.where(np.tri(9, dtype=np.bool), bias, np.inf).astype(np.float32)
    return [draw(rng, bias=ahead), draw(rng, bias=infinite)]


def _bias_under_mask(rng: np.random.Generator) -> list[Call]:
    mask = some_mask(rng, 9, 9)
    bias = np.where(mask, normal(rng, 9, 9), np.nan).astype(np.float32)
    return [draw(rng, causal=False, mask=mask, bias=bias)]


def _huge_scores(rng: np.random.Generator, **options: Any) -> list[Call]:
    """Keys in the direction of the queries, and long, wherever no query sees them."""
    call = draw(rng, **options)
    unseen = np.arange(9) < 6 if "window" in options else np.arange(9) >= 6
    k = call.k_BGSD.copy()
    k[:, :, unseen] = 1e4 * np.sign(call.q_BHTD[:, ::2, -1:])
    return [with_arrays(call, k=k)]


def _same_without(rng: np.random.Generator) -> list[Call]:
    clean = draw(rng, T=20, S=40, lengths=np.array([33, 20]), offset=12)
    unseen = np.arange(40) >= np.array([[33], [20]])
    return [clean, spoil(clean, unseen, 7.0), spoil(clean, unseen, -300.0)]


def _nan_at(rng: np.random.Generator, where: str) -> list[Call]:
    situations: tuple[dict[str, Any], ...] = ({}, {"T": 4, "causal": False}, {"T": 20, "S": 20})
    calls = []
    for options in situations:
        call = draw(rng, **options)
        arrays = {"q": call.q_BHTD.copy(), "k": call.k_BGSD.copy(), "v": call.v_BGSE.copy()}
        arrays[where][0, :, 2] = np.nan
        calls.append(with_arrays(call, **{where: arrays[where]}))
    return calls


def _one_element(rng: np.random.Generator) -> list[Call]:
    call = draw(rng, T=40, S=40)
    v = call.v_BGSE.copy()
    v[0, 1, 17, 3] = np.nan
    return [with_arrays(call, v=v)]


def _infinite_value(rng: np.random.Generator) -> list[Call]:
    call = draw(rng, spread=0.5)
    v = call.v_BGSE.copy()
    v[0, 0, 3, 2], v[1, 1, 5, 0] = np.inf, -np.inf
    return [with_arrays(call, v=v)]


def _nan_bias(rng: np.random.Generator) -> list[Call]:
    bias = normal(rng, 9, 9)
    bias[4, 2] = np.nan
    return [draw(rng, bias=bias)]


HIDDEN = (
    Case(
        "hidden/nan-by-mask",
        "NaN in keys and values that a mask hides.",
        UNREAD,
        lambda rng: _keys_hidden_by_mask(rng, np.nan),
        report=REPORT,
    ),
    Case(
        "hidden/nan-in-values",
        "NaN in hidden values alone.",
        UNREAD,
        lambda rng: _keys_hidden_by_mask(rng, np.nan, "v"),
        report=REPORT,
    ),
    Case(
        "hidden/nan-in-keys",
        "NaN in hidden keys alone.",
        UNREAD,
        lambda rng: _keys_hidden_by_mask(rng, np.nan, "k"),
        report=REPORT,
    ),
    Case(
        "hidden/inf-by-mask",
        "+∞ in keys and values that a mask hides.",
        UNREAD,
        lambda rng: _keys_hidden_by_mask(rng, np.inf),
    ),
    Case(
        "hidden/minus-inf-by-mask",
        "−∞ in keys and values that a mask hides.",
        UNREAD,
        lambda rng: _keys_hidden_by_mask(rng, -np.inf),
    ),
    Case(
        "hidden/nan-in-the-future",
        "NaN in keys that come after all queries, or after some.",
        UNREAD,
        lambda rng: _future(rng, np.nan),
        report=REPORT,
    ),
    Case(
        "hidden/nan-in-padding",
        "NaN before starts and from lengths on.",
        UNREAD,
        lambda rng: _padding(rng, np.nan),
        report="Dao-AILab/flash-attention#2374",
    ),
    Case(
        "hidden/inf-in-padding",
        "−∞ before starts and from lengths on.",
        UNREAD,
        lambda rng: _padding(rng, -np.inf),
    ),
    Case(
        "hidden/nan-behind-the-window",
        "NaN in keys that no window reaches.",
        UNREAD,
        lambda rng: _behind_window(rng, np.nan),
    ),
    Case(
        "hidden/nan-in-other-documents",
        "NaN in documents that no query belongs to.",
        UNREAD,
        lambda rng: _documents(rng, np.nan),
    ),
    Case(
        "hidden/nan-by-bias",
        "NaN in keys and values that a bias of −∞ hides.",
        UNREAD,
        lambda rng: _by_bias(rng, np.nan),
    ),
    Case(
        "hidden/nan-in-the-bias", "NaN and +∞ in a bias where causality hides the key.", UNREAD, _bias_itself
    ),
    Case(
        "hidden/nan-in-the-bias-under-a-mask",
        "NaN in a bias where a mask hides the key.",
        UNREAD,
        _bias_under_mask,
    ),
    *(
        Case(
            f"hidden/huge-scores-{name}",
            f"Keys {where}, whose scores would be far above all others.",
            "They have no part in the row's maximum: with it, all visible weights would vanish.",
            functools.partial(_huge_scores, **options),
            usual="the row maximum is taken over hidden keys too",
        )
        for name, where, options in (
            ("by-mask", "that a mask hides", {"mask": np.tile(np.arange(9) < 6, (9, 1)), "causal": False}),
            ("in-padding", "from lengths on", {"lengths": np.array([6, 6]), "causal": False}),
            ("in-the-future", "that come after all queries", {"offset": 0, "T": 6}),
            ("behind-the-window", "that no window reaches", {"window": 2, "T": 2}),
        )
    ),
    Case(
        "hidden/same-bits",
        "Other finite numbers in what is hidden change no bit.",
        UNREAD,
        _same_without,
        usual="what is hidden is read: it changes bits",
        same_bits=True,
    ),
)

SEEN = "A NaN that is seen shows in every row that sees it, and in no other: it is neither hidden nor spread."
VISIBLE = (
    Case(
        "visible/nan-in-a-value",
        "A NaN in a value that some queries see.",
        SEEN,
        lambda rng: _nan_at(rng, "v"),
    ),
    Case(
        "visible/nan-in-a-key", "A NaN in a key that some queries see.", SEEN, lambda rng: _nan_at(rng, "k")
    ),
    Case(
        "visible/nan-in-a-query", "A NaN in one query stays in its row.", SEEN, lambda rng: _nan_at(rng, "q")
    ),
    Case("visible/nan-in-the-bias", "A NaN in a bias that one query sees stays in its row.", SEEN, _nan_bias),
    Case(
        "visible/nan-in-one-element",
        "A NaN in one element of a value stays in its column.",
        SEEN,
        _one_element,
    ),
    Case(
        "visible/inf-in-a-value",
        "An infinite value that some queries see.",
        "A mean with an infinite term is infinite, in the rows that see it and in no others.",
        _infinite_value,
    ),
)


def _laid_out(rng: np.random.Generator, lay: Callable[[Array], Array]) -> list[Call]:
    calls = []
    for T in (12, 1):
        call = draw(rng, T=T, S=12, causal=T > 1)
        q, k, v = (lay(array) for array in (call.q_BHTD, call.k_BGSD, call.v_BGSE))
        calls.append(with_arrays(call, q=q, k=k, v=v))
    return calls


def _permuted(array: Array) -> Array:
    """(B, T, H, D) in memory, as projections give it."""
    return np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)


def _transposed(array: Array) -> Array:
    return np.ascontiguousarray(array.swapaxes(2, 3)).swapaxes(2, 3)


def _backwards(array: Array) -> Array:
    """Negative strides along positions and width."""
    return np.ascontiguousarray(array[..., ::-1, ::-1])[..., ::-1, ::-1]


def _with_gaps(array: Array) -> Array:
    """Every third position and every other element of a larger array whose rest is NaN."""
    B, H, T, D = array.shape
    larger = np.full((B, H, 3 * T, 2 * D), np.nan, array.dtype)
    larger[..., ::3, ::2] = array
    return larger[..., ::3, ::2]


def _read_only(array: Array) -> Array:
    array = array.copy()
    array.flags.writeable = False
    return array


def _fused(rng: np.random.Generator) -> list[Call]:
    call = draw(rng, T=12, S=12)
    B, H, G, T, _, D, _ = call.sizes
    parts = (call.q_BHTD, call.k_BGSD, call.v_BGSE)
    fused = np.concatenate([part.swapaxes(1, 2).reshape(B, T, -1) for part in parts], axis=-1)
    cuts = np.split(fused, [H * D, (H + G) * D], axis=-1)
    q, k, v = (cut.reshape(B, T, -1, D).swapaxes(1, 2) for cut in cuts)
    return [with_arrays(call, q=q, k=k, v=v)]


def _repeated(rng: np.random.Generator) -> list[Call]:
    """Stride 0: one key/value head shown as four, one query as many, one key as all."""
    call = draw(rng, G=1)
    k, v = (np.broadcast_to(array, (2, 4, *array.shape[2:])) for array in (call.k_BGSD, call.v_BGSE))
    q = np.broadcast_to(call.q_BHTD[:, :, :1], call.q_BHTD.shape)
    same = np.broadcast_to(call.k_BGSD[:, :, :1], call.k_BGSD.shape)
    batch = np.broadcast_to(call.k_BGSD[:1], call.k_BGSD.shape)
    return [
        with_arrays(call, k=k, v=v),
        with_arrays(call, q=q),
        with_arrays(call, k=same),
        with_arrays(call, k=batch),
    ]


def _masks_laid_out(rng: np.random.Generator) -> list[Call]:
    spread = np.broadcast_to(some_mask(rng, 1, 9), (2, 4, 9, 9))
    turned = np.asfortranarray(some_mask(rng, 2, 4, 9, 9))
    back = np.ascontiguousarray(some_mask(rng, 9, 9)[::-1, ::-1])[::-1, ::-1]
    return [draw(rng, causal=False, mask=mask) for mask in (spread, turned, back)]


def _biases_laid_out(rng: np.random.Generator) -> list[Call]:
    spread = np.broadcast_to(normal(rng, 1, 9), (2, 4, 9, 9))
    turned = np.asfortranarray(normal(rng, 4, 9, 9))
    back = normal(rng, 9, 9)[::-1, ::-1]
    return [draw(rng, causal=False, bias=bias) for bias in (spread, turned, back)]


CONTIGUOUS = "memory is read as if it were contiguous"
LAYOUT = "Strides are how an array lies in memory; what it shows is what counts."
STRIDES = (
    *(
        Case(
            f"strides/{name}",
            tests,
            LAYOUT,
            functools.partial(_laid_out, lay=lay),
            report=report,
            usual=CONTIGUOUS,
            raising="writes into its inputs" if name == "read-only" else "strided views are not taken",
        )
        for name, tests, lay, report in (
            (
                "permuted",
                "Heads between positions in memory, as projections give them.",
                _permuted,
                "flagos-ai/FlagGems#5896",
            ),
            (
                "transposed",
                "Positions innermost in memory, width outside.",
                _transposed,
                "pytorch/pytorch#187506",
            ),
            ("negative", "Negative strides.", _backwards, ""),
            ("gaps", "Views with gaps that hold NaN.", _with_gaps, ""),
            ("read-only", "Arrays that must not be written.", _read_only, ""),
        )
    ),
    Case(
        "strides/fused-projections",
        "Queries, keys and values cut out of one array.",
        LAYOUT,
        _fused,
        usual=CONTIGUOUS,
    ),
    Case(
        "strides/broadcast",
        "Stride 0: one head, query or key shown as many.",
        LAYOUT,
        _repeated,
        usual=CONTIGUOUS,
    ),
    Case(
        "strides/mask",
        "Masks that are broadcast, transposed or reversed views.",
        LAYOUT,
        _masks_laid_out,
        usual=CONTIGUOUS,
    ),
    Case(
        "strides/bias",
        "Biases that are broadcast, transposed or reversed views.",
        LAYOUT,
        _biases_laid_out,
        usual=CONTIGUOUS,
    ),
)

CASES = (*HIDDEN, *VISIBLE, *STRIDES)
