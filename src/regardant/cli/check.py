"""`regardant check`: put the conformance cases to an attention function, anyone's, and say what is wrong and why.

Exit status 1 if anything failed, crashed or took too long. JSON: an object with `targets`, a list; each has `target`,
`versions`, `note`, `counts` by verdict, and `cases`, a list of objects with `case`, `verdict`, `detail`, `cause`,
`seconds` and `convention`.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from regardant.cli import terminal
from regardant.errors import UserError
from regardant.writing import check_writable, replacing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from regardant.conformance.case import Case
    from regardant.conformance.verdict import Report, Verdict

FAULT = 1

STYLES = {
    "passed": "green",
    "failed": "bold red",
    "crashed": "bold red",
    "timed out": "bold red",
    "differs": "yellow",
    "not offered": "dim",
}


def check(
    *,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET",
            help="module:function, file.py:function, or regardant, regardant:native, regardant:blocked, "
            "regardant:reference, regardant.torch, torch, flex, onnxruntime, jax, transformers:eager, "
            "transformers:sdpa.",
            show_default=False,
        ),
    ] = None,
    cases: Annotated[
        str, typer.Option("--cases", help="Names or patterns, separated by commas: gradients/*,dead-rows.")
    ] = "*",
    limit: Annotated[float, typer.Option("--limit", min=0.1, help="Seconds for one case.")] = 120.0,
    listing: Annotated[bool, typer.Option("--list", help="List the cases and what each tests.")] = False,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write a page with everything to this file.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the same as Markdown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check an attention function against cases that well-known libraries have got wrong.

    A function takes q (B, H, T, D), k (B, G, S, D) and v (B, G, S, E), NumPy arrays, and options as keywords; those
    that it names are the options that it offers. docs/checking.md shows one of ten lines.

    The exit status is 1 if a case failed, crashed or took too long, and 0 if not: what is not offered is no fault.
    """
    from regardant.conformance import select

    try:
        chosen = select(cases)
    except ValueError as error:
        raise UserError(f"{error}; --list shows them all") from None
    if listing:
        _list(chosen, as_json=as_json)
        return
    if not targets:
        raise UserError(
            "name what to check: module:function, file.py:function or a built-in target; see --help"
        )
    for file in (page, markdown):
        if file is not None:
            check_writable(file)
    reports = [_run(target, chosen, limit) for target in targets]
    _write(reports, page, markdown, _command(targets, cases, markdown))
    if as_json:
        terminal.say_json({"targets": [report.plain() for report in reports]})
    else:
        for report in reports:
            _show(report)
        if len(reports) > 1:
            terminal.show(_side_by_side(reports))
    if not all(report.is_clean for report in reports):
        raise typer.Exit(FAULT)


def _list(chosen: Sequence[Case], *, as_json: bool) -> None:
    if as_json:
        terminal.say_json(
            [
                {"name": case.name, "tests": case.tests, "right": case.right, "report": case.report}
                for case in chosen
            ]
        )
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for case in chosen:
        table.add_row(case.name, case.tests)
    terminal.show(table)


def _run(target: str, chosen: Sequence[Case], limit: float) -> Report:
    from regardant.conformance.runner import run
    from regardant.conformance.target import UnknownTarget

    with terminal.bar(f"Checking {target}") as report:
        try:
            return run(
                target,
                chosen,
                limit_s=limit,
                progress=lambda done, of, name: report(done, of, f"{target}: {name}"),
            )
        except UnknownTarget as unknown:
            raise UserError(str(unknown)) from unknown


def _command(targets: Sequence[str], cases: str, markdown: Path | None) -> str:
    """What was typed, as a page quotes it."""
    narrowed = "" if cases == "*" else f" --cases '{cases}'"
    return f"regardant check {' '.join(targets)}{narrowed} --markdown {markdown}"


def _write(reports: Sequence[Report], page: Path | None, markdown: Path | None, made_by: str) -> None:
    from regardant.conformance import report

    documents = ((page, report.page(reports)), (markdown, report.markdown(reports, made_by)))
    for file, text in documents:
        if file is not None:
            with replacing(file) as temporary:
                temporary.write_text(text, encoding="utf-8")


def _show(report: Report) -> None:
    """One target: every case, with a line for each that did not pass, and the counts."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for found in report.verdicts:
        table.add_row(found.case, Text(found.verdict, STYLES[found.verdict]), terminal.inert(found.line()))
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    terminal.say(f"{report.target}{f' ({versions})' if versions else ''}\n")
    terminal.show(table)
    counted = [Text(f"{count} {kind}", STYLES[kind]) for kind, count in report.counts.items() if count]
    terminal.show(Text(", ").join(counted))


def _side_by_side(reports: Sequence[Report]) -> Table:
    """All targets: how each case went with each."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("case", no_wrap=True)
    found: list[dict[str, Verdict]] = []
    for report in reports:
        table.add_column(report.target)
        found.append({verdict.case: verdict for verdict in report.verdicts})
    for name in found[0]:
        table.add_row(name, *(Text(one[name].verdict, STYLES[one[name].verdict]) for one in found))
    return table
