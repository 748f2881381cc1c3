"""What every checkpoint format shares: checking names and shapes, and widening tensors on several threads.

Weights are a plain mapping from Hugging Face names to NumPy arrays, float32 or float64. A format says which
tensors it holds (`check`, before anything is read) and gives, for each that cannot be used where it lies in the
mapped file, the jobs that fill an array with it (`run`). Refused: a checkpoint that lacks a tensor, holds one
of another shape, or holds one that the model would not use, for then it is some other model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from regardant.lm.errors import LoadError, UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Weights: TypeAlias = "dict[str, NDArray[Any]]"
Shape: TypeAlias = tuple[int, ...]
Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, what is being done); a total of 0 means that it is not known."""

# Elements widened at a time: a megabyte of float32 stays in a core's second-level cache between the steps.
CHUNK = 1 << 18

# Projections of one input. As successive rows of one array they need a single product: `model.project_all`.
_TOGETHER = (
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
)

# Threads beyond this only wait for memory.
_MOST_THREADS = 8

# Names a sentence lists before it says "and n more".
_LISTED = 4


def float_type(dtype: object) -> np.dtype[Any]:
    """Give the NumPy type that weights are widened to.

    Raises:
        UserError: anything but float32 and float64.
    """
    if isinstance(dtype, str | type | np.dtype):
        for known in (np.dtype(np.float32), np.dtype(np.float64)):
            if dtype == known:  # NumPy's equality knows names and scalar types too
                return known
    raise UserError(f'load: dtype must be "float32" or "float64"; got {dtype!r}')


def check(where: str, found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """Compare the tensors of a checkpoint to what the model's configuration asks for.

    Raises:
        LoadError: names everything that is missing, of another shape, or not used by the model.
    """
    missing = [f"{name} {_text(shape)}" for name, shape in expected.items() if name not in found]
    reshaped = [
        f"{name} {_text(found[name])}, not {_text(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    unused = [f"{name} {_text(shape)}" for name, shape in found.items() if name not in expected]
    faults = [
        ("lacks", missing),
        ("has in another shape", reshaped),
        ("has but the model does not use", unused),
    ]
    sentence = "; ".join(f"{verb} {_some(names)}" for verb, names in faults if names)
    if sentence:
        raise LoadError(f"{where}: does not fit its configuration: it {sentence}")


def room(shapes: Mapping[str, Shape], dtype: np.dtype[Any]) -> Weights:
    """Make an array for each name, to be filled; projections of one input are successive rows of one array."""
    arrays: Weights = {}
    for name, shape in shapes.items():
        if name in arrays:
            continue
        names = together(name, shapes)
        edges = np.cumsum([0, *(shapes[other][0] for other in names)])
        whole = np.empty((edges[-1], *shape[1:]), dtype)
        if len(names) == 1:
            arrays[name] = whole
        else:
            arrays |= {other: whole[edges[i] : edges[i + 1]] for i, other in enumerate(names)}
    return arrays


def together(name: str, shapes: Mapping[str, Shape]) -> list[str]:
    """Give the names of the tensors that lie in one array with this one, in order: itself among others, or alone."""
    group = next((group for group in _TOGETHER if name.endswith(group)), ())
    stem = next((name.removesuffix(part) for part in group if name.endswith(part)), "")
    names = [stem + part for part in group]
    return names if group and all(other in shapes for other in names) else [name]


def _text(shape: Iterable[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def run(jobs: Sequence[tuple[int, Callable[[], None]]], what: str, progress: Progress | None) -> None:
    """Do all jobs, given as (bytes, function), on as many threads as there are cores for this process.

    NumPy lets go of the interpreter's lock in the large operations that the jobs consist of. The first error
    ends it: what has not begun is dropped.
    """
    total, done = sum(size for size, _ in jobs), 0
    with ThreadPoolExecutor(_threads(), thread_name_prefix="regardant-load") as pool:
        try:
            results = [pool.submit(job) for _, job in jobs]
            for (size, _), result in zip(jobs, results, strict=True):
                result.result()
                done += size
                if progress is not None:
                    progress(done, total, what)
        finally:
            pool.shutdown(cancel_futures=True)


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(cores, _MOST_THREADS))
