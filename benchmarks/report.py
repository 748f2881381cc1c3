"""What was asked and what came: rows of a benchmark as a table or JSON, and the command line that makes them.

A mark that is missed is shown as missed. A row whose answer was wrong has no time, and the process ends with 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.table import Table

import regardant
from benchmarks import peers, timing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.timing import MultiplyAdds, Outcome, Reads

Finished: TypeAlias = dict[str, Any]
WIDTH = 150  # columns, where the output is no terminal


@dataclasses.dataclass(frozen=True)
class Mark:
    """A bound that a figure of a row is asked to keep.

    Attributes:
        figure: "share" (of the machine's peak), a peer's name (its time over regardant's), or a row's own figure.
        bound: at least so much; at most, if `most`. `avx512`: asked of machines that have AVX-512.
    """

    figure: str
    bound: float
    most: bool = False
    avx512: bool = False

    def judge(self, figures: dict[str, float]) -> dict[str, Any]:
        """The mark beside what was measured."""
        value = figures.get(self.figure)
        if value is None:
            state = "not measured"
        elif self.avx512 and not regardant.capabilities().instruction_set.startswith("avx512"):
            state = "for AVX-512"
        else:
            state = "met" if (value <= self.bound if self.most else value >= self.bound) else "unmet"
        text = f"{self.figure} {'≤' if self.most else '≥'} {self.bound:g}"
        return {"asked": text, "value": value, "state": state}


BUDGET = Mark("error / budget", 1, most=True)  # asked of every case


@dataclasses.dataclass
class Row:
    """What a case gave.

    Attributes:
        outcomes: by contender, "regardant" among them.
        amount: FLOPs, or bytes, of one call; None where a rate says nothing.
        of_peak: whether the rate is a share of the peak that was measured.
        figures: what else the marks speak of. `remark`: what a reader must know.
    """

    outcomes: dict[str, Outcome]
    amount: int | None = None
    of_peak: bool = True
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    remark: str = ""

    def finish(self, case: Case, peak: float) -> Finished:
        """Plain data: rates, shares and ratios worked out, marks judged."""
        ours = self.outcomes["regardant"]
        ratios = {
            name: other.seconds / ours.seconds
            for name, other in self.outcomes.items()
            if other is not ours and other.seconds and ours.seconds
        }
        rate = self.amount / ours.seconds if self.amount and ours.seconds else None
        shares = {"share": rate / peak} if rate and self.of_peak else {}
        figures = shares | ratios | self.figures
        if ours.seconds and ours.error is not None and ours.budget:
            figures["error / budget"] = ours.error / ours.budget
        others = {
            name: dataclasses.asdict(other) | {"ratio": ratios.get(name)}
            for name, other in self.outcomes.items()
            if other is not ours
        }
        return {
            "case": case.label,
            "remark": self.remark,
            **dataclasses.asdict(ours),
            "rate": rate,
            "share": shares.get("share"),
            "peak": peak,
            "figures": self.figures,
            "others": others,
            "marks": [mark.judge(figures) for mark in (*case.marks, BUDGET)],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Something to be measured: what it is called, and what is asked of it."""

    label: str
    marks: tuple[Mark, ...] = ()

    def measure(self, setting: Setting) -> Row | Finished:
        """Measure; a row that another process has finished is taken as it is."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all cases of a run share."""

    rounds: int
    peers: list[str]
    threads: int


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=positive, default=5, help="turns of each contender (default 5)")
    made.add_argument("--peers", type=_names, help=f"some of {','.join(peers.PEERS)}, or none (default all)")
    made.add_argument(
        "--cases", default="", metavar="SUBSTRING", help="only cases whose label has this in it"
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _names(text: str) -> list[str]:
    """The peers in a list with commas."""
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in peers.PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(peers.PEERS)}, none")
        if not peers.installed(name):
            raise argparse.ArgumentTypeError(f"{name} needs {' and '.join(peers.PACKAGES[name])} installed")
    return names


def run(doc: str | None, cases: Sequence[Case], peak_of: type[MultiplyAdds | Reads]) -> None:
    """Read the command line, measure, print; ends the process with 1 if an answer was wrong."""
    chosen = parser(doc).parse_args()
    names = chosen.peers
    if names is None:
        names = [name for name in peers.PEERS if peers.installed(name)]
    setting = Setting(chosen.rounds, names, regardant.capabilities().threads)
    wanted = [case for case in cases if chosen.cases in case.label]
    if not wanted:
        raise SystemExit(f"no case has {chosen.cases!r} in its label: {', '.join(c.label for c in cases)}")
    result = measure(wanted, setting, peak_of(setting.threads))
    print(json.dumps(result, indent=2)) if chosen.json else show(result)
    wrong = [row["case"] for row in result["cases"] if row["reason"].startswith(timing.WRONG)]
    if wrong:
        raise SystemExit(f"no time, because the answer was wrong: {', '.join(wrong)}")


def measure(cases: Sequence[Case], setting: Setting, peak: MultiplyAdds | Reads) -> dict[str, Any]:
    """All cases as plain data, with the machine and the versions; the peak is measured again before each case."""
    rows = []
    for case in cases:
        print(f"measuring {case.label}", file=sys.stderr, flush=True)
        peak.measure()
        rows.append(case.measure(setting))
    peak.measure()
    return {
        **machine(),
        "peak": peak.best,
        "unit": peak.unit,
        "rounds": setting.rounds,
        "cases": [
            row.finish(case, peak.best) if isinstance(row, Row) else row
            for case, row in zip(cases, rows, strict=True)
        ],
    }


def machine() -> dict[str, Any]:
    """The processor, what regardant uses of it, and all versions."""
    packages = sorted({package for some in peers.PACKAGES.values() for package in some})
    names = ("regardant", "numpy", "ml_dtypes", *packages)
    return {
        "cpu": timing.cpu_model(),
        **regardant.capabilities()._asdict(),
        "versions": {name: peers.version(name) for name in names},
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    unit = result["unit"]
    console.print(
        f"{result['cpu']}, {result['instruction_set']}, {result['threads']} threads, "
        f"peak {result['peak'] / 1e9:.1f} {unit}; medians of {result['rounds']} turns",
        markup=False,
    )
    console.print(
        ", ".join(f"{name} {version}" for name, version in result["versions"].items()), markup=False
    )
    table = Table(show_lines=True)
    for name in ("case", "time", unit, "of peak", "error", "time of others / ours (error)", "asked"):
        table.add_column(name, justify="right" if name in {"time", unit, "of peak", "error"} else "left")
    for row in result["cases"]:
        table.add_row(*(_plain(text) for text in cells(row)))
    console.print(table)


def _plain(text: str) -> str:
    """Text that rich does not take for its markup."""
    return text.replace("[", "\\[")


def cells(row: Finished) -> tuple[str, ...]:
    """A row of the table."""
    return (
        "\n".join(filter(None, [row["case"], row["remark"]])),
        row["reason"] if row["seconds"] is None else duration(row["seconds"]),
        "" if row["rate"] is None else f"{row['rate'] / 1e9:.1f}",
        "" if row["share"] is None else f"{row['share']:.2f}",
        "" if row["error"] is None else f"{row['error']:.1e}",
        "\n".join(against(row["others"])),
        "\n".join(judged(mark) for mark in row["marks"]),
    )


def against(others: dict[str, dict[str, Any]]) -> list[str]:
    """The other contenders, a line each; those who are absent for one reason share a line."""
    lines: list[str] = []
    absent: dict[str, list[str]] = {}
    for name, other in others.items():
        if other["reason"]:
            absent.setdefault(other["reason"], []).append(name)
            continue
        time = duration(other["seconds"]) if other["ratio"] is None else f"{other['ratio']:.2f} ×"
        note = f", {other['note']}" if other["note"] else ""
        lines.append(f"{name} {time} ({other['error']:.1e}){note}")
    return lines + [f"{', '.join(names)} {reason}" for reason, names in absent.items()]


def judged(mark: dict[str, Any]) -> str:
    """One mark in a line."""
    value = "" if mark["value"] is None else f"{mark['value']:.2f} "
    return f"{mark['asked']}: {value}{mark['state']}"


def duration(seconds: float | None) -> str:
    """A time in a unit that suits it."""
    if seconds is None:
        return "no time"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
