"""Line charts as SVG that takes its colours from the page: where everything lies is computed here, drawn there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 54, 20, 12, 42
"""Room for the axes' labels. The whole is small, so that letters can be read at the width of a phone."""

MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.5-3.5h7v7h-7z",
    "M0-5L5 0L0 5L-5 0z",
    "M0-5L4.6 3.5H-4.6z",
    "M0 5L-4.6-3.5H4.6z",
    "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
)
"""Circle, square, diamond, triangles and cross: for readers who do not tell colours apart."""
DASHES = ("", "6 3", "2 2", "8 3 2 3")
COLOURS = 7
"""How many colours the style sheet has."""
POINTS = 240
"""More points than that cannot be seen."""
SPARSE = 5
"""Markers on a curve whose points lie close together."""


@dataclass(frozen=True)
class Style:
    """How a curve looks: a method has a colour and a marker, a run of several a dash."""

    method: int
    run: int = 0

    @property
    def colour(self) -> int:
        """Number of the colour in the style sheet."""
        return self.method % COLOURS

    @property
    def marker(self) -> str:
        """Outline of the marker, around (0, 0)."""
        return MARKERS[self.method % len(MARKERS)]

    @property
    def dash(self) -> str:
        """Lengths of dashes and gaps."""
        return DASHES[self.run % len(DASHES)]


@dataclass(frozen=True)
class Curve:
    """Points to draw, with intervals where they were measured each by itself."""

    label: str
    style: Style
    points: Sequence[tuple[float, float]]
    intervals: Sequence[float] = ()


@dataclass(frozen=True)
class DrawnCurve:
    """A curve in the coordinates of the picture."""

    style: Style
    path: str
    markers: list[tuple[float, float]]
    bars: list[tuple[float, float, float]]
    """Intervals: horizontal position, lower and upper end."""


@dataclass(frozen=True)
class Chart:
    """A line chart."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]

    @property
    def alt(self) -> str:
        """What someone who cannot see the chart has to know: where each curve begins and ends."""
        ends = [
            f"{curve.label} from {curve.points[0][1]:.4g} at {curve.points[0][0]:g} "
            f"to {curve.points[-1][1]:.4g} at {curve.points[-1][0]:g}"
            for curve in self.curves
        ]
        return f"Line chart of {self.y_label} over {self.x_label}. {'; '.join(ends)}."

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        """Position and text of the ticks below."""
        return [(self._x(value), text) for value, text in ticks(*self._x_range, most=6)]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        """Position and text of the ticks at the left."""
        return [(self._y(value), text) for value, text in ticks(*self._y_range, most=6)]

    def drawn(self) -> list[DrawnCurve]:
        """Return the curves in the coordinates of the picture."""
        return [self._drawn(curve) for curve in self.curves]

    def _drawn(self, curve: Curve) -> DrawnCurve:
        points = [(self._x(x), self._y(y)) for x, y in thinned(curve.points, POINTS)]
        bars = [
            (self._x(x), self._y(y - interval), self._y(y + interval))
            for (x, y), interval in zip(curve.points, curve.intervals, strict=False)
        ]
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        return DrawnCurve(curve.style, path, points if bars else thinned(points, SPARSE), bars)

    @cached_property
    def _x_range(self) -> tuple[float, float]:
        return _range([x for curve in self.curves for x, _ in curve.points], margin=0.02)

    @cached_property
    def _y_range(self) -> tuple[float, float]:
        ends = [y for curve in self.curves for _, y in curve.points]
        for curve in self.curves:
            for (_, y), interval in zip(curve.points, curve.intervals, strict=False):
                ends += [y - interval, y + interval]
        return _range(ends, margin=0.06)

    def _x(self, value: float) -> float:
        low, high = self._x_range
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low), 1)

    def _y(self, value: float) -> float:
        low, high = self._y_range
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low), 1)


def ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Return round numbers in a range, that many at most, with as many decimals as they need."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(n * step, f"{n * step:.{decimals}f}") for n in numbers]


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Leave out points evenly until there are no more than that; the first and the last stay."""
    if len(points) <= most:
        return list(points)
    return [points[round(n * (len(points) - 1) / (most - 1))] for n in range(most)]


def _range(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = margin * (high - low) or 1.0
    return low - room, high + room
