"""What each option lets a query see, condition by condition, and the ways of getting it wrong.

Only `diagnosis` asks: what is right comes from the reference.

Shape legend: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regardant.conformance import arithmetic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regardant.conformance.case import Call
    from regardant.problem import Array

IGNORED = {
    "causal": "causal mask ignored",
    "window": "window ignored",
    "starts": "starts ignored: left padding is read",
    "lengths": "lengths ignored: right padding is read",
    "segments": "segments ignored: documents leak into each other",
    "mask": "mask ignored",
}


def conditions(call: Call, wrap: int | None = None) -> dict[str, Array]:
    """The conditions that a call sets, each (1 or B, 1 or H, 1 or T, S); a key is visible where all of them hold.

    With `wrap`, as they are for who counts keys from 0 again after so many.
    """
    problem = arithmetic.checked(call)
    p, j = _positions(call)
    j = j if wrap is None else j % wrap
    holds = {}
    if problem.causal:
        holds["causal"] = j <= p
    if problem.window is not None:
        holds["window"] = p - j < problem.window
    if "starts" in call.options:
        holds["starts"] = j >= problem.starts_B[:, None, None, None]
    if "lengths" in call.options:
        holds["lengths"] = j < problem.lengths_B[:, None, None, None]
    if problem.segments is not None:
        q_BT, k_BS = problem.segments
        holds["segments"] = (q_BT[:, :, None] == k_BS[:, None, :])[:, None]
    if problem.mask_BHTS is not None:
        holds["mask"] = problem.mask_BHTS
    if problem.bias_BHTS is not None and (problem.bias_BHTS == -np.inf).any():
        holds["bias"] = problem.bias_BHTS != -np.inf
    return {
        name: condition.reshape((1,) * (4 - condition.ndim) + condition.shape)
        for name, condition in holds.items()
    }


def _positions(call: Call) -> tuple[Array, Array]:
    _, _, _, T, S, _, _ = call.sizes
    return arithmetic.checked(call).offset + np.arange(T)[:, None], np.arange(S)


def mistaken(call: Call) -> Iterator[tuple[str, Array]]:
    """Every known way of seeing wrongly, with what is then visible, (B, H, T, S)."""
    holds = conditions(call)
    if call.sizes[4] > WRAP:
        yield "positions of keys wrap at 16 bits", _all(call, conditions(call, WRAP))
    # The plainest reading first: more than one mistake may give the same numbers.
    yield from _ignored(call, holds, [name for name in IGNORED if name != "causal"])
    for told, name, instead in _ways(call, holds):
        yield told, _all(call, holds | {name: instead})
    yield from _ignored(call, holds, ["causal"])
    if len(holds) > 1:
        either = np.zeros((1, 1, 1, 1), np.bool)
        for held in holds.values():
            either = either | held
        yield "conditions are joined by or instead of and", _all(call, {"either": either})
    yield from _of_dead_rows(call, holds)
    yield from _of_ends(call, holds)


def _ignored(call: Call, holds: dict[str, Array], names: list[str]) -> Iterator[tuple[str, Array]]:
    for name in names:
        if name in holds:
            yield IGNORED[name], _all(call, {other: held for other, held in holds.items() if other != name})


def _of_dead_rows(call: Call, holds: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    """What rows that see nothing may be taken to see."""
    seen = _all(call, holds)
    dead = ~seen.any(axis=-1, keepdims=True)
    if not dead.any():
        return
    yield "rows that see nothing give attention over all keys", seen | dead
    if "causal" in holds:
        yield (
            "rows that see nothing give attention over all keys before them",
            seen | (dead & holds["causal"]),
        )
    first = np.arange(seen.shape[-1]) == 0
    yield "rows that see nothing give the first value", seen | (dead & first)
    yield "rows that see nothing give the last value", seen | (dead & first[::-1])


# Blocks of keys that kernels work in.
BLOCKS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)

WRAP = 1 << 16

# Numbers of keys that an index of 8 or 16 bits, or a buffer, ends at.
LIMITS = (256, 1024, 32_768, 65_536)


def _of_ends(call: Call, holds: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    """Keys that are left out at either end."""
    seen = _all(call, holds)
    S = seen.shape[-1]
    j = np.arange(S)
    if S > 1:
        yield "the first key is left out", seen & (j > 0)
        yield "the last key is left out", seen & (j < S - 1)
    for block in BLOCKS:
        if S % block and block < S:
            yield (
                f"the last keys, those of a partial block of {block}, are left out",
                seen & (j < S // block * block),
            )
    for limit in LIMITS:
        if limit < S:
            yield f"keys from {limit:,} on are left out", seen & (j < limit)


def _all(call: Call, holds: dict[str, Array]) -> Array:
    B, H, _, T, S, _, _ = call.sizes
    visible = np.ones((B, H, T, S), np.bool)
    for held in holds.values():
        visible &= held
    return visible


def _ways(call: Call, holds: dict[str, Array]) -> Iterator[tuple[str, str, Array]]:
    """(what it is called, the condition, what it is mistaken for)."""
    if "causal" in holds:
        yield from _of_causality(call)
    if "window" in holds:
        yield from _of_windows(call)
    yield from _of_padding(call, holds)
    if "mask" in holds:
        yield from _of_masks(call, holds["mask"])
    if "segments" in holds:
        yield from _of_segments(call)


def _of_masks(call: Call, mask: Array) -> Iterator[tuple[str, str, Array]]:
    B, H, G, T, S, _, _ = call.sizes
    full = np.broadcast_to(mask, (B, H, T, S))
    yield "mask inverted: True taken for hidden", "mask", ~mask
    if B == H:
        yield "mask of the heads taken for one of the batch", "mask", full.swapaxes(0, 1)
    yield "the first batch row's mask is used for all", "mask", full[:1]
    yield "the first head's mask is used for all heads", "mask", full[:, :1]
    if G not in {0, H}:
        yield "masks are taken by kv head", "mask", full[:, np.arange(H) // (H // G)]
    if T == S:
        yield "mask transposed: queries and keys exchanged", "mask", full.swapaxes(2, 3)
    yield "the mask's first row is used for all queries", "mask", full[:, :, :1]


def _of_segments(call: Call) -> Iterator[tuple[str, str, Array]]:
    _, _, _, T, S, _, _ = call.sizes
    q_BT, k_BS = (np.asarray(ids) for ids in call.options["segments"])

    def equal(q: Array, k: Array) -> Array:
        return np.asarray(q[:, None, :, None] == k[:, None, None, :])

    yield (
        "earlier documents are visible to later ones",
        "segments",
        (q_BT[:, :, None] >= k_BS[:, None])[:, None],
    )
    yield (
        "later documents are visible to earlier ones",
        "segments",
        (q_BT[:, :, None] <= k_BS[:, None])[:, None],
    )
    yield "the first batch row's documents are used for all", "segments", equal(q_BT[:1], k_BS[:1])
    if T <= S:
        yield "queries are given the ids of the first keys", "segments", equal(k_BS[:, :T], k_BS)
        yield "queries are given the ids of the last keys", "segments", equal(k_BS[:, S - T :], k_BS)
    for bits in (32, 16, 8):
        kept = (ids.astype(f"int{bits}") for ids in (q_BT, k_BS))
        yield f"document ids are kept in {bits} bits", "segments", equal(*kept)
    yield (
        "document ids are kept in float32",
        "segments",
        equal(q_BT.astype(np.float32), k_BS.astype(np.float32)),
    )
    if T == S and (q_BT == k_BS).all():
        runs = np.cumsum(np.diff(k_BS, axis=-1, prepend=k_BS[:, :1]) != 0, axis=-1)
        yield "a document that comes back is taken for another", "segments", equal(runs, runs)


def _of_causality(call: Call) -> Iterator[tuple[str, str, Array]]:
    _, _, _, T, S, _, _ = call.sizes
    p, j = _positions(call)
    i = np.arange(T)[:, None]
    offset = int(p[0, 0]) if T else 0
    if offset != 0:
        aligned = (
            "causal mask aligned top-left" if offset == S - T else "offset ignored: positions begin at 0"
        )
        yield aligned, "causal", j <= i
    if offset != S - T:
        yield "causal mask aligned bottom-right, whatever the offset", "causal", j <= i + S - T
    yield "causal mask one key too wide", "causal", j <= p + 1
    yield "causal mask hides a query's own key", "causal", j < p
    yield "causal mask reversed: the past is hidden", "causal", j >= p
    yield "positions are counted from the end: the first query stands at the last key", "causal", j <= p[::-1]
    if "lengths" in call.options:
        ends = np.asarray(call.options["lengths"])[:, None, None, None]
        yield "lengths move the diagonal", "causal", j <= i + ends - T


def _of_windows(call: Call) -> Iterator[tuple[str, str, Array]]:
    p, j = _positions(call)
    window = call.options["window"]
    yield "window one key too wide", "window", p - j <= window
    yield "window one key too narrow", "window", p - j < window - 1
    yield "window also cuts the future", "window", np.abs(p - j) < window
    yield "window counted without the offset", "window", p - p[:1] - j < window
    yield "window counted from the first key: the same keys for all queries", "window", j < window
    last = call.sizes[4] - 1
    yield "window counted from the last key: the same keys for all queries", "window", last - j < window
    yield "window divided between past and future", "window", np.abs(p - j) <= window // 2
    yield "window bounds the future, not the past", "window", j - p < window
    yield "window counted in blocks, not from each query", "window", p // window == j // window


def _of_padding(call: Call, holds: dict[str, Array]) -> Iterator[tuple[str, str, Array]]:
    p, j = _positions(call)
    S = call.sizes[4]
    for name in ("starts", "lengths"):
        if name not in holds:
            continue
        bounds = np.asarray(call.options[name])
        for told, moved in (
            (f"{name} one too high", bounds + 1),
            (f"{name} one too low", bounds - 1),
            (f"the first batch row's {name} are used for all", np.full_like(bounds, bounds[0])),
            (f"the last batch row's {name} are used for all", np.full_like(bounds, bounds[-1])),
            (f"the largest of {name} is used for all batch rows", np.full_like(bounds, bounds.max())),
            (f"the smallest of {name} is used for all batch rows", np.full_like(bounds, bounds.min())),
            (f"{name} of the next batch row are used", np.roll(bounds, -1)),
            (f"{name} of the batch row before are used", np.roll(bounds, 1)),
            (f"{name} of the batch rows in reversed order", bounds[::-1]),
        ):
            at = moved[:, None, None, None]
            yield told, name, j >= at if name == "starts" else j < at
        at = bounds[:, None, None, None]
        other = j < S - at if name == "starts" else j >= S - at
        yield f"{name} taken for the other side: {name} hide the wrong end", name, other
        yield f"{name} inverted: padding alone is visible", name, j < at if name == "starts" else j >= at
        inside = p >= at if name == "starts" else p < at
        yield f"{name} hide queries too, not keys alone", name, holds[name] & inside
    if "starts" in holds and "lengths" in holds:
        ends = (np.asarray(call.options["starts"]) + np.asarray(call.options["lengths"]))[:, None, None, None]
        yield "lengths counted from starts", "lengths", j < ends
