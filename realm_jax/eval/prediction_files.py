"""The format of a predictions file: read, checked, resumed, and turned into TREC's files. No model, no device.

    OUTPUT                 a *record* a line, in the order of the questions
    OUTPUT.settings.json   what made it: checkpoint, corpus, questions, and all else that the bytes follow from

A record is a question, what is right, what was answered and which passages were retrieved; `realm predict --help`
lists its fields. Lines are written a batch at a time, and a batch is always of the same questions; so a file that was
cut off is resumed after its last whole batch, to the bytes of one that was not. Metrics: `question_metrics.py`.
"""

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from realm_jax.data.lines import json_records, strictly
from realm_jax.data.questions import GRADES, Question, are_grades, gold_of, gold_record, match_error
from realm_jax.errors import UserError
from realm_jax.storage import read_json, write_json_atomic

logger = logging.getLogger(__name__)

Record = dict[str, Any]
FACTS = ("task", "step", "passages", "passages_read", "parameters")  # of what made it: without them measures say little
_LARGEST = float(np.finfo(np.float32).max)
_COUNTS = ("step", "parameters", "passages", "passages_read", "lines")  # numbers of a settings file that are shown


def read_predictions(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a predictions file. Raises UserError, with file and line, for one that cannot be scored.

    Also raised if `realm predict` has not written all of it, or something was added to what it wrote; a file without
    settings is taken as it is.
    """
    wanted = read_settings(path).get("lines")
    if isinstance(wanted, int) and Path(path).is_file():
        with open(path, "rb") as stream:
            lines = sum(line.endswith(b"\n") for line in stream)
        if lines < wanted:
            raise UserError(
                f"{path}: {lines:,} of {wanted:,} questions are answered; repeat the `realm predict` command that "
                "wrote it"
            )
        if lines > wanted:
            raise UserError(too_many_lines_message(path, lines, wanted))
    records: list[Record] = []
    for line, record in strictly(path, json_records(path)):
        if (fault := _fault(record)) is not None:
            raise UserError(f"{path}:{line}: {fault}; is this a file of `realm predict`?")
        if records and ("retrieved" in record) != ("retrieved" in records[0]):
            raise UserError(
                f'{path}:{line}: some lines have "retrieved" and some not; write an empty list where nothing was found'
            )
        number = str(len(records) + 1)
        records.append(record | {"id": number if record.get("id") is None else record["id"]})
    if not records:
        raise UserError(f"{path} holds no predictions; make them with `realm predict`")
    return records


def settings_file(predictions: Path) -> Path:
    """The record beside a predictions file of what made it."""
    return predictions.with_name(f"{predictions.name}.settings.json")


def read_settings(predictions: str | os.PathLike[str]) -> dict[str, Any]:
    """What made a predictions file, as far as it is known; nothing for a file of another system."""
    file = settings_file(Path(predictions))
    found = read_json(file) if file.is_file() else {}
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no JSON object; remove it")
    wrong = [key for key in _COUNTS if not isinstance(found.get(key, 0), int)]
    if wrong:
        raise UserError(f'{file}: "{wrong[0]}" must be a whole number; remove the file, or predict again')
    return found


def too_many_lines_message(name: str | os.PathLike[str], found: int, asked: int) -> str:
    """The message for a file with more lines than questions."""
    return f"{name}: holds {found:,} lines for {asked:,} questions; remove the file and predict again"


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _are_passages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and {"id", "score"} <= one.keys() for one in value)


def _is_score(value: Any) -> bool:
    """True for a number that fits a float32, as a TREC run has it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


# Field → what its value must be if it is there, and in words.
Fields = dict[str, tuple[Callable[[Any], bool], str]]
_RECORD: Fields = {
    "answers": (_are_texts, "a list of texts"),
    "id": (lambda value: value is None or _is_id(value), "a text or a whole number"),
    "gold_passage_id": (lambda value: value is None or _is_id(value), "a text or a whole number"),
    "gold_passages": (are_grades, f"an object of ids and grades, {GRADES}"),
    "reader_oracle": (lambda value: isinstance(value, bool), "true or false"),
    "retrieved": (_are_passages, 'a list of passages with "id" and "score"'),
}
_PASSAGE: Fields = {
    "id": (_is_id, "a text or a whole number"),
    "score": (_is_score, "a finite number"),
    "has_answer": (lambda value: isinstance(value, bool), "true or false"),
}


def _fault(record: Record) -> str | None:
    """What is wrong with the fields of a record, if anything."""
    if not _are_texts([record.get("question"), record.get("prediction")]):
        return '"question" and "prediction" must be texts'
    for name, (fits, words) in _RECORD.items():
        if name in record and not fits(record[name]):
            return f'"{name}" must be {words}'
    if record.get("answers") and (unknown := match_error(record.get("match"))) is not None:
        return str(unknown)
    retrieved = record.get("retrieved", [])
    for name, (fits, words) in _PASSAGE.items():
        if not all(fits(passage[name]) for passage in retrieved if name in passage):
            return f'every "{name}" of "retrieved" must be {words}'
    if len({"has_answer" in passage for passage in retrieved}) > 1:
        return 'either every passage of "retrieved" or none has "has_answer"'
    return None


def check_same_questions(first: Sequence[Record], second: Sequence[Record], path: str) -> None:
    """Raise UserError at the first question that is another, or has other answers or another gold passage."""
    if len(first) != len(second):
        raise UserError(
            f"{path}: has {len(second):,} predictions, the other file {len(first):,}; predict the same questions"
        )
    for number, pair in enumerate(zip(first, second, strict=True), start=1):
        asked, other = ([one["question"], one.get("answers"), one.get("match")] for one in pair)
        if asked != other:
            raise UserError(
                f"{path}: question {number} is {other[0][:60]!r}, in the other file {asked[0][:60]!r}, or its answers "
                "differ; predict the same questions in the same order"
            )
        golds = [gold_of(one) for one in pair]
        if all(golds) and golds[0] != golds[1]:
            there, here = (json.dumps(gold_record(gold))[:100] for gold in golds)
            raise UserError(
                f"{path}: question {number} has {here}, in the other file {there}; predict the same questions over the "
                "same corpus"
            )


def question_record(question: Question, number: int) -> Record:
    """What is known of a question before it is asked; its number stands for an id that it does not have."""
    found = next((question.fields[key] for key in ("id", "qid") if question.fields.get(key) is not None), number)
    record: Record = {"id": str(found), "question": question.question}
    if question.answers:
        record["answers"] = question.answers
    if question.is_regex:
        record["match"] = "regex"
    return record | gold_record(question.gold)


def write_record(record: Record) -> str:
    """A record as a line of a predictions file."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


# ---- a file that is made


def resume(output: Path, settings: dict[str, Any], questions: int) -> int:
    """How many records are there and stay; the rest of the file is cut off. A new file gets its settings first.

    Raises UserError for a file that was made by something else, or that has more lines than there are questions.
    """
    file = settings_file(output)
    if output.stat().st_size == 0:
        write_json_atomic(file, settings)
        return 0
    if not file.is_file():
        raise UserError(f"--output={output}: is not a file of `realm predict` (there is no {file.name}); name another")
    made = read_json(file)
    changed = [key for key, value in settings.items() if not isinstance(made, dict) or made.get(key) != value]
    if changed:
        raise UserError(
            f"--output={output}: was made with other {' and '.join(changed)} ({file.name} has them); "
            "name another file, or remove this one"
        )
    # Cut the file off after its last whole batch.
    ends = [0]
    with open(output, "r+b") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                ends.append(ends[-1] + len(line))
        done = len(ends) - 1
        if done > questions:
            raise UserError(too_many_lines_message(f"--output={output}", done, questions))
        if done < questions:
            done -= done % settings["batch_size"]
        stream.truncate(ends[done])
    logger.info("%s: resuming after %d of %d predictions", output, done, questions)
    return done


# ---- TREC


def trec_run(records: Sequence[Record], tag: str) -> str:
    """The retrieved passages as a TREC run: `qid Q0 docid rank score tag` a line, the best first.

    A document of several passages stands once, at its best place. Tools that read such files sort by the score and not
    by the rank, so a score that is not below the one before (in float32) is lowered by one step. White space in ids is
    written as in URLs. Raises UserError if two questions have one id.
    """
    lines = []
    for number, record in zip(trec_ids(records), records, strict=True):
        documents: dict[str, float] = {}
        for passage in record.get("retrieved", ()):
            documents.setdefault(_trec(passage["id"]), passage["score"])
        below = np.float32(np.inf)
        for rank, (document, score) in enumerate(documents.items(), start=1):
            below = min(np.float32(score), np.nextafter(below, np.float32(-np.inf)))
            lines.append(f"{number} Q0 {document} {rank} {below:.9g} {_trec(tag)}\n")
    return "".join(lines)


def trec_qrels(records: Sequence[Record]) -> str:
    """The gold passages as TREC's judgments, `qid 0 docid grade` a line. Raises as `trec_run` does."""
    golds = zip(trec_ids(records), map(gold_of, records), strict=True)
    return "".join(f"{number} 0 {_trec(name)} {grade}\n" for number, gold in golds for name, grade in gold.items())


def trec_ids(records: Sequence[Record]) -> list[str]:
    """One word for each question. Raises UserError if two would have the same."""
    ids = [_trec(record["id"]) for record in records]
    twice = next((one for one, count in Counter(ids).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"two questions have the id {twice}; TREC's files need one for each")
    return ids


def _trec(name: Any) -> str:
    """A name as one word."""
    return re.sub(r"[\s%]", lambda found: quote(found[0]), str(name)) or "-"
