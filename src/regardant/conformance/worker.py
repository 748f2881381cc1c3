"""The process that a target runs in: reads names of cases, puts each to the target, writes one line of JSON for each.

    python -m regardant.conformance.worker TARGET

The first line that it writes is about the target: its versions and note, or why there is none. Of each case it also
says when the target has answered, since judging is no time of the target's. What the target prints goes
to the standard error, that it cannot be taken for a verdict. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from regardant.conformance import cases, verdict
from regardant.conformance.case import Mismatch, NotOffered
from regardant.conformance.judge import judge
from regardant.conformance.target import UnknownTarget, find
from regardant.conformance.verdict import Verdict
from regardant.names import readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from regardant.conformance.case import Case
    from regardant.conformance.target import Target


def put(case: Case, target: Target, answered: Callable[[], None] = lambda: None) -> Verdict:
    """Put one case to a target, whatever comes of it; `answered` is called when the target has given all answers."""
    began = time.perf_counter()
    detail = cause = convention = ""
    try:
        judge(case, target, answered)
        kind = verdict.PASSED
    except NotOffered as declined:
        kind, detail = verdict.NOT_OFFERED, str(declined)
    except Mismatch as wrong:
        kind, detail, cause = verdict.FAILED, wrong.detail, wrong.cause
        for other in target.conventions:
            if other.cause in wrong.causes and fnmatchcase(case.name, other.cases):
                kind, cause = verdict.DIFFERS, other.cause
                convention = f"documented: {other.says} ({other.source})"
                break
    except Exception as error:  # noqa: BLE001 - whatever a target raises is a finding about it, not about us
        said = readable(" ".join(str(error).split()))
        kind, detail = verdict.FAILED, f"raised {type(error).__name__}" + (said and f": {_short(said)}")
        cause = case.raising
    return Verdict(case.name, kind, detail, cause, round(time.perf_counter() - began, 3), convention)


def _short(said: str) -> str:
    """The beginning of what an error says and, where it says much, the end, which has the reason."""
    return said if len(said) <= 300 else f"{said[:90]} … {said[-200:]}"


def main(name: str) -> int:
    """Serve one target until there is nothing more to read."""
    asked, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    def answer(data: dict[str, Any]) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - where a user's own module lies
    try:
        target = find(name)
    except UnknownTarget as error:
        answer({"unknown": str(error)})
        return 2
    answer({"versions": target.versions(), "note": target.note})
    by_name = {case.name: case for case in cases}
    for line in asked:
        answer(vars(put(by_name[line.strip()], target, lambda: answer({"answered": True}))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
