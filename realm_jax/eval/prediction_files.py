"""Read, check and resume predictions files, and convert them to TREC's formats. No model, no device.

    OUTPUT                 a *record* on each line, in the order of the questions
    OUTPUT.settings.json   checkpoint, corpus, questions, and all other settings on which the bytes depend

A record is a question with its right answers, the prediction and the retrieved passages; `realm predict --help` lists
its fields. Lines are written a batch at a time, and a batch always has the same questions. So a truncated file is
resumed after its last complete batch and gets the same bytes. Metrics: `question_metrics.py`.
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
FACTS = ("task", "step", "passages", "passages_read", "parameters")  # reported with metrics
_LARGEST = float(np.finfo(np.float32).max)
_COUNTS = ("step", "parameters", "passages", "passages_read", "lines")  # numbers of a settings file that are shown


def read_predictions(path: str | os.PathLike[str]) -> list[Record]:
    """Return the records of a predictions file.

    Raises:
        UserError: a line cannot be scored, or the file has other lines than its settings say. Files of other systems
            have no settings, so their lines are not counted.
    """
    expected = read_settings(path).get("lines")
    if isinstance(expected, int) and Path(path).is_file():
        with open(path, "rb") as stream:
            lines = sum(line.endswith(b"\n") for line in stream)
        if lines < expected:
            raise UserError(
                f"{path}: {lines:,} of {expected:,} questions are answered; repeat the `realm predict` command that "
                "wrote it"
            )
        if lines > expected:
            raise UserError(too_many_lines_message(path, lines, expected))
    records: list[Record] = []
    for line, record in strictly(path, json_records(path)):
        if (error := _record_error(record)) is not None:
            raise UserError(f"{path}:{line}: {error}; is this a file of `realm predict`?")
        if records and ("retrieved" in record) != ("retrieved" in records[0]):
            raise UserError(
                f'{path}:{line}: some lines have "retrieved" and some not; write an empty list if nothing was retrieved'
            )
        number = str(len(records) + 1)
        records.append(record | {"id": number if record.get("id") is None else record["id"]})
    if not records:
        raise UserError(f"{path} holds no predictions; make them with `realm predict`")
    return records


def settings_file(predictions: Path) -> Path:
    """Return the path of a predictions file's settings."""
    return predictions.with_name(f"{predictions.name}.settings.json")


def read_settings(predictions: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings of a predictions file; empty for a file of another system."""
    file = settings_file(Path(predictions))
    settings = read_json(file) if file.is_file() else {}
    if not isinstance(settings, dict):
        raise UserError(f"{file} holds no JSON object; remove it")
    wrong = [key for key in _COUNTS if not isinstance(settings.get(key, 0), int)]
    if wrong:
        raise UserError(f'{file}: "{wrong[0]}" must be a whole number; remove the file, or predict again')
    return settings


def too_many_lines_message(name: str | os.PathLike[str], lines: int, questions: int) -> str:
    """Return the error message for a file with more lines than questions.

    Args:
        name: the file or flag at the start of the message.
        lines: lines of the file.
        questions: questions that were to be answered.
    """
    return f"{name}: holds {lines:,} lines for {questions:,} questions; remove the file and predict again"


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _are_passages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(passage, dict) and {"id", "score"} <= passage.keys() for passage in value
    )


def _is_score(value: Any) -> bool:
    """Return True for a number that fits a float32, as in a TREC run."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


# Optional field → a check of its value, and the check in words.
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


def _record_error(record: Record) -> str | None:
    """Return the first error in the fields of a record, or None."""
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
    """Check that two files predict the same questions.

    Args:
        first: records of the first file.
        second: records of the second file.
        path: the second file, for messages.

    Raises:
        UserError: a question differs, or its answers or gold passages differ.
    """
    if len(first) != len(second):
        raise UserError(
            f"{path}: has {len(second):,} predictions, the other file {len(first):,}; predict the same questions"
        )
    for number, pair in enumerate(zip(first, second, strict=True), start=1):
        ours, theirs = ([record["question"], record.get("answers"), record.get("match")] for record in pair)
        if ours != theirs:
            raise UserError(
                f"{path}: question {number} is {theirs[0][:60]!r}, in the other file {ours[0][:60]!r}, or its answers "
                "differ; predict the same questions in the same order"
            )
        golds = [gold_of(record) for record in pair]
        if all(golds) and golds[0] != golds[1]:
            there, here = (json.dumps(gold_record(gold))[:100] for gold in golds)
            raise UserError(
                f"{path}: question {number} has {here}, in the other file {there}; predict the same questions over the "
                "same corpus"
            )


def question_record(question: Question, number: int) -> Record:
    """Return the fields of a record that are known before the question is answered.

    Args:
        question: with answers and gold passages, if it has them.
        number: number of the question, from 1; the id of a question without one.
    """
    name = next((question.fields[key] for key in ("id", "qid") if question.fields.get(key) is not None), number)
    record: Record = {"id": str(name), "question": question.question}
    if question.answers:
        record["answers"] = question.answers
    if question.is_regex:
        record["match"] = "regex"
    return record | gold_record(question.gold)


def write_record(record: Record) -> str:
    """Return a record as a line of a predictions file."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


# ---- write and resume


def resume(output: Path, settings: dict[str, Any], questions: int) -> int:
    """Truncate a predictions file after its last complete batch. For an empty file, write the settings.

    Args:
        output: the predictions file, which exists.
        settings: settings of this command, with "batch_size".
        questions: how many are to be answered.

    Returns:
        The number of records that stay.

    Raises:
        UserError: the file has other settings or none, or more lines than there are questions.
    """
    file = settings_file(output)
    if output.stat().st_size == 0:
        write_json_atomic(file, settings)
        return 0
    if not file.is_file():
        raise UserError(f"--output={output}: is not a file of `realm predict` (there is no {file.name}); name another")
    existing = read_json(file)
    recorded = existing if isinstance(existing, dict) else {}
    changed = [key for key in settings | recorded if recorded.get(key) != settings.get(key)]  # "rerank" may be missing
    if changed:
        raise UserError(
            f"--output={output}: was made with other {' and '.join(changed)} ({file.name} has them); "
            "name another file, or remove this one"
        )
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
    """Return the retrieved passages as a TREC run, with lines of `qid Q0 docid rank score tag`, the best first.

    A document of several passages is listed once, at its best rank. Tools that read such files sort by the score and
    not by the rank, so a score that is not below the one before (in float32) is lowered by one step. White space in
    ids is written as in URLs.

    Args:
        records: with "retrieved".
        tag: name of the system.

    Raises:
        UserError: two questions have the same id.
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
    """Return the gold passages as TREC's judgments, with lines of `qid 0 docid grade`. Raises as `trec_run`."""
    golds = zip(trec_ids(records), map(gold_of, records), strict=True)
    return "".join(f"{number} 0 {_trec(name)} {grade}\n" for number, gold in golds for name, grade in gold.items())


def trec_ids(records: Sequence[Record]) -> list[str]:
    """Return an id without white space for each question. Raises UserError if two questions have the same."""
    ids = [_trec(record["id"]) for record in records]
    twice = next((name for name, count in Counter(ids).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"two questions have the id {twice}; TREC files need unique ids; change one")
    return ids


def _trec(name: Any) -> str:
    """Return a name with white space quoted."""
    return re.sub(r"[\s%]", lambda match: quote(match[0]), str(name)) or "-"
