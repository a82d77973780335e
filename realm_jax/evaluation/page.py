"""Small pieces of a page: escaped text, bars, keys, cards, tables, and numbers as people write them.

Bars are HTML lists rather than pictures, so that they stay readable on a narrow screen and to a screen reader. Colours
are classes (`kind`), named in `report_style.py`. Not for choosing what to show: `report.py` does that.
Arguments called `body` and `parts` are HTML already; every other text is escaped here.
"""

import html
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from realm_jax.evaluation.report_style import STYLE


class Bar(NamedTuple):
    """One labelled value; `kind` is its colour class, `shown` the value as text."""

    label: str
    value: float
    kind: str
    shown: str


def text(value: object) -> str:
    """A value as HTML text, harmless wherever it stands, attributes included."""
    return html.escape(str(value), quote=True)


def page(title: str, content: str) -> str:
    """A whole document of `content`, which is HTML: it needs no network and runs no script."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{content}\n</main></body></html>\n"
    )


def bars(rows: Sequence[Bar], maximum: float = 1.0) -> str:
    """A list of horizontal bars, full width for `maximum`."""
    items = []
    for row in rows:
        width = 100 * min(max(row.value / maximum, 0), 1) if math.isfinite(row.value) else 0
        items.append(
            f'<li class="bar {text(row.kind)}"><span class="label">{text(row.label)}</span>'
            f'<span class="track"><span class="fill" style="width:{width:.2f}%"></span></span>'
            f'<span class="value">{text(row.shown)}</span></li>'
        )
    return f'<ul class="bars">{"".join(items)}</ul>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """The key of a chart: (name, kind) of each series."""
    keys = "".join(f'<li class="{text(kind)}"><i></i>{text(name)}</li>' for name, kind in entries)
    return f'<ul class="legend">{keys}</ul>'


def card(heading: str, note: str, body: str) -> str:
    """A boxed section with a heading and a line that says what is seen."""
    explained = f'<p class="note">{text(note)}</p>' if note else ""
    return f'<section class="card"><h2>{text(heading)}</h2>{explained}{body}</section>'


def grid(columns: str, parts: Iterable[str]) -> str:
    """Parts side by side (`columns`: pair or quarters), below each other where it is narrow; empty parts left out."""
    present = [part for part in parts if part]
    if len(present) == 1 and columns == "pair":
        columns = "single"
    return f'<div class="{text(columns)}">{"".join(present)}</div>' if present else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """A table whose first column names the rows and whose last `numbers` columns are set to the right."""
    first_number = len(heads) - numbers

    def cell(tag: str, column: int, content: str, scope: str = "") -> str:
        style = ' class="number"' if column >= first_number else ""
        return f"<{tag}{scope}{style}>{text(content)}</{tag}>"

    head = "".join(cell("th", column, name, ' scope="col"') for column, name in enumerate(heads))
    lines = (
        cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", column, row[column]) for column in range(1, len(row)))
        for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def probability(value: float) -> str:
    """A probability as people write it: 0.129, or 1.1 × 10⁻¹⁴ and > 0.999 where three decimals would say 0 or 1."""
    if not math.isfinite(value) or value == 0 or value >= 0.001:
        return "> 0.999" if 0.9995 <= value < 1 else f"{value:.3f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def duration(seconds: float | None) -> str:
    """A time as people write it: 3.21 s, 6 min 53 s, 1 h 2 min; – where it is unknown."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
