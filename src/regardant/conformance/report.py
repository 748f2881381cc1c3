"""Reports of runs as documents: one HTML page without a network, and a page of Markdown, targets side by side.

Nothing is judged here. What a verdict says is shown as it is, and every failure with the command that repeats it.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from regardant.conformance import catalogue, verdict
from regardant.conformance.case import NotOffered

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from regardant.conformance.case import Case
    from regardant.conformance.verdict import Report, Verdict

SIGNS = {
    verdict.PASSED: "✓",
    verdict.FAILED: "✗",
    verdict.CRASHED: "✗ crashed",
    verdict.TIMED_OUT: "✗ timed out",
    verdict.DIFFERS: "≠",
    verdict.NOT_OFFERED: "–",
}

# How much a mistake matters, for a reader who does not know attention's corners.
REMARKS = {
    "hidden values are multiplied by 0": "It matters only where what is hidden is not finite: caches that were "
    "allocated and not filled, padding taken from elsewhere. With finite padding nothing goes wrong.",
    "hidden keys are read, and hidden by adding": "It matters only where what is hidden is not finite: caches that "
    "were allocated and not filled, padding taken from elsewhere. With finite padding nothing goes wrong.",
    "what is hidden reaches the result": "It matters only where what is hidden is not finite.",
    "rows that see nothing give the mean": "Models drop what padded queries give; it matters where something reads "
    "those rows, or takes gradients through them.",
    "rows that see nothing give": "It matters where something reads those rows, or takes gradients through them.",
    "what is hidden is made −∞ before the scale": "It matters for a scale of 0 or below, which no model has.",
    "unnormalised sums": "It matters only for values near the end of the type.",
    "masks do not broadcast": "It is refused with an error: nothing comes out wrong.",
    "biases do not broadcast": "It is refused with an error: nothing comes out wrong.",
    "axes of length 0": "It is refused with an error: nothing comes out wrong.",
    "scale rounded to float32": "It matters to those who take float64 for its precision.",
    "partly computed in float32": "It matters to those who take float64 for its precision.",
    "lse of another type": "It matters where parts are merged by it: a half type has lost digits by then.",
    "more rounding than": "It is rounding, a few times what is allowed, and no wrong rule.",
    "scores and weights are rounded": "The rounding is larger than float32 arithmetic would make it.",
    "queries that see nothing are read": "It matters only where what is not seen is not finite.",
    "partly computed in float16": "The rounding is larger than float32 arithmetic would make it.",
}


def remark(cause: str) -> str:
    """How much a mistake matters, or ""."""
    return next((said for begins, said in REMARKS.items() if cause.startswith(begins)), "")


def situation(case: Case) -> str:
    """Shapes, type and options of a case's first call, and how many there are."""
    try:
        calls = case.calls()
    except NotOffered as lacking:
        return str(lacking)
    more = f"; {len(calls)} calls" if len(calls) > 1 else ""
    return f"{calls[0].describe()}{more}"


def _cases() -> Mapping[str, Case]:
    return {case.name: case for case in catalogue.CASES}


def _names(reports: Sequence[Report]) -> list[str]:
    """All cases of all reports, in order."""
    return list(dict.fromkeys(found.case for report in reports for found in report.verdicts))


def _found(report: Report, name: str) -> Verdict | None:
    return next((found for found in report.verdicts if found.case == name), None)


def command(report: Report, found: Verdict) -> str:
    """What repeats one verdict."""
    return f"regardant check {report.target} --cases {found.case}"


def summary(report: Report) -> str:
    """How many of each kind, on one line."""
    return ", ".join(f"{count} {kind}" for kind, count in report.counts.items() if count)


def _versions(report: Report) -> str:
    """The versions of a target's packages, on one line."""
    return ", ".join(f"{name} {found}" for name, found in report.versions.items())


# Markdown.


def markdown(reports: Sequence[Report], made_by: str) -> str:
    """A page of Markdown: counts, differences and failures with their reasons, and all cases side by side."""
    parts = [_OPENING.format(made_by=made_by, cases=len(_names(reports))), *_table_of_counts(reports)]
    for report in reports:
        parts += _of_target(report)
    parts += ["\n## Every case\n", f"{_KEY}\n", *_matrix(reports)]
    return "\n".join(parts) + "\n"


_OPENING = """# Attention, checked

What `regardant check` finds of this package's own attention and of others', on one machine and with the versions
below. This page is what a command wrote, from real runs:

    {made_by}

Each of the {cases} cases has the right answer from a float64 reference and an error allowed that is derived: twice
that of the naive computation in the same type, and one rounding. *Not offered* is what a library does not claim to
do: no fault at all. *Differs* is where it documents another convention, and gives what it documents. *Failed* is
where what came is neither; each has the command that repeats it. A failure is a corner, seldom a reason not to use a
library: most of these never happen in a model that is fed with care.
"""

_KEY = "✓ passed, ✗ failed, ≠ differs as documented, – not offered."


def _table_of_counts(reports: Sequence[Report]) -> Iterable[str]:
    yield "| target | versions | passed | failed | differs | not offered |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for report in reports:
        counts = report.counts
        failed = sum(counts[kind] for kind in verdict.FAULTS)
        numbers = (counts[verdict.PASSED], failed, counts[verdict.DIFFERS], counts[verdict.NOT_OFFERED])
        yield f"| `{report.target}` | {_versions(report)} | {' | '.join(map(str, numbers))} |"


def _of_target(report: Report) -> Iterable[str]:
    yield f"\n## {report.target}\n"
    if report.note:
        yield f"{report.note[0].upper()}{report.note[1:]}.\n"
    faults = [found for found in report.verdicts if found.is_fault]
    differing = [found for found in report.verdicts if found.verdict == verdict.DIFFERS]
    if not faults and not differing:
        yield f"Nothing is wrong: {summary(report)}."
    for convention in dict.fromkeys(found.convention for found in differing):
        names = ", ".join(f"`{found.case}`" for found in differing if found.convention == convention)
        yield f"**Another convention**, {convention}: {names}.\n"
    by_cause: dict[str, list[Verdict]] = {}
    for found in faults:
        by_cause.setdefault(found.cause or "cause unknown", []).append(found)
    for cause, group in by_cause.items():
        said = remark(cause)
        yield f"\n**{cause[0].upper()}{cause[1:]}.** {said}".rstrip() + "\n"
        for found in group:
            yield from _of_failure(report, found)


def _of_failure(report: Report, found: Verdict) -> Iterable[str]:
    case = _cases()[found.case]
    met = f" Met before: {case.report}." if case.report else ""
    kind = "" if found.verdict == verdict.FAILED else f"{found.verdict}: "
    yield f"- `{found.case}`: {case.tests} {kind}{html.escape(found.detail, quote=False)}.{met}"
    yield f"  `{command(report, found)}`"


def _matrix(reports: Sequence[Report]) -> Iterable[str]:
    yield f"| case | {' | '.join(report.target for report in reports)} |"
    yield f"| --- |{' --- |' * len(reports)}"
    for name in _names(reports):
        found = [_found(report, name) for report in reports]
        yield f"| {name} | {' | '.join('' if one is None else SIGNS[one.verdict] for one in found)} |"


# HTML.


def page(reports: Sequence[Report]) -> str:
    """One page of HTML that needs no network: every case with its reason, and what came of it."""
    cells = html.escape
    rows = []
    for name in _names(reports):
        case = _cases()[name]
        found = [_found(report, name) for report in reports]
        verdicts = "".join(_cell(report, one) for report, one in zip(reports, found, strict=True))
        met = f"<p>Met before: {cells(case.report)}</p>" if case.report else ""
        rows.append(
            f"<tr><th scope=row><details><summary>{cells(name)}</summary><p>{cells(case.tests)}</p>"
            f"<p>{cells(case.right)}</p><p class=quiet>{cells(situation(case))}</p>{met}</details></th>"
            f"{verdicts}</tr>"
        )
    heads = "".join(f"<th scope=col>{cells(report.target)}</th>" for report in reports)
    about = "".join(
        f"<p><b>{cells(report.target)}</b>: {cells(summary(report))}. "
        f"<span class=quiet>{cells(_versions(report))} {cells(report.note)}</span></p>"
        for report in reports
    )
    faults = "".join(_faults(report) for report in reports)
    return _PAGE.format(about=about, faults=faults, heads=heads, rows="\n".join(rows), key=_KEY)


def _faults(report: Report) -> str:
    """What is wrong with one target, as a list, or nothing."""
    cells = html.escape
    items = "".join(
        f"<li><b>{cells(found.case)}</b> {cells(found.line())}<br><code>{cells(command(report, found))}</code></li>"
        for found in report.verdicts
        if found.is_fault
    )
    return f"<h2>{cells(report.target)}: what is wrong</h2><ul>{items}</ul>" if items else ""


def _cell(report: Report, found: Verdict | None) -> str:
    if found is None:
        return "<td></td>"
    kind = "failed" if found.is_fault else found.verdict.replace(" ", "-")
    sign = html.escape(SIGNS[found.verdict])
    if not found.line():
        return f'<td class="{kind}">{sign}</td>'
    again = f"<p><code>{html.escape(command(report, found))}</code></p>" if found.is_fault else ""
    said = f"<p>{html.escape(found.line())}</p>{again}"
    return f'<td class="{kind}"><details><summary>{sign}</summary>{said}</details></td>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Attention, checked</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
  color-scheme: light dark; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .15rem .6rem; border-bottom: 1px solid #8884; font-weight:
400; }} thead th {{ position: sticky; top: 0; background: Canvas; font-weight: 600; }}
.passed {{ color: #187a3c; }} .failed {{ color: #c22; font-weight: 600; }} .differs {{ color: #a60; }}
.not-offered, .quiet {{ color: #888; }}
details p {{ margin: .3rem 0; max-width: 44rem; font-weight: 400; }} summary {{ cursor: pointer; }}
h2 {{ font-size: 1.15rem; margin-top: 2rem; }} li {{ margin: .5rem 0; max-width: 60rem; }} code {{ color: #888; }}
@media (prefers-color-scheme: dark) {{ .passed {{ color: #5c8; }} .failed {{ color: #f77; }} .differs {{ color:
#fb5; }} }} </style></head><body>
<h1>Attention, checked</h1>
{about}
{faults}
<h2>Every case</h2>
<p class="quiet">{key} A name opens what is tested and why, a sign what came.</p>
<table><thead><tr><th scope="col">case</th>{heads}</tr></thead><tbody>
{rows}
</tbody></table></body></html>
"""
