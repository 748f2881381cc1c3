"""Times by turns, after the answer was checked, and the peaks of the machine that they are shares of.

What runs here is a `Contender`: it has answered once, and the error of that answer is known. One whose answer is
wrong is never timed.
"""

from __future__ import annotations

import dataclasses
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks import answers
from regardant import _native

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PAUSE = 0.2  # seconds; the last library's threads go on spinning for a moment
TURN = 0.15  # seconds that a turn of short calls lasts
MOST = 10  # calls in a turn
READ = 2**29  # bytes
WRONG = "wrong answer"


class Contender(NamedTuple):
    """Something to be timed.

    Attributes:
        run: one call. `error`: that of its first answer. `budget`: what is to be expected of it at most.
        note: what a reader must know of how it was called.
    """

    run: Callable[[], Any]
    error: float
    budget: float
    note: str = ""


@dataclasses.dataclass
class Outcome:
    """What became of a contender: its median time, or the reason why there is none."""

    seconds: float | None = None
    error: float | None = None
    budget: float | None = None
    note: str = ""
    reason: str = ""


def contest(contenders: Mapping[str, Contender | str], rounds: int) -> dict[str, Outcome]:
    """Time all whose answers are right, by turns; a contender that is a mere string is the reason of its absence."""
    outcomes, fit = {}, {}
    for name, contender in contenders.items():
        if isinstance(contender, str):
            outcomes[name] = Outcome(reason=contender)
            continue
        outcomes[name] = Outcome(None, contender.error, contender.budget, contender.note)
        if answers.right(contender.error, contender.budget):
            fit[name] = contender.run
        else:
            outcomes[name].reason = f"{WRONG}: error {contender.error:.1e}"
    for name, seconds in by_turns(fit, rounds).items():
        outcomes[name].seconds = seconds
    return outcomes


def by_turns(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of one call of each, A B C A B C ...; a turn of short calls has several of them."""
    each = {name: max(1, min(MOST, int(TURN / once(run)))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE)
            if each[name] > 1:
                run()
            times[name] += [once(run) for _ in range(each[name])]
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def once(run: Callable[[], Any]) -> float:
    """Seconds that one call takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class MultiplyAdds:
    """The machine's peak of float32 multiply-adds in registers, in FLOP/s, with the instruction set in use."""

    unit = "GFLOP/s"

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.best = 0.0
        self._rounds = 10**5
        while once(self._run) < 0.02:
            self._rounds *= 2

    def _run(self) -> float:
        return _native.multiply_adds(self._rounds, self.threads)

    def measure(self) -> None:
        """Measure several times and keep the best seen so far."""
        for _ in range(5):
            begin = time.perf_counter()
            done = self._run()
            self.best = max(self.best, done / (time.perf_counter() - begin))


class Reads:
    """The machine's bandwidth of reads from memory, in bytes per second."""

    unit = "GB/s"

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.best = 0.0
        self._data = np.ones(READ // 4, np.float32)

    def measure(self) -> None:
        """Measure several times and keep the best seen so far."""
        for _ in range(5):
            seconds = once(lambda: _native.read_all(self._data, self.threads))
            self.best = max(self.best, self._data.nbytes / seconds)


def cpu_model() -> str:
    """The processor's name, as well as the system tells it."""
    told = Path("/proc/cpuinfo")
    if told.exists():
        for line in told.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def last_level_cache() -> int:
    """Bytes of the largest cache that the system tells of; 32 MiB where it tells of none."""
    sizes = [
        int(told.read_text(encoding="utf-8").strip().rstrip("K")) * 1024
        for told in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=2**25)
