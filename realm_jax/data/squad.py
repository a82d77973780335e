"""Questions of SQuAD and of what has its format (XQuAD, MLQA, GermanQuAD): one JSON object, over however many lines.

Hugging Face has a record a question in place of articles, paragraphs and questions: they are *flat*. Contexts are left
out: passages come from a corpus. What the records mean: read `realm_jax.data.questions` next.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from realm_jax.data.files import UNPACKING_FAULTS, open_unpacked
from realm_jax.data.lines import Records, check_characters
from realm_jax.data.records import BadRecord, Path_, applied
from realm_jax.errors import UserError

IMPOSSIBLE = "that no passage answers (is_impossible)"
_KEPT = ("question", "id", "gold_passage_id", "gold_passages")
_BEGINNING = re.compile(rb'\s*\{\s*("version"\s*:[^,]*,\s*)?"data"\s*:\s*\[')


def is_squad(path: Path_) -> bool:
    """Whether a `.json` file, packed or not, begins as SQuAD's do. False where it cannot be unpacked."""
    if ".json" not in Path(str(path).lower()).suffixes:
        return False
    with open_unpacked(path) as stream:
        try:
            return _BEGINNING.match(stream.read(1_000)) is not None
        except UNPACKING_FAULTS:
            return False


def is_flat(record: Any) -> bool:
    """Whether a record is a question as Hugging Face has SQuAD's: "context" and "answers": {"text": […]} beside it."""
    return isinstance(record, dict) and {"context", "question"} <= record.keys() and _has_texts(record.get("answers"))


def _has_texts(answers: Any) -> bool:
    return isinstance(answers, dict) and isinstance(answers.get("text"), list)


def squad_records(path: Path_, dropped: Counter[str]) -> Records:
    """{"question", "answers", "id"} of each question, with its number in place of a line.

    dropped: counts the questions without an answer. Raises UserError for a file of another format.
    """
    return _answerable(applied(_record, enumerate(_questions(path), start=1)), dropped)


def with_answers(records: Records, dropped: Counter[str]) -> Records:
    """The same for those of some records that are flat; others as they are. Hugging Face's files hold such alone."""
    return _answerable(applied(lambda record: _record(record) if is_flat(record) else record, records), dropped)


def _answerable(records: Iterable[tuple[int, dict[str, Any] | BadRecord | None]], dropped: Counter[str]) -> Records:
    """The records but those that are None, which are counted."""
    for number, found in records:
        if found is None:
            dropped[IMPOSSIBLE] += 1
        else:
            yield number, found


def _questions(path: Path_) -> Iterator[Any]:
    try:
        with open_unpacked(path) as stream:
            articles = json.load(stream)["data"]
        return iter([one for article in articles for one in _questions_of(article)])
    except UNPACKING_FAULTS as fault:
        reason = f"truncated or damaged ({fault})"
    except (ValueError, RecursionError) as fault:
        reason = f"not readable as JSON ({fault})"
    except (KeyError, TypeError) as fault:
        reason = f"not data[].paragraphs[].qas[], as SQuAD's are ({fault!r})"
    raise UserError(f"{path}: {reason}; fetch or make it again")


def _questions_of(article: dict[str, Any]) -> Iterable[Any]:
    """The questions of an article, or the record itself where it is one."""
    return [article] if "question" in article else [one for part in article["paragraphs"] for one in part["qas"]]


def _record(found: Any) -> dict[str, Any] | None:
    """The question; None where no passage answers it."""
    try:
        check_characters(found)
        given = found.get("answers") or ()
        texts = given["text"] if isinstance(given, dict) else [answer["text"] for answer in given]
        answers = dict.fromkeys(texts)
        impossible = found.get("is_impossible")
        if not answers and is_flat(found) if impossible is None else impossible:
            return None
        return {key: found[key] for key in _KEPT if key in found} | {"answers": [*answers]}
    except (AttributeError, KeyError, TypeError):
        raise BadRecord('no "question" with "answers" of a "text" each', "correct or remove it") from None
