"""Cases on shapes: shared heads, widths, sizes around tiles, empty axes, batches, repeats, and what is very long.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from regardant.conformance.case import Call, Case
from regardant.conformance.catalogue.inputs import draw, normal, paper_slopes, some_mask, with_arrays

if TYPE_CHECKING:
    from regardant.problem import Array

REPEAT = "Query head h reads kv head h // (H // G): each kv head serves neighbours (repeat, not tile)."
HEADS = (
    Case(
        "heads/grouped",
        "Six query heads over two kv heads, eight over four, twelve over three.",
        REPEAT,
        lambda rng: [draw(rng, H=H, G=G) for H, G in ((6, 2), (8, 4), (12, 3))],
        report="onnx/onnx#7274",
    ),
    Case(
        "heads/grouped-decoding",
        "Grouped heads with one query over many keys.",
        REPEAT,
        lambda rng: [draw(rng, H=H, G=G, T=1, S=150, causal=False) for H, G in ((6, 2), (8, 4), (12, 3))],
        report="onnx/onnx#7274",
    ),
    Case(
        "heads/one-kv-head",
        "Many query heads over one kv head.",
        REPEAT,
        lambda rng: [draw(rng, H=5, G=1), draw(rng, H=5, G=1, T=1, S=70, causal=False)],
    ),
    Case(
        "heads/each-its-own",
        "As many kv heads as query heads; batch and heads are not exchanged.",
        REPEAT,
        lambda rng: [draw(rng, B=3, H=5, G=5), draw(rng, B=4, H=1, G=1), draw(rng, B=1, H=7, G=7)],
    ),
    Case(
        "heads/with-mask-of-each",
        "Grouped heads, each query head with its own mask.",
        "Masks belong to query heads, not to kv heads.",
        lambda rng: [draw(rng, H=6, G=2, causal=False, mask=some_mask(rng, 2, 6, 9, 9))],
    ),
    Case(
        "heads/with-bias-of-each",
        "Grouped heads, each query head with its own bias.",
        "Biases belong to query heads, not to kv heads.",
        lambda rng: [draw(rng, H=6, G=2, causal=False, bias=2 * normal(rng, 6, 9, 9))],
    ),
    Case(
        "heads/with-sink-of-each",
        "Grouped heads, each query head with its own sink.",
        "Sinks belong to query heads, not to kv heads.",
        lambda rng: [draw(rng, H=6, G=2, sinks=2 * normal(rng, 6))],
    ),
    Case(
        "heads/with-slope-of-each",
        "Grouped heads, each query head with its own slope.",
        "Slopes belong to query heads, not to kv heads.",
        lambda rng: [draw(rng, H=6, G=2, alibi=paper_slopes(6))],
    ),
)

ANY = "Any D and E of at least 1, whether a kernel's tiles divide them or not."


def _wide(rng: np.random.Generator, D: int) -> list[Call]:
    return [draw(rng, D=D, T=T, S=40, spread=1.0, causal=False) for T in (40, 33, 1)]


WIDTHS = (
    *(
        Case(
            f"widths/D{D}",
            f"Queries, keys and values {D} wide.",
            ANY,
            functools.partial(_wide, D=D),
            raising=f"a width of {D} is refused",
        )
        for D in (1, 7, 56, 80, 192, 320, 512)
    ),
    Case(
        "widths/values-of-another-width",
        "Values wider and narrower than queries and keys.",
        ANY,
        lambda rng: [
            draw(rng, D=D, E=E, T=T, causal=T == 9)
            for D, E in ((8, 24), (24, 8), (64, 1), (1, 3))
            for T in (9, 1)
        ],
        raising="values must be as wide as keys",
    ),
)


def _edges(rng: np.random.Generator, *, causal: bool) -> list[Call]:
    sizes = (
        (1, 1),
        (2, 3),
        (15, 17),
        (16, 16),
        (31, 33),
        (63, 65),
        (64, 64),
        (65, 63),
        (127, 129),
        (128, 128),
        (129, 257),
        (5, 255),
        (5, 256),
        (3, 513),
        (3, 1025),
        (257, 256),
    )
    return [draw(rng, B=1, H=2, G=1, T=T, S=S, D=5, causal=causal) for T, S in sizes]


def _few_queries(rng: np.random.Generator) -> list[Call]:
    return [
        draw(rng, B=1, T=T, S=S, D=16, causal=False)
        for T, S in ((1, 511), (1, 513), (2, 1200), (3, 2100), (7, 700), (17, 90))
    ]


SIZES = (
    Case(
        "sizes/tile-edges",
        "Numbers of queries and keys on and around powers of two, without causality.",
        "The last, partial tile counts as the others do.",
        lambda rng: _edges(rng, causal=False),
        usual="the last, partial tile is left out or read beyond its end",
    ),
    Case(
        "sizes/tile-edges-causal",
        "Numbers of queries and keys on and around powers of two, causal, the last query seeing the last key.",
        "The diagonal ends in the last tile, wherever that ends.",
        lambda rng: _edges(rng, causal=True),
        usual="the last, partial tile is left out or read beyond its end",
    ),
    Case(
        "sizes/few-queries",
        "Few queries over many keys, where kernels split the keys.",
        "Parts of the keys are merged by their lse.",
        _few_queries,
        usual="parts of the keys are merged wrongly",
    ),
    Case(
        "sizes/empty",
        "Axes of length 0 give empty results, and 0 where there are no keys.",
        "An empty batch is a batch; a query without keys is a row that sees nothing.",
        lambda rng: [
            draw(rng, **sizes)  # type: ignore[arg-type]
            for sizes in (
                {"B": 0},
                {"H": 0, "G": 2},
                {"T": 0},
                {"S": 0},
                {"T": 0, "S": 0},
                {"S": 0, "causal": False},
            )
        ],
        raising="axes of length 0 are not taken",
    ),
)


def _mates(rng: np.random.Generator) -> list[Call]:
    """The same row 1 of a batch beside others, and alone."""
    call = draw(rng, B=3, T=20, S=31, causal=False)
    q, k, v = call.q_BHTD.copy(), call.k_BGSD.copy(), call.v_BGSE.copy()
    q[::2], k[::2], v[::2] = 50, np.nan, np.inf
    alone = with_arrays(call, q=q[1:2], k=k[1:2], v=v[1:2])
    return [call, with_arrays(call, q=q, k=k, v=v), alone]


def _lengths_of_mates(rng: np.random.Generator) -> list[Call]:
    call = draw(rng, B=3, T=5, S=31, causal=False, lengths=np.array([31, 12, 0]))
    other = call.but(lengths=np.array([3, 12, 31]))
    return [call, other]


def _large(rng: np.random.Generator, **options: object) -> Call:
    return draw(rng, B=1, H=4, G=2, T=300, S=700, D=64, spread=1.0, causal=False, **options)  # type: ignore[arg-type]


def _twice(call: Call, times: int = 3) -> list[Call]:
    return [dataclasses.replace(call) for _ in range(times)]


def _in_turn(rng: np.random.Generator) -> list[Call]:
    """The same shapes with other options each time, then other inputs."""
    first = draw(rng, T=6, S=9)
    second = draw(rng, T=6, S=9)
    return [
        first,
        first.but(offset=0),
        first.but(window=3),
        first.but(window=5),
        first.but(causal=False),
        first.but(scale=1.0),
        second,
        first,
    ]


def _in_turn_plainly(rng: np.random.Generator) -> list[Call]:
    call = draw(rng)
    return [call, call.but(causal=False), call.but(scale=1.0), call]


def _only_causal(rng: np.random.Generator) -> list[Call]:
    first, second = draw(rng), draw(rng)
    return [first, second, first]


ALONE = "A row's result is its own: batches are for speed."
SAME = (
    "The same call gives the same bits, however often and on however many threads, or nothing can be traced."
)
BATCHES = (
    Case(
        "batch/mates",
        "A batch row beside others, beside garbage, and alone.",
        ALONE,
        _mates,
        usual="a row's result depends on its batch-mates",
    ),
    Case(
        "batch/lengths-of-mates",
        "Other lengths in other batch rows change nothing in a row.",
        ALONE,
        _lengths_of_mates,
        usual="a row's result depends on its batch-mates",
    ),
    Case(
        "repeats/same-bits",
        "The same call three times.",
        SAME,
        lambda rng: _twice(_large(rng)),
        same_bits=True,
    ),
    Case(
        "repeats/one-query",
        "The same decoding step three times.",
        SAME,
        lambda rng: _twice(draw(rng, B=1, T=1, S=5000, D=64, spread=1.0, causal=False)),
        same_bits=True,
    ),
    Case(
        "repeats/threads",
        "The same call on one, two and three threads.",
        SAME,
        lambda rng: [dataclasses.replace(call, threads=n) for call in [_large(rng)] for n in (1, 2, 3)],
        usual="the number of threads changes the bits",
        same_bits=True,
    ),
    Case(
        "repeats/at-once",
        "Calls from eight Python threads at the same time, each with inputs of its own.",
        "A call works on memory of its own: servers call from many threads.",
        lambda rng: [draw(rng, T=60, S=200, D=32, spread=1.0, causal=False) for _ in range(8)],
        usual="calls share memory that they work on",
        at_once=True,
    ),
    Case(
        "repeats/other-inputs-between",
        "A call, another of the same shapes, and the first again.",
        "No call leaves anything behind, and a result is the caller's: a later call does not overwrite it.",
        _only_causal,
    ),
    Case(
        "repeats/other-scales-between",
        "Calls of the same shapes, causal and not, with other scales.",
        "Nothing may be kept by shape alone: masks depend on options.",
        _in_turn_plainly,
    ),
    Case(
        "repeats/other-options-between",
        "Calls of the same shapes with other options, one after the other.",
        "Nothing may be kept by shape alone: masks depend on options.",
        _in_turn,
    ),
)


def _long_keys(rng: np.random.Generator) -> list[Call]:
    S = 70_001
    call = draw(rng, B=1, H=2, G=1, T=3, S=S, D=8, causal=False)
    k, v = call.k_BGSD.copy(), call.v_BGSE.copy()
    # Keys past 65,536 that stand out, so that a wrapped index shows.
    k[:, :, 65_536:65_600] = 3 * call.q_BHTD[:, :1, :1]
    v[:, :, 65_536:65_600] += 5
    return [with_arrays(call, k=k, v=v)]


def _far_edges(rng: np.random.Generator) -> list[Call]:
    S = 70_001
    call = draw(rng, B=1, H=2, G=1, T=3, S=S, D=4)
    return [
        call.but(offset=S - 1_000),
        call.but(window=100),
        call.but(causal=False, lengths=np.array([S - 10]), starts=np.array([S - 900])),
    ]


def _long_queries(rng: np.random.Generator) -> list[Call]:
    return [draw(rng, B=1, H=1, G=1, T=70_001, S=5, D=4, causal=False)]


def _many_heads(rng: np.random.Generator) -> list[Call]:
    return [
        draw(rng, B=1, H=66_000, G=66_000, T=1, S=3, D=4, causal=False),
        draw(rng, B=66_000, H=1, G=1, T=1, S=3, D=4, causal=False),
    ]


def _many_elements(rng: np.random.Generator) -> list[Call]:
    """One key shown 2²⁵ times, 64 wide: more than 2³¹ elements in one row of memory. Few of them are visible."""
    S = 2**25 + 77
    few = draw(rng, B=1, H=1, G=1, T=2, S=500, D=64)
    row = few.k_BGSD[:, :, :1]

    def shown(length: int) -> Array:
        return np.broadcast_to(row, (1, 1, length, 64))

    # By the window: the last 500 keys. Without an offset: the first keys. Each sees equal keys alone.
    first = with_arrays(few, k=shown(2), v=shown(2))
    window = with_arrays(few, k=shown(500), v=shown(500)).but(causal=False)
    whole = with_arrays(few, k=shown(S), v=shown(S))
    return [
        dataclasses.replace(whole.but(window=500), instead=window),
        dataclasses.replace(whole.but(offset=0), instead=first),
    ]


def _far_positions(rng: np.random.Generator) -> list[Call]:
    """Positions that float32, or 32 bits, cannot hold: 2²⁴ + 1 and 2⁴⁰."""
    near = 2**24 + 1
    return [
        draw(rng, T=4, S=9, offset=near, window=near - 2),
        draw(rng, T=2, S=5, offset=2**40, window=2**40 - 1),
    ]


LONG = (
    Case(
        "long/keys",
        "70,001 keys, of which those past 65,536 stand out.",
        "No index may wrap at 16 bits, nor a sum lose its small terms.",
        _long_keys,
        usual="an index of 16 bits, or a limit on the number of keys",
    ),
    Case(
        "long/edges",
        "Windows, lengths, starts and diagonals that lie beyond key 65,536.",
        "What is visible is told in whole numbers that do not wrap at 16 bits.",
        _far_edges,
        usual="an index of 16 bits",
    ),
    Case(
        "long/queries",
        "70,001 queries.",
        "No index may wrap at 16 bits.",
        _long_queries,
        usual="an index of 16 bits, or a limit on the number of queries",
    ),
    Case(
        "long/heads-and-batch",
        "66,000 heads, and a batch of 66,000.",
        "Both are numbers like others: GPU grids end at 65,535 in some directions.",
        _many_heads,
        report="pytorch/pytorch#142228",
        usual="a limit on the number of heads or batch rows",
    ),
    Case(
        "long/elements",
        "Keys and values of more than 2³¹ elements, of which few are visible.",
        "Indices are 64 bits wide, and what is hidden is not copied.",
        _many_elements,
        report="vllm-project/vllm#50427",
        usual="an index of 32 bits",
        views=True,
    ),
    Case(
        "long/positions",
        "Offsets that float32, or 32 bits, cannot hold.",
        "Positions are whole numbers of 64 bits.",
        _far_positions,
        usual="positions kept in float32 or in 32 bits",
    ),
)

CASES = (*HEADS, *WIDTHS, *SIZES, *BATCHES, *LONG)
