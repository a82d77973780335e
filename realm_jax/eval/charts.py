"""Curves as places in a picture, which the macro `curves` of `templates/macros.html.j2` draws as SVG.

Colours are classes (`kind`), named in `templates/page.css`. Not for bars (`html.py`), and not for choosing what to
show: `report.py` does that.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

# Curves are thinned to this many points, each the mean of its neighbours: what the eye can tell apart.
_MOST_POINTS = 160
_MOST_DOTS = 40  # a curve of more points is drawn without a dot at each
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 22, 12, 42
_NAMES = 34  # what the names of bands take above the plot


class Series(NamedTuple):
    """One curve of (x, y) points in the order of x; `kind` is its colour class."""

    points: Sequence[tuple[float, float]]
    kind: str
    is_dashed: bool = False


class Band(NamedTuple):
    """A named stretch of the x axis, such as a stage of training."""

    name: str
    start: float
    end: float


def plot(
    series: Sequence[Series],
    description: str,
    x_label: str,
    y_range: tuple[float, float] | None = None,
    bands: Sequence[Band] = (),
    marks: Sequence[float] = (),
    size: tuple[int, int] = (520, 350),
) -> dict[str, Any] | None:
    """What the macro `curves` draws, at its place in pixels from the upper left corner; None if no value is finite.

    `description` is the text alternative for screen readers. `y_range` is the least range of the y axis; it grows
    where the data go beyond it. `marks` are places on the x axis that get a triangle and a fine line.
    """
    shown = [one._replace(points=thinned(one.points)) for one in series]
    points = [point for one in shown for point in one.points]
    if not points:
        return None
    (width, height), top = size, _TOP + _NAMES * bool(bands)
    right, bottom = width - _RIGHT, height - _BOTTOM
    across = [0.0, *(point[0] for point in points), *(end for band in bands for end in (band.start, band.end)), *marks]
    x = _Axis(*_span(across), _LEFT, right)
    y = _Axis(*_rounded_span([*(point[1] for point in points), *(y_range or ())]), bottom, top)
    return {
        "description": description,
        "size": size,
        "frame": {"left": _LEFT, "right": right, "top": top, "bottom": bottom},
        "x_label": x_label,
        "x_ticks": x.ticks(most=6 if right > 400 else 3),
        "y_ticks": y.ticks(most=5),
        "bands": [_band(x, index, band) for index, band in enumerate(bands)],
        "marks": [x.place(mark) for mark in marks],
        "curves": [_curve(x, y, one) for one in shown if one.points],
    }


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most 160 points: means over neighbours, without the values that are not finite."""
    finite = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    width = math.ceil(len(finite) / _MOST_POINTS) or 1
    groups = [finite[start : start + width] for start in range(0, len(finite), width)]
    return [(_mean([x for x, _ in group]), _mean([y for _, y in group])) for group in groups]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten apart) from low to high, at most `most` and one."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if (high - low) / (power * factor) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


class _Axis(NamedTuple):
    """The values from low to high, laid along the picture from `start` to `end`."""

    low: float
    high: float
    start: int
    end: int

    def place(self, value: float) -> float:
        """Where a value stands, in tenths of a pixel."""
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Where the axis' round numbers stand, at most `most` and one, and how they are written."""
        return [(self.place(value), _short(value)) for value in ticks(self.low, self.high, most)]


def _band(x: _Axis, index: int, band: Band) -> dict[str, Any]:
    left = x.place(band.start)
    width = max(round(x.place(band.end) - left, 1), 0.0)
    lines = [band.name] if width > 8 * len(band.name) else band.name.split()
    # A stretch too narrow for its name goes without; the line above the chart names it.
    fits = len(lines) < 3 and width > 8 * max(map(len, lines), default=0)
    return {"kind": f"band{index % 3}", "left": left, "width": width, "lines": lines if fits else []}


def _curve(x: _Axis, y: _Axis, series: Series) -> dict[str, Any]:
    points = [(x.place(across), y.place(up)) for across, up in series.points]
    has_dots = not series.is_dashed and len(points) <= _MOST_DOTS
    return {"kind": series.kind, "is_dashed": series.is_dashed, "points": points, "dots": points if has_dots else []}


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _rounded_span(values: Sequence[float]) -> tuple[float, float]:
    """The range of the values, opened to the next round numbers so that no curve runs along the edge."""
    low, high = _span(values)
    marks = ticks(low, high, most=5)
    step = marks[1] - marks[0] if len(marks) > 1 else high - low
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
