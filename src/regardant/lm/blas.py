"""BLAS held at one thread while the package's own threads do the work.

Two layers of threads get into each other's way: OpenBLAS's workers keep spinning after every product, on the cores
that the next piece of work wants. Whoever spreads work over rows holds BLAS still meanwhile; and the bits of a
result then do not depend on how many threads BLAS has.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

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


@functools.cache
def _controller() -> threadpoolctl.ThreadpoolController:
    # Finding the libraries takes milliseconds, and NumPy's is there from the start.
    return threadpoolctl.ThreadpoolController()
