"""Questions of SQuAD and of what has its format (XQuAD, MLQA, GermanQuAD): one JSON object, over however many lines.

Contexts are left out: passages come from a corpus. What the records mean: read `realm_jax.data.questions` next.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realm_jax.data.files import UNPACKING_FAULTS, open_unpacked
from realm_jax.data.lines import Records, check_characters
from realm_jax.data.records import BadRecord, Path_, applied
from realm_jax.errors import UserError

IMPOSSIBLE = "that no passage answers (is_impossible)"
_BEGINNING = re.compile(rb'\s*\{\s*("version"\s*:[^,]*,\s*)?"data"\s*:\s*\[')


def is_squad(path: Path_) -> bool:
    """Whether a `.json` file, packed or not, begins as SQuAD's do. False where it cannot be unpacked."""
    if ".json" not in Path(path).suffixes:
        return False
    with open_unpacked(path) as stream:
        try:
            return _BEGINNING.match(stream.read(1_000)) is not None
        except UNPACKING_FAULTS:
            return False


def squad_records(path: Path_, dropped: Counter[str]) -> Records:
    """{"question", "answers", "id"} of each question, with its number in place of a line.

    dropped: counts the questions without an answer. Raises UserError for a file of another format.
    """
    for number, found in applied(_record, enumerate(_questions(path), start=1)):
        if isinstance(found, BadRecord) or not found.pop("is_impossible"):
            yield number, found
        else:
            dropped[IMPOSSIBLE] += 1


def _questions(path: Path_) -> Iterator[Any]:
    try:
        with open_unpacked(path) as stream:
            articles = json.load(stream)["data"]
        return iter([one for article in articles for part in article["paragraphs"] for one in part["qas"]])
    except UNPACKING_FAULTS as fault:
        reason = f"truncated or damaged ({fault})"
    except (ValueError, RecursionError) as fault:
        reason = f"not readable as JSON ({fault})"
    except (KeyError, TypeError) as fault:
        reason = f"not data[].paragraphs[].qas[], as SQuAD's are ({fault!r})"
    raise UserError(f"{path}: {reason}; fetch or make it again")


def _record(found: Any) -> dict[str, Any]:
    try:
        check_characters(found)
        answers = dict.fromkeys(answer["text"] for answer in found.get("answers") or ())
        kept = {key: found[key] for key in ("question", "id") if key in found}
        return kept | {"answers": [*answers], "is_impossible": found.get("is_impossible", False)}
    except (AttributeError, KeyError, TypeError):
        raise BadRecord('no "question" with "answers" of a "text" each', "correct or remove it") from None
