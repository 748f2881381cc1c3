"""Plots of lines: what is drawn is what was given, as far as a screen can show."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from regardant.page import plot


def drawn(svg):
    root = ET.fromstring(svg)  # noqa: S314 - our own
    return root, [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in root.iter("polyline")
    ]


def test_points_lie_where_the_axes_say():
    root, (points,) = drawn(plot.lines("t", [plot.Line("a", [0, 50, 100], [1.0, 3.0, 2.0])], "step", "loss"))
    (x0, low), (x1, high), (x2, middle) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.1)
    assert middle - high == pytest.approx(low - middle, abs=0.1)
    assert low > middle > high  # SVG counts downwards
    texts = [text.text for text in root.iter("text")]
    assert {"0", "20", "100", "1", "1.5", "3", "step", "loss"} <= set(texts)


def test_of_many_points_the_spikes_stay():
    y = [math.sin(i / 500) for i in range(100_000)]
    y[54_321], y[12_345] = 9.0, -9.0
    _, (points,) = drawn(plot.lines("t", [plot.Line("a", range(100_000), y)], "", ""))
    assert len(points) <= 4 * plot.WIDTH
    heights = [h for _, h in points]
    assert heights.count(min(heights)) == 1
    assert heights.count(max(heights)) == 1
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_what_is_not_finite_is_left_out_and_nothing_is_nothing():
    _, (points,) = drawn(
        plot.lines("t", [plot.Line("a", [0, 1, 2, 3], [1.0, math.nan, math.inf, 2.0])], "", "")
    )
    assert len(points) == 2
    plot.lines("t", [], "", "")
    single = plot.lines("t", [plot.Line("a", [5], [1.0])], "", "")
    assert "<circle" in single


def test_names_are_text():
    svg = plot.lines("<b>", [plot.Line("</svg><script>", [0, 1], [0, 1])], "&", '"')
    assert not re.search("<script|<b>", svg)
    ET.fromstring(svg)  # noqa: S314 - our own


def test_lists_of_two_lengths_are_refused():
    with pytest.raises(ValueError, match=r"x and y of 'a' must be of one length; got 2 and 1"):
        plot.lines("t", [plot.Line("a", [0, 1], [0])], "", "")


def test_axes_reach_over_what_they_are_told_to():
    line = plot.Line("a", [5.0, 6.0], [0.5, 0.6])
    _, (points,) = drawn(plot.lines("t", [line], "", "", (0, 10), (0.0, 1.0)))
    (left, low), (right, high) = points
    middle = (plot._LEFT + plot.WIDTH - plot._RIGHT) / 2
    assert left == pytest.approx(middle, abs=0.1)
    assert right - left == pytest.approx((plot.WIDTH - plot._RIGHT - plot._LEFT) / 10, abs=0.11)
    assert low - high == pytest.approx((plot.HEIGHT - plot._BOTTOM - plot._TOP) / 10, abs=0.11)
