"""Put cases to a target in a process of its own, so that a crash or a hang is one finding and the rest still run.

The worker handles one case after another; after a crash, or when a case has taken too long and the worker was
ended, another one goes on with the next case. It refuses a target that cannot be found.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any

from regardant.conformance import verdict
from regardant.conformance.target import UnknownTarget
from regardant.conformance.verdict import Report, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from regardant.conformance.case import Case

# Seconds for one case's answers, for a target's packages to be imported, and for what it gave to be judged.
LIMIT_S, IMPORT_LIMIT_S, JUDGE_LIMIT_S = 120.0, 300.0, 600.0


class _Ended(Exception):  # noqa: N818 - an end, told from an error by its text
    """The worker's end: how it ended, or that it was ended for taking too long."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


class _Worker:
    """A worker process and what it says, line by line."""

    def __init__(self, target: str) -> None:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - see close
        self._process = subprocess.Popen(  # noqa: S603 - this package itself
            [sys.executable, "-m", "regardant.conformance.worker", target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.about = self._next(IMPORT_LIMIT_S)
        except _Ended:
            self.close()
            raise

    def ask(self, name: str, limit_s: float) -> Verdict:
        """Put one case.

        Raises:
            _Ended: the worker is no more.
        """
        assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
        try:
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        said = self._next(limit_s)
        if "answered" in said:
            said = self._next(JUDGE_LIMIT_S)
        return Verdict(**said)

    def close(self) -> None:
        """End the worker, gently if it lives."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._said.close()

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - a pipe was asked for
        try:
            for line in self._process.stdout:
                self._lines.put(line)
        finally:
            self._lines.put("")

    def _next(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            self._process.kill()
            self._process.wait()
            raise _Ended(verdict.TIMED_OUT, f"no answer within {limit_s:g} s") from None
        if not line:
            raise self._ended()
        data: dict[str, Any] = json.loads(line)
        return data

    def _ended(self) -> _Ended:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        last = f"; the last that it said: {lines[-1][:200]}" if lines else ""
        return _Ended(verdict.CRASHED, f"the process ended with {how}{last}")


def run(
    target: str,
    cases: Sequence[Case],
    *,
    limit_s: float = LIMIT_S,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Put cases to the target of a name, each with a time limit.

    Args:
        target: as `regardant.conformance.target.find` takes it.
        cases: which ones, in order.
        limit_s: seconds for one case. `progress`: called with how many are done, of how many, and which is next.

    Raises:
        UnknownTarget: there is no such target, or importing it ended the process.
    """
    verdicts: list[Verdict] = []
    worker = _started(target)
    about = worker.about
    try:
        for number, case in enumerate(cases):
            if progress is not None:
                progress(number, len(cases), case.name)
            try:
                verdicts.append(worker.ask(case.name, limit_s))
            except _Ended as end:
                seconds = limit_s if end.kind == verdict.TIMED_OUT else 0.0
                verdicts.append(Verdict(case.name, end.kind, end.detail, seconds=seconds))
                worker.close()
                worker = _started(target)
    finally:
        worker.close()
    return Report(target, about["versions"], about["note"], tuple(verdicts))


def _started(target: str) -> _Worker:
    try:
        worker = _Worker(target)
    except _Ended as end:
        raise UnknownTarget(f"{target} cannot be imported: {end.detail}") from end
    if "unknown" in worker.about:
        worker.close()
        raise UnknownTarget(worker.about["unknown"])
    return worker
