"""What came of putting cases to a target: one `Verdict` for each, and a `Report` of all of them, as plain data."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

PASSED, FAILED, DIFFERS, NOT_OFFERED, CRASHED, TIMED_OUT = (
    "passed",
    "failed",
    "differs",
    "not offered",
    "crashed",
    "timed out",
)

KINDS = (PASSED, FAILED, CRASHED, TIMED_OUT, DIFFERS, NOT_OFFERED)

# What makes a run end with an exit status of 1.
FAULTS = (FAILED, CRASHED, TIMED_OUT)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of one case.

    Attributes:
        case: its name. `verdict`: one of `KINDS`.
        detail: what came and what was right, what is not offered, or how it crashed.
        cause: the likely mistake, or "". `seconds`: how long it took.
        convention: what the target documents instead, for a result that differs.
    """

    case: str
    verdict: str
    detail: str = ""
    cause: str = ""
    seconds: float = 0.0
    convention: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether the target did something wrong."""
        return self.verdict in FAULTS

    def line(self) -> str:
        """Detail and cause on one line."""
        parts = [self.detail, f"likely cause: {self.cause}" if self.cause else "", self.convention]
        return "; ".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True)
class Report:
    """What came of all cases that were put to one target.

    Attributes:
        target: its name. `versions`: of its packages. `note`: what a reader should know. `verdicts`: in order.
    """

    target: str
    versions: dict[str, str]
    note: str
    verdicts: Sequence[Verdict]

    @property
    def counts(self) -> dict[str, int]:
        """How many cases came to each kind of verdict, every kind named."""
        counted = collections.Counter(verdict.verdict for verdict in self.verdicts)
        return {kind: counted[kind] for kind in KINDS}

    @property
    def is_clean(self) -> bool:
        """Whether nothing was wrong."""
        return not any(verdict.is_fault for verdict in self.verdicts)

    def plain(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "target": self.target,
            "versions": self.versions,
            "note": self.note,
            "counts": self.counts,
            "cases": [dataclasses.asdict(verdict) for verdict in self.verdicts],
        }
