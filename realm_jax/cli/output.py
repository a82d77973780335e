"""Print results of commands on stdout as JSON, a table or plain lines; check and write the files that flags name.

Log lines and progress go to stderr, by `realm_jax/console.py`.
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

WIDE = 1000  # columns of a table if stdout is no terminal, so that no name is wrapped for the program that reads it


def stdout() -> Console:
    """Return the console of stdout for tables and text, which does not color numbers."""
    return Console(highlight=False)


def print_json(value: Mapping[str, Any]) -> None:
    """Print a JSON object as one line, flushed for programs that read lines as they come."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def print_line(name: str, values: Iterable[Any], digits: str) -> None:
    """Print `name value …` for programs.

    Args:
        name: first word of the line.
        values: numbers or words; None is printed as `-`.
        digits: format of floats, such as `.4f`.
    """
    print(name, *("-" if x is None else f"{x:{digits}}" if isinstance(x, float) else x for x in values))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> Table:
    """Return a table without lines between its cells.

    Args:
        heads: headings of the columns.
        rows: their cells.
        numbers: whether all columns hold numbers, except the first and those without a head, which are notes.
    """
    columns = Table(box=None, pad_edge=False, header_style="bold")
    for number, head in enumerate(heads):
        right, style = numbers and number > 0 and head != "", "dim" if number > 0 and not head else None
        columns.add_column(head, justify="right" if right else "left", no_wrap=right, style=style, overflow="fold")
    for row in rows:
        columns.add_row(*row)
    return columns


def print_records(records: Sequence[dict[str, Any]], as_json: bool, empty_message: str) -> None:
    """Print records as one JSON object per line, or as a table with a column for every key.

    Args:
        records: may have different keys.
        as_json: JSON instead of a table.
        empty_message: printed instead of a table without rows.
    """
    if as_json:
        for record in records:
            print_json(record)
        return
    keys = [*dict.fromkeys(key for record in records for key in record)]
    rows = [[_cell(record.get(key)) for key in keys] for record in records]
    out = stdout()
    if not out.is_terminal:
        out.width = WIDE
    out.print(table([key.replace("_", " ") for key in keys], rows) if records else empty_message)


def _cell(value: Any) -> str:
    """Return a value for people: a dash for an empty value, commas between thousands, three digits of a fraction."""
    if value is None or value is False or value in ("", {}):
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_cell(inner)}" for name, inner in value.items())
    if isinstance(value, bool | str):
        return "yes" if value is True else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


# ---- files


def checked_output(path: str | Path, flag: str) -> Path:
    """Return the file that a path leads to through links.

    Args:
        path: value of a flag.
        flag: its name, for the message.

    Raises:
        UserError: the file cannot be written.
    """
    target = file = Path(path)
    if not is_special(target):
        file = Path(os.path.realpath(target))
        if file.is_dir() or not file.parent.is_dir():
            raise UserError(f"{flag}={target}: is not a file in an existing folder; name such a file")
        make_folder(file.parent, flag)
    if file.exists() and not os.access(file, os.W_OK):
        raise UserError(f"{flag}={target}: cannot be written; name another file")
    return file


def is_special(path: Path) -> bool:
    """Return True for a pipe or a device, which is written to directly and not replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_output(file: Path, text: str) -> None:
    """Write a file atomically; write directly to a pipe or a device.

    Args:
        file: from `checked_output`.
        text: its content.
    """
    if is_special(file):
        file.write_text(text, encoding="utf-8")
    else:
        write_atomic(file, text)
