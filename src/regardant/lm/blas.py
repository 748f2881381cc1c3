"""What it takes to use NumPy's BLAS well: held at one thread while the package's own threads work, and called once.

Two layers of threads get into each other's way: OpenBLAS's workers keep spinning after every product, on the cores
that the next piece of work wants. Whoever spreads work over rows holds BLAS still meanwhile; and the bits of a
result then do not depend on how many threads BLAS has.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import threadpoolctl

if TYPE_CHECKING:
    from collections.abc import Iterator

_lock = threading.Lock()
_holders: list[
    Any
] = []  # the limiter, once for each caller inside: the first sets the limit, the last lifts it


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Hold NumPy's BLAS at one thread inside; callers on several threads may overlap."""
    with _lock:
        limiter = _holders[0] if _holders else _controller().limit(limits=1, user_api="blas")
        _holders.append(limiter)
    try:
        yield
    finally:
        with _lock:
            _holders.pop()
            if not _holders:
                limiter.restore_original_limits()


def rows_of_one(matrices: list[Any]) -> Any:
    """The array that matrices, NumPy's or torch's, are the successive rows of, in this order, or None.

    A product with the whole is one call, and one round of BLAS's threads, instead of several.
    """
    if not isinstance(matrices[0], np.ndarray):
        return _rows_of_one_tensor(matrices)
    whole = matrices[0].base
    if not isinstance(whole, np.ndarray) or whole.ndim != 2 or not whole.flags.c_contiguous:
        return None
    at = whole.__array_interface__["data"][0]
    for matrix in matrices:
        here = matrix.__array_interface__["data"][0]
        if matrix.base is not whole or here != at or matrix.strides != whole.strides:
            return None
        at += matrix.nbytes
    return whole if sum(len(matrix) for matrix in matrices) == len(whole) else None


def _rows_of_one_tensor(matrices: list[Any]) -> Any:
    import torch

    if torch.compiler.is_compiling():  # a traced tensor has no place in memory, and to join them is cheap
        return torch.cat(matrices)
    whole, at = matrices[0]._base, 0  # noqa: SLF001 - what torch calls the tensor that one is a view of
    if whole is None or whole.ndim != 2:
        return None
    for matrix in matrices:
        if matrix._base is not whole or matrix.storage_offset() != whole.storage_offset() + at:  # noqa: SLF001
            return None
        if matrix.stride() != whole.stride():
            return None
        at += matrix.shape[0] * whole.stride(0)
    return whole if sum(len(matrix) for matrix in matrices) == len(whole) else None


@functools.cache
def _controller() -> threadpoolctl.ThreadpoolController:
    # Finding the libraries takes milliseconds, and NumPy's is there from the start.
    return threadpoolctl.ThreadpoolController()
