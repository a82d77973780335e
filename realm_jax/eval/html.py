"""HTML pages from the Jinja2 templates in `templates/`: one file each, without network access or scripts.

`base.html.j2` is the frame of every page, `macros.html.j2` what pages share, `page.css` the style sheet, whose classes
are the `kind` of bars and curves. All values are escaped, and a name that a template uses and is not given is an error.
Not for choosing what a page shows: read `report.py` for that.
"""

import functools
import math
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined


class Bar(NamedTuple):
    """One labelled value; `kind` is its colour class, `shown` the value as text, `maximum` the value of a full bar.

    Bars are HTML lists rather than pictures, so that they stay readable on a narrow screen and to a screen reader.
    """

    label: str
    value: float
    kind: str
    shown: str
    maximum: float = 1.0

    @property
    def width(self) -> str:
        """The width in CSS: per cent of a full bar, none where the value is not finite."""
        part = self.value / self.maximum if math.isfinite(self.value) else 0.0
        return f"{100 * min(max(part, 0.0), 1.0):.2f}%"


def render(template: str, **values: Any) -> str:
    """A page of `templates/`. Raises jinja2.UndefinedError where the template uses a value that is not given."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> Environment:
    loader = PackageLoader("realm_jax.eval", "templates")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
