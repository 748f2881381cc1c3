"""Attention by the compiled kernels: the same problems and results as `blocked`, near the machine's speed.

Nothing is computed here. A checked `Problem` is handed to the extension as views of the caller's arrays, with the
results' arrays beside it. The kernels choose their instruction set by themselves (REGARDANT_ISA forces one).

Shape legend: B batch, H query heads, T queries, S keys, E value width; M heads and N queries of rows asked for.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regardant import _native
from regardant.threads import num_threads

if TYPE_CHECKING:
    from regardant.problem import Array, Problem, Watch

TYPES = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3}  # as `Type` in native/problem.hpp

# Multiplications below which waking another thread takes longer than it saves.
SMALL = 2**21


class Capabilities(NamedTuple):
    """What the compiled kernels can use and do use.

    Attributes:
        instruction_set: the one in use. `present`: those this machine has, the best last.
        built: all that this installation was compiled for. `threads`: how many a large call is spread over.
    """

    instruction_set: str
    present: tuple[str, ...]
    built: tuple[str, ...]
    threads: int


def capabilities() -> Capabilities:
    """Which instruction set the kernels use, which are there, and how many threads.

    Raises:
        ValueError: REGARDANT_ISA names an instruction set that is not there, or OMP_NUM_THREADS is no number.
    """
    return Capabilities(
        _native.instruction_set(), tuple(_native.present()), tuple(_native.built()), num_threads()
    )


def attend(problem: Problem, watch: Watch | None = None) -> dict[str, Array]:
    """Output and lse of a problem and, with `watch`, what was to be kept.

    Memory beyond the results: some hundred kilobytes for each thread and, for few queries, E + 3 numbers (and the
    heaviest keys) for every row and 512 keys.
    """
    B, H, _, T, S, _, E = problem.sizes
    dtype = problem.accumulator
    held, threads = _hold(problem), _threads(problem)
    out, lse = np.empty((B, H, T, E), problem.q_BHTD.dtype), np.empty((B, H, T), dtype)
    seen = {"out": out, "lse": lse}
    if watch is None:
        _native.attend(held, threads, _bits(out), lse)
        return seen
    looked = {name: np.empty((B, H, T), dtype) for name in ("max_logit", "entropy", "sink_weight")}
    looked["top_keys"] = np.empty((B, H, T, watch.top), np.int64)
    looked["top_weights"] = np.empty((B, H, T, watch.top), dtype)
    _native.attend(held, threads, _bits(out), lse, **looked, top=watch.top)
    if watch.received:
        looked["received"] = np.empty((B, H, S), dtype)
    if watch.pooled is not None:
        looked["pooled"] = np.empty((B, H, *watch.pooled), dtype)
    if watch.received or watch.pooled:
        R, C = watch.pooled or (1, 1)
        _native.sums(held, threads, lse, looked.get("received"), looked.get("pooled"), R, C)
    return seen | looked


def rows(problem: Problem, lse_BHT: Array, queries_N: Array, heads_M: Array) -> Array:
    """Weights of the given queries of the given heads, (B, M, N, S), from q, k and lse. Memory: the result."""
    B, _, _, _, S, *_ = problem.sizes
    a_BMNS = np.zeros((B, len(heads_M), len(queries_N), S), problem.accumulator)
    _native.rows(_hold(problem), _threads(problem), lse_BHT, heads_M, queries_N, a_BMNS)
    return a_BMNS


def backward(
    problem: Problem,
    out_BHTE: Array,
    lse_BHT: Array,
    dout_BHTE: Array,
    dlse_BHT: Array | None,
    bias_gradient: bool,  # noqa: FBT001 - the three implementations are called alike
) -> dict[str, Array]:
    """Gradients of q, k, v and, where they are there or asked for, sinks and bias.

    Memory beyond the results: a number for each row of a query, dq once more in float32 if its type is narrower, and
    some megabytes for each thread. The bias's gradient takes its own size.
    """
    dtype = problem.accumulator
    dq, dk, dv = (np.empty(a.shape, a.dtype) for a in (problem.q_BHTD, problem.k_BGSD, problem.v_BGSE))
    made = {"dq": dq, "dk": dk, "dv": dv}
    if problem.sinks_H is not None:
        made["dsinks"] = np.empty(problem.sinks_H.shape, dtype)
    if problem.bias_BHTS is not None and bias_gradient:
        made["dbias"] = np.empty(problem.bias_sizes, problem.bias_BHTS.dtype)
    lse, dlse = (
        None if array is None else np.ascontiguousarray(array, dtype) for array in (lse_BHT, dlse_BHT)
    )
    _native.backward(
        _hold(problem),
        _threads(problem),
        _bits(out_BHTE),
        _bits(dout_BHTE),
        lse,
        dlse,
        _bits(dq),
        _bits(dk),
        _bits(dv),
        made.get("dsinks"),
        _bits(made["dbias"]) if "dbias" in made else None,
    )
    return made


def _hold(problem: Problem) -> _native.Problem:
    q_segments, k_segments = problem.segments or (None, None)
    bias = problem.bias_BHTS
    return _native.Problem(
        _bits(problem.q_BHTD),
        _bits(problem.k_BGSD),
        _bits(problem.v_BGSE),
        _type(problem.q_BHTD.dtype),
        problem.causal,
        problem.offset,
        problem.window or 0,
        problem.starts_B,
        problem.lengths_B,
        None if q_segments is None else np.ascontiguousarray(q_segments, np.int64),
        None if k_segments is None else np.ascontiguousarray(k_segments, np.int64),
        problem.mask_BHTS,
        None if bias is None else _bits(bias),
        0 if bias is None else _type(bias.dtype),
        None if problem.alibi_H is None else problem.alibi_H.astype(np.float64),
        None if problem.sinks_H is None else problem.sinks_H.astype(np.float64),
        problem.softcap or 0.0,
        problem.scale,
    )


@functools.cache
def _type(dtype: np.dtype[Any]) -> int:
    """The extension's number for an element type; remembered, because a dtype takes long to say its name."""
    return TYPES[dtype.name]


def _bits(array: Array) -> Array:
    """The array in a form that the extension takes: aligned, and bfloat16, which has no common name, as its bits."""
    if not array.flags.aligned:
        array = array.copy()
    return array if array.dtype.kind == "f" else array.view(np.uint16)


def _threads(problem: Problem) -> int:
    B, H, _, T, S, D, E = problem.sizes
    return 1 if B * H * T * S * (D + E) < SMALL else num_threads()
