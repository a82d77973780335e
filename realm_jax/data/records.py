"""Good and bad records of files: what cannot be read is a `BadRecord` in its place, and whoever reads decides.

`strictly` raises a UserError with file and line, others count it. Read `realm_jax.data.lines` next: where records come
from.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from realm_jax.errors import UserError

SAMPLE = 80  # characters

Path_ = str | os.PathLike[str]
_T = TypeVar("_T")
_R = TypeVar("_R")


class BadRecord(UserError):
    """A record of a file that cannot be read, in words that follow file and line, which the caller adds.

    message, advice: what is wrong, and what to do. reason: the same for all such records, to count them by; the message
    unless given. sample: the beginning of the record.
    """

    def __init__(self, message: str, advice: str, reason: str = "", sample: str = ""):
        super().__init__(f"{message}; {advice}")
        self.message, self.reason, self.sample = message, reason or message, sample


def sample(value: Any) -> str:
    """The beginning of a record, as one line that any file or terminal takes."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    # Few characters of each field: a record may hold millions.
    if isinstance(value, dict):
        value = {str(key)[:SAMPLE]: str(field)[:SAMPLE] for key, field in list(value.items())[:8]}
    line = " ".join(str(value)[: 4 * SAMPLE].split())[:SAMPLE]
    return line.encode("utf-8", "replace").decode("utf-8")


def applied(
    function: Callable[[_T], _R], records: Iterable[tuple[int, _T | BadRecord]]
) -> Iterator[tuple[int, _R | BadRecord]]:
    """What a function gives for each record, with its line; what it raises as a BadRecord takes the record's place."""
    for line, record in records:
        if isinstance(record, BadRecord):
            yield line, record
            continue
        try:
            result = function(record)
        except BadRecord as fault:
            yield line, fault
        else:
            yield line, result


def strictly(path: Path_, records: Iterable[tuple[int, _T | BadRecord]]) -> Iterator[tuple[int, _T]]:
    """The records with their lines. Raises UserError, with file and line, at the first bad one."""
    for line, record in records:
        if isinstance(record, BadRecord):
            raise UserError(f"{path}:{line}: {record}")
        yield line, record
