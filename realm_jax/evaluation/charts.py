"""Curves as inline SVG that needs no script and no network, with a title for those who cannot see them.

Colours are classes (`kind`), named in `report_style.py`. Not for bars (`page.py`), and not for choosing what to show:
`report.py` does that.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from realm_jax.evaluation.page import text

# Curves are thinned to this many points, each the mean of its neighbours: what the eye can tell apart.
_MOST_POINTS = 160
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 22, 12, 42
_NAMES = 34  # what the names of bands take above the plot


class Series(NamedTuple):
    """One named curve of (x, y) points in the order of x; `kind` is its colour class."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str
    dashed: bool = False


class Band(NamedTuple):
    """A named stretch of the x axis, such as a stage of training."""

    name: str
    start: float
    end: float


def curves(
    series: Sequence[Series],
    description: str,
    x_label: str,
    y_range: tuple[float, float] | None = None,
    bands: Sequence[Band] = (),
    marks: Sequence[float] = (),
    size: tuple[int, int] = (520, 350),
) -> str:
    """A chart of curves as inline SVG; `description` is what someone who cannot see it is told.

    `y_range` is the least range of the y axis; it grows where the data go beyond it. `marks` are places on the x axis
    that get a triangle and a fine line.
    """
    shown = [one._replace(points=thinned(one.points)) for one in series]
    points = [point for one in shown for point in one.points]
    if not points:
        return '<p class="note">No finite values were logged.</p>'
    x_ends = [0.0] + [x for x, _ in points] + [end for band in bands for end in (band.start, band.end)] + list(marks)
    y_span = _rounded_span([y for _, y in points] + list(y_range or ()))
    plot = _Plot(_span(x_ends), y_span, *size, top=_TOP + _NAMES * bool(bands))
    parts = [plot.bands(bands), plot.grid(x_label), plot.marks(marks), *(plot.curve(one) for one in shown)]
    return (
        f'<svg class="curves" viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{text(description)}">'
        f"<title>{text(description)}</title>{''.join(parts)}</svg>"
    )


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


class _Plot:
    """The frame of one chart: from data to places in the picture, and its parts as SVG."""

    def __init__(
        self, x_range: tuple[float, float], y_range: tuple[float, float], width: int, height: int, top: int
    ) -> None:
        self.x_range, self.y_range, self.top = x_range, y_range, top
        self.right, self.bottom = width - _RIGHT, height - _BOTTOM

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (self.right - _LEFT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def grid(self, x_label: str) -> str:
        lines = [
            f'<path class="grid" d="M{_LEFT} {self.y(tick):.1f}H{self.right}"/>'
            f'<text x="{_LEFT - 7}" y="{self.y(tick) + 4.5:.1f}" text-anchor="end">{_short(tick)}</text>'
            for tick in ticks(*self.y_range, most=5)
        ]
        wide = 6 if self.right > 400 else 3
        labels = []
        for tick in ticks(*self.x_range, most=wide):
            place = f'x="{self.x(tick):.1f}" y="{self.bottom + 18}"'
            labels.append(f'<text {place} text-anchor="middle">{_short(tick)}</text>')
        middle = (_LEFT + self.right) / 2
        name = f'<text class="axis" x="{middle:.0f}" y="{self.bottom + 37}" text-anchor="middle">{text(x_label)}</text>'
        return f'{"".join(lines)}<path class="frame" d="M{_LEFT} {self.bottom}H{self.right}"/>{"".join(labels)}{name}'

    def bands(self, bands: Sequence[Band]) -> str:
        parts = []
        for index, band in enumerate(bands):
            left, width = self.x(band.start), max(self.x(band.end) - self.x(band.start), 0)
            parts.append(
                f'<rect class="band{index % 3}" x="{left:.1f}" y="{self.top}" width="{width:.1f}"'
                f' height="{self.bottom - self.top}"/>'
            )
            lines = [band.name] if width > 8 * len(band.name) else band.name.split()
            # A stretch too narrow for its name goes without; the line above the chart names it.
            if len(lines) < 3 and width > 8 * max(map(len, lines), default=0):
                spans = "".join(
                    f'<tspan x="{left + 2:.1f}" y="{self.top - 6 - 15 * row}">{text(line)}</tspan>'
                    for row, line in enumerate(reversed(lines))
                )
                parts.append(f'<text class="axis">{spans}</text>')
        return "".join(parts)

    def marks(self, marks: Sequence[float]) -> str:
        return "".join(
            f'<path class="mark" d="M{self.x(mark):.1f} {self.top}V{self.bottom}"/>'
            f'<path class="flag" d="M{self.x(mark):.1f} {self.bottom - 9}l5 9h-10z"/>'
            for mark in marks
        )

    def curve(self, series: Series) -> str:
        places = [f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in series.points]
        if not places:
            return ""
        style = f"curve {text(series.kind)}{' dashed' if series.dashed else ''}"
        dots = "".join(
            f'<circle class="dot {text(series.kind)}" cx="{place.split()[0]}" cy="{place.split()[1]}" r="3.4"/>'
            for place in (places if len(places) <= 40 and not series.dashed else ())
        )
        return f'<path class="{style}" d="M{"L".join(places)}"/>{dots}'


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
