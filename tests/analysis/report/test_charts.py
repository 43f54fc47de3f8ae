"""Charts: round ticks, everything inside the picture, and words for those who cannot see it."""

from __future__ import annotations

import pytest

from metadropout.analysis.report.charts import HEIGHT, LEFT, WIDTH, Chart, Curve, Style, thinned, ticks


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (-3.0, 104.0, ["0", "20", "40", "60", "80", "100"]),
        (0.0, 0.1, ["0.00", "0.02", "0.04", "0.06", "0.08", "0.10"]),
        (0.18, 1.41, ["0.5", "1.0"]),
        (-40.0, 40_100.0, ["0", "10000", "20000", "30000", "40000"]),
        (96.2, 96.3, ["96.20", "96.22", "96.24", "96.26", "96.28", "96.30"]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(low: float, high: float, texts: list[str]) -> None:
    assert [text for _, text in ticks(low, high, most=6)] == texts


def test_thinning_keeps_the_first_and_the_last_point() -> None:
    points = [(float(n), 0.0) for n in range(1000)]
    few = thinned(points, 7)
    assert (len(few), few[0], few[-1]) == (7, points[0], points[-1])
    assert thinned(points[:5], 7) == points[:5]


def test_curves_and_their_intervals_lie_inside_the_picture() -> None:
    curves = [Curve("a", Style(0), [(0.0, 50.0), (10.0, 90.0)], [20.0, 5.0]), Curve("b", Style(1), [(5.0, 10.0)])]
    drawn = Chart("title", "x", "y", curves).drawn()
    for curve in drawn:
        assert all(LEFT <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in curve.markers)
        assert all(0 <= high < low <= HEIGHT for _, low, high in curve.bars)
    (x0, y0), (x1, y1) = drawn[0].markers
    assert x0 < x1
    assert y0 > y1  # a larger value is higher up, where SVG's coordinate is smaller


def test_a_chart_of_one_point_or_of_equal_values_can_be_drawn() -> None:
    chart = Chart("title", "x", "y", [Curve("a", Style(0), [(3.0, 1.0)])])
    assert len(chart.drawn()[0].markers) == 1
    assert chart.x_ticks
    assert chart.y_ticks


def test_the_alternative_text_says_where_each_curve_begins_and_ends() -> None:
    chart = Chart("title", "iteration", "loss", [Curve("MAML, seed 0", Style(0), [(10.0, 1.25), (2000.0, 0.125)])])
    assert chart.alt == "Line chart of loss over iteration. MAML, seed 0 from 1.25 at 10 to 0.125 at 2000."


def test_methods_are_told_apart_without_colour_and_runs_by_their_dash() -> None:
    assert len({(Style(n).colour, Style(n).marker) for n in range(42)}) == 42
    assert len({Style(n).marker for n in range(6)}) == 6
    assert len({Style(0, n).dash for n in range(4)}) == 4
