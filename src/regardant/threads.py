"""How many threads the package's own work is spread over, and the spreading.

Work is cut by its shape, never by the number of threads, so that the bits of a result do not depend on it.
Threads live for one call: nothing is left over to go wrong after a fork.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from regardant.problem import integer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Item = TypeVar("Item")

# Nobody has as many cores, and a count is an int in the kernels.
MOST = 65_536

_chosen: int | None = None
_followed: Callable[[], int] | None = None


def set_num_threads(count: int) -> None:
    """Use `count` threads from now on, in the whole process.

    Raises:
        TypeError: a count that is no integer. `ValueError`: one below 1 or above 65,536.
    """
    global _chosen  # noqa: PLW0603 - a process-wide setting is what this is
    _chosen = integer("set_num_threads", "count", count, low=1, high=MOST)


def follow(count: Callable[[], int]) -> None:
    """Use as many threads as another library's `count()` says, unless `set_num_threads` has been called."""
    global _followed  # noqa: PLW0603 - a process-wide setting is what this is
    _followed = count


def num_threads() -> int:
    """The threads in use.

    As many as the first of these says: `set_num_threads`, a library that is followed, OMP_NUM_THREADS, the CPUs that
    this process may run on.

    Raises:
        ValueError: an OMP_NUM_THREADS that does not begin with a number from 1 to 65,536.
    """
    if _chosen is not None:
        return _chosen
    if _followed is not None:
        return _followed()
    said = os.environ.get("OMP_NUM_THREADS", "").strip()
    if said:
        first = said.split(",", maxsplit=1)[0].strip()  # OpenMP allows a list, one number per nesting level
        if not first.isdecimal() or not 1 <= int(first) <= MOST:
            raise ValueError(f"OMP_NUM_THREADS must be a number from 1 to {MOST}; got {said!r}")
        return int(first)
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows do not tell
        return os.cpu_count() or 1


def each(work: Callable[[Item], None], items: Sequence[Item], *, small: bool = False) -> None:
    """Do `work` on every item, in any order, on the threads in use; all in this thread if the work is `small`.

    An exception of any item is raised here, after the items already begun have ended.
    """
    count = 1 if small else min(num_threads(), len(items))
    if count <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(count, thread_name_prefix="regardant") as pool:
        for done in [pool.submit(work, item) for item in items]:
            done.result()
