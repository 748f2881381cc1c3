"""Cases on what a query sees: rows that see nothing, alignment, chunks, masks, windows, documents, padding.

Shape legend: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regardant.conformance.case import Case
from regardant.conformance.catalogue.inputs import (
    documents,
    draw,
    every_option,
    normal,
    some_mask,
    with_arrays,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regardant.conformance.case import Call
    from regardant.problem import Array

DEAD = (
    "out is 0: there is nothing to mix. NaN would spread to the whole model in the next layer, and the mean of V "
    "would be made of what was hidden."
)
BOTTOM_RIGHT = (
    "The last query sees the last key (offset S − T): new tokens come after the cached ones, so that a cache gives "
    "what the whole sequence gives."
)
WINDOW = "Query p sees W keys, its own included: p − W < j ≤ p. The models that use windows were trained so."
AND = "All conditions hold together; giving one does not switch off another."


def _dead_by_mask(rng: np.random.Generator) -> list[Call]:
    mask = some_mask(rng, 2, 1, 9, 9)
    mask[0, 0, [2, 5]], mask[1, 0, 8] = False, False
    return [draw(rng, causal=False, mask=mask), draw(rng, causal=False, mask=np.zeros((9, 9), np.bool))]


def _dead_by_mask_and_causality(rng: np.random.Generator) -> list[Call]:
    mask = np.ones((1, 1, 9, 9), np.bool)
    mask[..., :3] = False
    return [draw(rng, mask=mask)]


def _dead_among_live(rng: np.random.Generator) -> list[Call]:
    # Rows of one tile, in two batch rows: all dead, and one in three dead.
    mask = np.ones((2, 1, 70, 150), np.bool)
    mask[0], mask[1, 0, ::3] = False, False
    return [draw(rng, T=70, S=150, causal=False, mask=mask)]


def _dead_by_bias(rng: np.random.Generator) -> list[Call]:
    bias = normal(rng, 1, 1, 9, 9)
    bias[..., [1, 4], :] = -np.inf
    return [draw(rng, causal=False, bias=bias)]


def _dead_by_window(rng: np.random.Generator) -> list[Call]:
    return [draw(rng, offset=9, window=5), draw(rng, offset=40, window=3)]


DEAD_ROWS = (
    Case(
        "dead-rows/mask",
        "A query whose row of the mask is all False gives 0.",
        DEAD,
        _dead_by_mask,
        report="pytorch/pytorch#103963",
    ),
    Case(
        "dead-rows/mask-and-causality",
        "A query gives 0 when the mask hides all that causality leaves it.",
        DEAD,
        _dead_by_mask_and_causality,
        report="onnx/onnx#8068",
    ),
    Case(
        "dead-rows/among-live-ones",
        "Dead rows beside live ones in the same tile, and a whole batch row of them.",
        f"{DEAD} Their neighbours are what they are without them.",
        _dead_among_live,
    ),
    Case(
        "dead-rows/more-queries-than-keys",
        "With more queries than keys, those before the first key give 0.",
        f"{BOTTOM_RIGHT} The first T − S queries come before any key. {DEAD}",
        lambda rng: [draw(rng, T=9, S=4)],
        report="Dao-AILab/flash-attention#1778",
    ),
    Case(
        "dead-rows/length-zero",
        "A batch row of length 0 gives 0 everywhere.",
        DEAD,
        lambda rng: [draw(rng, B=3, lengths=np.array([9, 0, 4]))],
    ),
    Case(
        "dead-rows/left-padding",
        "Queries that lie in the left padding give 0.",
        DEAD,
        lambda rng: [draw(rng, starts=np.array([4, 0])), draw(rng, starts=np.array([9, 2]))],
        report="pytorch/pytorch#103749",
    ),
    Case(
        "dead-rows/segments",
        "A query whose document has no keys gives 0.",
        DEAD,
        lambda rng: [draw(rng, causal=False, segments=(documents(2, 3, 3, 3), documents(2, 5, 0, 4)))],
    ),
    Case("dead-rows/window", "A query whose window lies beyond all keys gives 0.", DEAD, _dead_by_window),
    Case(
        "dead-rows/bias",
        "A query whose biases are all −∞ gives 0.",
        f"A bias of −∞ hides its key as a mask does. {DEAD}",
        _dead_by_bias,
        report="pytorch/pytorch#41508",
    ),
    Case(
        "dead-rows/sinks",
        "A query that sees nothing but has a sink gives 0, and lse −∞.",
        "A sink has no value to give, and a row is dead or it is not: its lse is −∞, not the sink's logit.",
        lambda rng: [draw(rng, lse=True, lengths=np.array([0, 5]), sinks=normal(rng, 4), offset=-2)],
    ),
    Case(
        "dead-rows/lse",
        "A query that sees nothing has lse −∞.",
        "log of an empty sum is −∞: with it, merging such a part with another gives the other.",
        lambda rng: [
            draw(rng, lse=True, causal=False, mask=np.zeros((9, 9), np.bool)),
            draw(rng, lse=True, causal=False, mask=(np.arange(9) % 2 > 0)[:, None]),
        ],
    ),
    Case(
        "dead-rows/one-query",
        "In decoding, a batch row without keys gives 0.",
        DEAD,
        lambda rng: [draw(rng, T=1, S=12, B=3, causal=False, lengths=np.array([12, 0, 3]))],
    ),
    Case(
        "dead-rows/no-keys",
        "With no keys at all, out is 0.",
        DEAD,
        lambda rng: [draw(rng, S=0)],
        raising="axes of length 0 are not taken",
    ),
)

ALIGNMENT = (
    Case(
        "alignment/square",
        "As many queries as keys: query i sees keys 0 … i.",
        "Causality: a token sees itself and what came before.",
        lambda rng: [draw(rng)],
    ),
    Case(
        "alignment/fewer-queries",
        "Fewer queries than keys: the last query sees the last key.",
        BOTTOM_RIGHT,
        lambda rng: [draw(rng, T=4, S=9), draw(rng, T=37, S=150)],
        report="pytorch/pytorch#144858",
    ),
    Case(
        "alignment/more-queries",
        "More queries than keys: the last query sees the last key.",
        BOTTOM_RIGHT,
        lambda rng: [draw(rng, T=9, S=7), draw(rng, T=150, S=37)],
        report="Dao-AILab/flash-attention#517",
    ),
    Case(
        "alignment/one-query",
        "One query over many keys sees all of them.",
        BOTTOM_RIGHT,
        lambda rng: [draw(rng, T=1, S=9), draw(rng, T=1, S=300)],
        report="microsoft/onnxruntime#29020",
    ),
    Case(
        "alignment/one-query-in-between",
        "One query among many keys, with an offset: those ahead of it are hidden.",
        "The offset says where a query stands, also where it is the only one.",
        lambda rng: [draw(rng, T=1, S=9, offset=3), draw(rng, T=1, S=300, offset=130)],
    ),
    Case(
        "alignment/top-left",
        "With offset 0, query i sees keys 0 … i, whatever the number of keys.",
        "The offset says how many keys come before the first query; 0 says none.",
        lambda rng: [draw(rng, T=4, S=9, offset=0), draw(rng, T=40, S=150, offset=0)],
    ),
    Case(
        "alignment/top-left-more-queries",
        "With offset 0 and more queries than keys, the last queries see all keys.",
        "j ≤ offset + i holds for every key there.",
        lambda rng: [draw(rng, T=9, S=4, offset=0)],
    ),
    Case(
        "alignment/offset",
        "An offset between, beyond and before: query i sees keys j ≤ offset + i.",
        "A chunk of queries may lie anywhere in a longer sequence.",
        lambda rng: [draw(rng, T=5, S=12, offset=offset) for offset in (3, 9, 20, -2)],
    ),
    Case(
        "alignment/full",
        "Without causality every query sees every key, whatever their numbers.",
        "Cross-attention has no diagonal.",
        lambda rng: [draw(rng, T=T, S=S, causal=False) for T, S in ((5, 11), (11, 5), (1, 7), (70, 150))],
    ),
)


def _chunks(rng: np.random.Generator, ends: Sequence[int], **options: object) -> list[Call]:
    whole = draw(rng, T=ends[-1], S=ends[-1], **options)  # type: ignore[arg-type]
    calls = []
    for begin, end in zip((0, *ends), ends, strict=False):
        q, k, v = whole.q_BHTD[:, :, begin:end], whole.k_BGSD[:, :, :end], whole.v_BGSE[:, :, :end]
        calls.append(with_arrays(whole, q=q, k=k, v=v))
    return calls


def _end_to_end(results: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    return {"out": np.concatenate([result["out"] for result in results], axis=2)}


def _cache_with_room(rng: np.random.Generator) -> list[Call]:
    # 20 slots, of which 7 and then 8 are filled; what is behind is whatever was in memory.
    call = draw(rng, T=3, S=20, offset=4)
    k, v = call.k_BGSD.copy(), call.v_BGSE.copy()
    k[:, :, 7:], v[:, :, 7:] = 1e4, np.nan
    return [with_arrays(call, k=k, v=v)]


def _halves(rng: np.random.Generator) -> list[Call]:
    whole = _whole_of_halves(rng)
    parts = (slice(0, 7), slice(7, None))
    return [with_arrays(whole, k=whole.k_BGSD[:, :, at], v=whole.v_BGSE[:, :, at]) for at in parts]


def _whole_of_halves(rng: np.random.Generator) -> Call:
    return draw(rng, T=6, S=24, causal=False, lse=True)


def _merge(results: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    first = results[0]
    lses = [result["lse"].astype(np.float64) for result in results]
    lse = np.logaddexp(*lses)
    out = sum(
        np.exp(part - lse)[..., None] * result["out"] for part, result in zip(lses, results, strict=True)
    )
    return {"out": np.asarray(out).astype(first["out"].dtype), "lse": lse.astype(first["lse"].dtype)}


CHUNKED = "The past of a causal sequence does not change, so that pieces and the whole give the same."
CHUNKS = (
    Case(
        "chunks/pieces",
        "A sequence in pieces over a growing cache gives what the whole gives.",
        CHUNKED,
        lambda rng: _chunks(rng, (5, 6, 40, 70)),
        join=_end_to_end,
        whole=lambda rng: draw(rng, T=70, S=70),
    ),
    Case(
        "chunks/token-by-token",
        "A sequence one token at a time over a growing cache gives what the whole gives.",
        CHUNKED,
        lambda rng: _chunks(rng, range(1, 18)),
        join=_end_to_end,
        whole=lambda rng: draw(rng, T=17, S=17),
        report="pytorch/pytorch#144858",
    ),
    Case(
        "chunks/window",
        "With a window, pieces give what the whole gives.",
        CHUNKED,
        lambda rng: _chunks(rng, (5, 6, 20, 33), window=4),
        join=_end_to_end,
        whole=lambda rng: draw(rng, T=33, S=33, window=4),
    ),
    Case(
        "chunks/cache-with-room",
        "A cache longer than what is filled, with an offset: the rest of it is never read.",
        "The offset says where the queries stand; keys beyond them are the future, whatever lies there.",
        _cache_with_room,
        report="Dao-AILab/flash-attention#1745",
    ),
    Case(
        "chunks/merge",
        "Two parts of the keys, merged by their lse, give what all keys give.",
        "lse is the natural logarithm of a part's denominator, so that e to its power weighs the part.",
        _halves,
        join=_merge,
        whole=_whole_of_halves,
        report="sgl-project/sglang#40903",
    ),
)


def _first_shown(rng: np.random.Generator, *shape: int) -> Array:
    """A mask that shows the first key to all, so that none is left with nothing by causality."""
    mask = some_mask(rng, *shape)
    mask[..., 0] = True
    return mask


def _mask_shapes(rng: np.random.Generator) -> list[Call]:
    shapes = (
        (9, 9),
        (1, 9),
        (9, 1),
        (4, 1, 9),
        (4, 9, 9),
        (2, 1, 1, 9),
        (1, 4, 9, 9),
        (2, 4, 9, 1),
        (1, 1, 1, 1),
    )
    return [draw(rng, causal=False, mask=some_mask(rng, *shape)) for shape in shapes]


def _square_masks(rng: np.random.Generator) -> list[Call]:
    # Batch, heads, queries and keys all 3: an axis taken for another has the right length.
    shapes = ((3, 3, 3), (3, 1, 1, 3), (1, 3, 3, 1), (3, 3), (3, 1, 3, 3))
    masks = [rng.random(shape) < 0.5 for shape in shapes]
    for mask in masks:
        mask.reshape(-1)[:: 3 if mask.shape[-1] == 3 else 1] = True
    return [draw(rng, B=3, H=3, G=3, T=3, S=3, causal=False, mask=mask) for mask in masks]


def _tiled(rng: np.random.Generator, T: int, S: int) -> Array:
    mask = some_mask(rng, 2, 1, T, S)
    mask[0, :, :, 64:192], mask[1, :, :32, 1:256] = False, False
    mask[..., 0] = True
    return mask


def _permuted(rng: np.random.Generator) -> list[Call]:
    mask = np.tril(np.ones((20, 20), np.bool))
    call = draw(rng, T=20, S=20, causal=False, mask=mask)
    order = rng.permutation(20)
    k, v = call.k_BGSD[:, :, order], call.v_BGSE[:, :, order]
    return [call, with_arrays(call.but(mask=mask[:, order]), k=k, v=v)]


MASKS = (
    Case(
        "mask/polarity",
        "True in a boolean mask is visible.",
        "One polarity everywhere; torch's scaled_dot_product_attention, ONNX and JAX have the same.",
        lambda rng: [draw(rng, causal=False, mask=some_mask(rng, 2, 4, 9, 9))],
    ),
    Case(
        "mask/broadcast",
        "A mask of any shape that broadcasts to (B, H, T, S), by NumPy's rule.",
        "Axes are matched from the last: (H, T, S) is for heads, and (T, 1) for queries.",
        _mask_shapes,
        raising="masks do not broadcast along every axis",
    ),
    Case(
        "mask/axes-of-one-length",
        "Masks of few axes where batch, heads, queries and keys are all of one length.",
        "Axes are matched from the last, even where another one would fit.",
        _square_masks,
        raising="masks do not broadcast along every axis",
    ),
    Case(
        "mask/and-causality",
        "A mask and causality together.",
        AND,
        lambda rng: [
            draw(rng, mask=_first_shown(rng, 2, 1, 9, 9)),
            draw(rng, T=70, S=70, mask=_first_shown(rng, 70, 70)),
        ],
    ),
    Case(
        "mask/all-visible",
        "A mask that shows everything leaves causality as it is.",
        AND,
        lambda rng: [
            draw(rng, mask=np.ones((9, 9), np.bool)),
            draw(rng, mask=np.ones((2, 4, 9, 9), np.bool)),
        ],
    ),
    Case(
        "mask/over-a-cache",
        "A mask and causality together, with fewer queries than keys.",
        f"{AND} {BOTTOM_RIGHT}",
        lambda rng: [
            draw(rng, T=4, mask=_first_shown(rng, 4, 9)),
            draw(rng, T=40, S=150, mask=_first_shown(rng, 40, 150)),
        ],
    ),
    Case(
        "mask/and-bias",
        "A mask and a bias together.",
        "The bias is added to the scores that the mask leaves.",
        lambda rng: [draw(rng, causal=False, mask=some_mask(rng, 9, 9), bias=normal(rng, 4, 9, 9))],
    ),
    Case(
        "mask/one-query",
        "In decoding, each batch row and head with a mask of its own.",
        AND,
        lambda rng: [
            draw(rng, T=1, S=12, causal=False, mask=some_mask(rng, 2, 4, 1, 12)),
            draw(rng, T=1, S=300, causal=False, mask=some_mask(rng, 2, 1, 1, 300)),
        ],
    ),
    Case(
        "mask/and-padding",
        "A mask, lengths and starts together.",
        AND,
        lambda rng: [
            draw(
                rng,
                mask=some_mask(rng, 2, 4, 9, 9),
                lengths=np.array([7, 9]),
                starts=np.array([0, 2]),
                causal=causal,
            )
            for causal in (False, True)
        ],
    ),
    Case(
        "mask/tiles",
        "A dense mask over several tiles, of which some are wholly hidden.",
        "Skipping a tile that is hidden must not skip its neighbour.",
        lambda rng: [
            draw(rng, T=90, S=300, causal=False, mask=_tiled(rng, 90, 300)),
            draw(rng, T=280, S=280, mask=_tiled(rng, 280, 280)),
        ],
    ),
    Case(
        "mask/order-of-keys",
        "Keys, values and the mask's columns in another order give the same.",
        "A sum does not depend on the order of its terms; what is visible is the mask's business alone.",
        _permuted,
    ),
    Case(
        "mask/everything",
        "All options together.",
        AND,
        lambda rng: [
            draw(rng, T=9, S=12, **every_option(rng, 2, 4, 9, 12)),
            draw(rng, T=1, S=12, **every_option(rng, 2, 4, 1, 12)),
            draw(rng, T=70, S=280, **every_option(rng, 2, 4, 70, 280)),
        ],
    ),
)


WINDOWS = (
    Case(
        "window/width",
        "A window of W shows W keys, a query's own included.",
        WINDOW,
        lambda rng: [draw(rng, window=3), draw(rng, T=40, S=40, window=8)],
        report="huggingface/transformers#39408",
    ),
    Case(
        "window/of-one",
        "A window of 1 shows a query's own key alone.",
        WINDOW,
        lambda rng: [draw(rng, window=1)],
    ),
    Case(
        "window/with-offset",
        "With a cache, the window is counted from each query's position.",
        WINDOW,
        lambda rng: [draw(rng, T=4, S=12, window=3), draw(rng, T=5, S=12, window=4, offset=2)],
    ),
    Case(
        "window/one-query",
        "In decoding, one query sees the last W keys.",
        WINDOW,
        lambda rng: [draw(rng, T=1, S=12, window=4), draw(rng, T=1, S=300, window=130)],
        report="ml-explore/mlx-lm#390",
    ),
    Case(
        "window/one-query-in-between",
        "One query among many keys, with an offset and a window: W keys up to its own.",
        WINDOW,
        lambda rng: [draw(rng, T=1, S=12, window=4, offset=6), draw(rng, T=1, S=300, window=60, offset=130)],
    ),
    Case(
        "window/full",
        "Without causality, a window bounds the past and leaves the future visible.",
        "window bounds p − j from above and nothing else; causality is another option.",
        lambda rng: [draw(rng, window=3, causal=False), draw(rng, T=4, S=12, window=2, causal=False)],
    ),
    Case(
        "window/wider-than-the-keys",
        "A window wider than all keys changes nothing.",
        WINDOW,
        lambda rng: [draw(rng, window=9), draw(rng, window=1000)],
    ),
    Case(
        "window/tiles",
        "Windows that begin and end within tiles.",
        WINDOW,
        lambda rng: [draw(rng, T=T, S=300, window=W) for T, W in ((300, 100), (300, 64), (300, 17))],
    ),
    Case(
        "window/by-itself",
        "A window is honoured when there is neither a mask nor causality.",
        "No option may depend on another being given.",
        lambda rng: [draw(rng, H=2, G=2, T=12, S=12, window=5, causal=False)],
        report="jax-ml/jax#32300",
    ),
    Case(
        "window/and-padding",
        "A window and padding together.",
        AND,
        lambda rng: [draw(rng, T=5, window=6, starts=np.array([3, 0]), lengths=np.array([9, 6]))],
    ),
)


def _long_ids() -> tuple[Array, Array]:
    ids = documents(2, 30, 35, 25)
    return ids, ids


SEGMENTS = (
    Case(
        "segments/packed",
        "Documents packed into one row see themselves alone.",
        "Otherwise the end of one document predicts the beginning of another.",
        lambda rng: [
            draw(rng, segments=(documents(2, 2, 4, 3),) * 2),
            draw(rng, T=90, S=90, segments=_long_ids()),
        ],
        report="huggingface/nanoVLM#204",
    ),
    Case(
        "segments/full",
        "Packed documents without causality.",
        AND,
        lambda rng: [draw(rng, causal=False, segments=(documents(2, 2, 4, 3),) * 2)],
    ),
    Case(
        "segments/ids-in-any-order",
        "Ids that are negative, large, out of order and come back.",
        "Ids are names, not numbers: equal or not is all that counts.",
        lambda rng: [
            draw(rng, segments=(np.array([[5, -1, -1, 2**40, 5, 0, 0, 5, -1]] * 2),) * 2),
            draw(rng, segments=(np.array([[2**24, 2**24 + 1, 7, 2**24, 2**32 + 7, 7, 256, 0, 7]] * 2),) * 2),
        ],
    ),
    Case(
        "segments/over-a-cache",
        "Fewer queries than keys, each with ids of its own.",
        AND,
        lambda rng: [draw(rng, T=4, S=9, segments=(documents(2, 1, 3), documents(2, 4, 5)))],
    ),
    Case(
        "segments/one-query",
        "In decoding, one query sees the keys of its own document.",
        AND,
        lambda rng: [draw(rng, T=1, S=9, segments=(documents(2, 1), documents(2, 4, 5)))],
    ),
    Case(
        "segments/and-window",
        "Documents and a window together.",
        AND,
        lambda rng: [draw(rng, window=2, segments=(documents(2, 2, 4, 3),) * 2)],
    ),
)


PADDING = (
    Case(
        "padding/right",
        "Keys from lengths[b] on are invisible.",
        "They are padding: what is in them belongs to no sequence.",
        lambda rng: [draw(rng, lengths=np.array([5, 8])), draw(rng, causal=False, lengths=np.array([1, 9]))],
    ),
    Case(
        "padding/left",
        "Keys before starts[b] are invisible.",
        "They are padding: what is in them belongs to no sequence.",
        lambda rng: [
            draw(rng, causal=False, starts=starts) for starts in (np.array([3, 1]), np.array([8, 0]))
        ],
    ),
    Case(
        "padding/both",
        "Padding on both sides; lengths are counted from the first key, not from starts.",
        AND,
        lambda rng: [draw(rng, starts=np.array([2, 1]), lengths=np.array([6, 9]), causal=False)],
    ),
    Case(
        "padding/does-not-move-the-diagonal",
        "Lengths and starts leave the causal diagonal where it is.",
        "The offset alone says where queries stand, the same for every batch row.",
        lambda rng: [
            draw(rng, T=4, S=9, lengths=np.array([6, 9])),
            draw(rng, T=4, S=9, starts=np.array([4, 0])),
        ],
    ),
    Case(
        "padding/one-query",
        "In decoding, each batch row sees its own part of the cache.",
        AND,
        lambda rng: [
            draw(rng, T=1, S=12, B=3, causal=False, lengths=np.array([4, 12, 1])),
            draw(rng, T=1, S=300, B=3, causal=False, lengths=np.array([257, 300, 13])),
        ],
    ),
    Case(
        "padding/one-query-left",
        "In decoding, each batch row's cache begins behind its own padding.",
        AND,
        lambda rng: [
            draw(rng, T=1, S=12, B=3, causal=False, starts=np.array([4, 0, 11])),
            draw(rng, T=1, S=300, B=3, causal=False, starts=np.array([257, 0, 13])),
        ],
    ),
    Case(
        "padding/tiles",
        "Padding that begins and ends within tiles.",
        AND,
        lambda rng: [
            draw(
                rng,
                B=3,
                T=90,
                S=290,
                causal=causal,
                starts=np.array([0, 65, 130]),
                lengths=np.array([257, 290, 131]),
            )
            for causal in (True, False)
        ],
    ),
)

CASES = (*DEAD_ROWS, *ALIGNMENT, *CHUNKS, *MASKS, *WINDOWS, *SEGMENTS, *PADDING)
