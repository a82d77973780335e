"""Output of commands: results on stdout, as JSON, a table or plain lines; and the files that flags name.

Not for log lines and progress, which go to stderr: `realm_jax/console.py`.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from realm_jax.errors import UserError
from realm_jax.storage import make_folder, write_atomic

WIDE = 1000  # columns of a table where no terminal limits it: another program may read the names in it


def stdout() -> Console:
    """Stdout for tables and text; numbers in it are not coloured."""
    return Console(highlight=False)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on a line of its own, for programs that read lines as they come."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def print_line(name: str, values: Iterable[Any], digits: str) -> None:
    """`name value …` for programs: floats in the format `digits`, `-` for None."""
    print(name, *("-" if x is None else f"{x:{digits}}" if isinstance(x, float) else x for x in values))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> Table:
    """A table without lines between its cells. numbers: whether columns hold numbers, all but the first and those
    without a head, which are notes."""
    columns = Table(box=None, pad_edge=False, header_style="bold")
    for number, head in enumerate(heads):
        right, style = numbers and number > 0 and head != "", "dim" if number > 0 and not head else None
        columns.add_column(head, justify="right" if right else "left", no_wrap=right, style=style, overflow="fold")
    for row in rows:
        columns.add_row(*row)
    return columns


def print_records(records: Sequence[dict[str, Any]], as_json: bool, nothing: str) -> None:
    """One JSON object per line, or a table of all that the records hold. nothing: what a table without rows says."""
    if as_json:
        for record in records:
            print_json(record)
        return
    keys = [*dict.fromkeys(key for record in records for key in record)]
    rows = [[_cell(record.get(key)) for key in keys] for record in records]
    out = stdout()
    if not out.is_terminal:
        out.width = WIDE
    out.print(table([key.replace("_", " ") for key in keys], rows) if records else nothing)


def _cell(value: Any) -> str:
    """A value for people: a dash for what is not there, thousands apart, three digits of a fraction."""
    if value is None or value is False or value in ("", {}):
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_cell(inner)}" for name, inner in value.items())
    if isinstance(value, bool | str):
        return "yes" if value is True else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


# ---- files


def checked_output(path: str | Path, flag: str) -> Path:
    """The file that `path` leads to, through links. Raises UserError, with the flag, where nothing can be written."""
    given = file = Path(path)
    if not is_special(given):
        file = Path(os.path.realpath(given))
        if file.is_dir() or not file.parent.is_dir():
            raise UserError(f"{flag}={given}: name a file in a folder that exists")
        make_folder(file.parent, flag)
    if file.exists() and not os.access(file, os.W_OK):
        raise UserError(f"{flag}={given}: may not be written to; name another")
    return file


def is_special(path: Path) -> bool:
    """Whether it is there and neither a file nor a folder: a pipe or a device, which is written to as it is."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_output(file: Path, text: str) -> None:
    """Write a checked file whole or not at all; a pipe or a device, which has nothing to replace, as it is."""
    if is_special(file):
        file.write_text(text, encoding="utf-8")
    else:
        write_atomic(file, text)
