"""Render self-contained HTML pages of tables, bars and curves: one file each, no scripts, no network access.

Every page is a headline and a list of `Section`s, drawn by `templates/page.html.j2`. All values are escaped.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

Cell = str | tuple[str, str, str]  # a text, or the text before, in and after a mark
MAX_POINTS = 160  # of a curve: more cannot be told apart
MAX_DOTS = 40  # a curve of more points is drawn without a dot at each


class Bar(NamedTuple):
    """One labeled value.

    Attributes:
        label: its name.
        value: value that the bar shows.
        text: the value as text.
        maximum: the value of a full bar.
    """

    label: str
    value: float
    text: str
    maximum: float = 1.0

    @property
    def width(self) -> str:
        """Return the width in CSS: percent of a full bar, 0 if the value is not finite."""
        part = self.value / self.maximum if math.isfinite(self.value) else 0.0
        return f"{100 * min(max(part, 0.0), 1.0):.2f}%"


class Band(NamedTuple):
    """A named interval of the x axis, such as a stage of training.

    Attributes:
        name: shown if the band is wide enough.
        start: value of x.
        end: value of x.
    """

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Section:
    """One card of a page. Empty parts are not drawn.

    Attributes:
        heading: its title.
        note: a paragraph below the heading.
        heads: headings of the table's columns.
        rows: rows of the table.
        numbers: how many of the last columns are aligned to the right.
        bars: below each other.
        curve: from `chart`.
    """

    heading: str
    note: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    numbers: int = 0
    bars: Sequence[Bar] = ()
    curve: dict[str, Any] | None = None


def render_page(
    title: str, headline: str, sections: Sequence[Section], figures: str = "", notes: Sequence[str] = ()
) -> str:
    """Render a page.

    Args:
        title: title of the browser's window.
        headline: the main finding.
        sections: in order.
        figures: the numbers behind the headline, shown below it.
        notes: paragraphs below the headline.

    Returns:
        HTML.
    """
    template = environment().get_template("page.html.j2")
    return template.render(title=title, headline=headline, figures=figures, notes=notes, sections=sections)


@functools.cache
def environment() -> Environment:
    """Return the Jinja2 environment of `templates/`; a template that uses an undefined value raises an error."""
    loader = PackageLoader("realm_jax.eval", "templates")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def chart(
    points: Sequence[tuple[float, float]],
    description: str,
    x_label: str = "training steps, one stage after the other",
    y_range: tuple[float, float] | None = None,
    bands: Sequence[Band] = (),
    marks: Sequence[float] = (),
    level: float | None = None,
) -> dict[str, Any] | None:
    """Lay out a curve for `templates/curve.svg.j2`.

    Args:
        points: (x, y) in the order of x, from x = 0; values that are not finite are not drawn.
        description: the text for screen readers.
        x_label: the text below the x axis.
        y_range: values of y that the axis includes.
        bands: intervals of the x axis that get a shade and a name.
        marks: values of x that get a triangle and a fine line.
        level: a value of y that is drawn as a dashed line, such as BM25's recall.

    Returns:
        Coordinates in pixels from the upper left corner; None if no value is finite.
    """
    finite = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return None
    (width, height), top = (660, 320), 46 if bands else 12
    left, right, bottom = 46, width - 22, height - 42
    x_end = max(*(x for x, _ in finite), *(band.end for band in bands), *marks, 1e-9)
    heights = [y for _, y in finite] + [*(y_range or ())] + ([] if level is None else [level])
    low, high = min(heights), max(heights)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    # The y axis ends at round numbers, so that no curve runs along the edge.
    y_marks = ticks(low, high, 5)
    step = y_marks[1] - y_marks[0] if len(y_marks) > 1 else high - low
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step

    def across(x: float) -> float:
        return round(left + x / x_end * (right - left), 1)

    def up(y: float) -> float:
        return round(bottom - (y - low) / (high - low) * (bottom - top), 1)

    curve = [(across(x), up(y)) for x, y in thinned(finite)]
    return {
        "description": description,
        "size": (width, height),
        "frame": {"left": left, "right": right, "top": top, "bottom": bottom},
        "x_label": x_label,
        "x_ticks": [(across(x), _short(x)) for x in ticks(0, x_end, 6)],
        "y_ticks": [(up(y), _short(y)) for y in ticks(low, high, 5)],
        # A band that is too narrow for its name has none.
        "bands": [
            (across(start), across(end), name if across(end) - across(start) > 7 * len(name) else "")
            for name, start, end in bands
        ],
        "marks": [across(x) for x in marks],
        "level": None if level is None else up(level),
        "points": curve,
        "dots": curve if len(curve) <= MAX_DOTS else [],
    }


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most MAX_POINTS points: means over neighbors."""
    size = math.ceil(len(points) / MAX_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (math.fsum(x for x, _ in group) / len(group), math.fsum(y for _, y in group) / len(group)) for group in groups
    ]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers that are 1, 2, 2.5 or 5 times a power of ten apart.

    Args:
        low: none is lower.
        high: none is higher.
        most: steps between them.
    """
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if (high - low) / (power * factor) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
