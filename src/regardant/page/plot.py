"""Plots of lines as SVG, drawn here: plain data in, a string for a page out, no script and no network.

Points of a line are thinned to what a screen can show: of the points in a column of pixels, the lowest and the
highest stay, so that no spike is lost. What is not finite is left out. Refused: lines whose lists differ in length.
"""

from __future__ import annotations

import dataclasses
import html
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WIDTH, HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 34
_TICKS = 5

# Colours that people with the common colour blindnesses tell apart (Okabe & Ito 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line: its name, shown where it is pointed at and in the legend, and its points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = COLOURS[0]
    thin: bool = False


def lines(
    title: str,
    drawn: Sequence[Line],
    x_name: str,
    y_name: str,
    x_span: Sequence[float] = (),
    y_span: Sequence[float] = (),
) -> str:
    """A plot as an SVG element. The axes reach over all points, and over the numbers in `x_span` and `y_span`.

    Raises:
        ValueError: a line whose x and y differ in length.
    """
    points = [list(_finite(line)) for line in drawn]
    flat = [point for line in points for point in line]
    xs = [*(x for x, _ in flat), *x_span] or [0.0]
    ys = [*(y for _, y in flat), *y_span] or [0.0]
    x_axis = _Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    y_axis = _Axis(min(ys), max(ys), HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        f"<title>{html.escape(title)}</title>",
    ]
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_axis.ticks():
        x = x_axis.at(tick)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{html.escape(x_name)}</text>'
    )
    parts.append(f'<text x="4" y="{HEIGHT - 4}">{html.escape(y_name)}</text>')
    for line, line_points in zip(drawn, points, strict=True):
        parts.append(_path(line, line_points, x_axis, y_axis))
    return "".join([*parts, "</svg>"])


def legend(drawn: Sequence[tuple[str, str]]) -> str:
    """Names with their colours, as a line of HTML."""
    entries = (
        f'<span><svg class="key" viewBox="0 0 10 10"><rect width="10" height="10" fill="{colour}"/></svg> '
        f"{html.escape(name)}</span>"
        for name, colour in drawn
    )
    return f'<p class="legend">{" ".join(entries)}</p>'


def _finite(line: Line) -> Iterator[tuple[float, float]]:
    if len(line.x) != len(line.y):
        raise ValueError(
            f"plot: x and y of {line.name!r} must be of one length; got {len(line.x)} and {len(line.y)}"
        )
    for x, y in zip(line.x, line.y, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            yield x, y


def _path(line: Line, points: list[tuple[float, float]], x_axis: _Axis, y_axis: _Axis) -> str:
    name, width = html.escape(line.name), 1 if line.thin else 1.8
    drawn = _thinned([(x_axis.at(x), y_axis.at(y)) for x, y in points])
    if len(drawn) == 1:
        (x, y), *_ = drawn
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"><title>{name}</title></circle>'
    course = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
    return (
        f'<polyline points="{course}" fill="none" stroke="{line.colour}" stroke-width="{width}">'
        f"<title>{name}</title></polyline>"
    )


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int(point[0]), []).append(point)
    kept: list[tuple[float, float]] = []
    for column in columns.values():
        ends = {0, len(column) - 1}
        for best in (min, max):
            ends.add(best(range(len(column)), key=lambda i: column[i][1]))
        kept += [column[i] for i in sorted(ends)]
    return kept


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Numbers from `low` to `high`, drawn from pixel `first` to pixel `last`."""

    low: float
    high: float
    first: float
    last: float

    def at(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Round numbers inside, about `_TICKS` of them."""
        span = self.high - self.low
        if span == 0:
            return [self.low]
        power = 10.0 ** math.floor(math.log10(span / _TICKS))
        step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= _TICKS)
        first = math.ceil(self.low / step)
        return [round(n * step, 12) for n in range(first, math.floor(self.high / step) + 1)]
