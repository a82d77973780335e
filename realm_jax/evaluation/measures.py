"""From predictions to measures: what each question counts, means with intervals, TREC files. No model, no device.

A *record* is one line of a predictions file (`realm predict`): the question, what is right, what was answered and which
passages were retrieved. Every measure is an array over the questions, NaN where it has no meaning for one. Read
`answers.py` for what is right, `significance.py` for intervals.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from realm_jax.corpus.jsonl import match_fault
from realm_jax.corpus.lines import json_records, strictly
from realm_jax.errors import UserError
from realm_jax.evaluation.answers import exact_match, full_match, squad_match, token_f1
from realm_jax.evaluation.retrieval import DEPTHS, found_within
from realm_jax.evaluation.significance import interval
from realm_jax.storage import read_json

Record = dict[str, Any]
Measures = dict[str, NDArray[np.float64]]
_LARGEST = float(np.finfo(np.float32).max)
_COUNTS = ("step", "parameters", "passages", "passages_read", "lines")  # numbers of a settings file that are shown

WORDS = {
    "exact_match": "ORQA's and NQ-open's; patterns match from the start",
    "exact_match_squad": "SQuAD's and DPR's",
    "f1": "words shared with the best answer (SQuAD)",
    "regex_match": "patterns match from the start (CuratedTREC)",
    "regex_full_match": "patterns match the whole answer",
    "answer_recall": "answer in a passage (DPR)",
    "recall": "gold passage found",
    "reader_oracle": "right span in a passage that was read",
}


def words_of(measure: str) -> str:
    """What a measure is, in a few words: `recall@5` like `recall@1`."""
    return WORDS[measure.partition("@")[0]]


def measure(records: Sequence[Record]) -> Measures:
    """Each measure that some of the questions have, float64 [questions], in the order of WORDS.

    Raises UserError where no question has answers, or a gold passage that could have been retrieved.
    """
    golds = any(record.get("gold_passage_id") is not None and "retrieved" in record for record in records)
    if not golds and not any(record.get("answers") for record in records):
        raise UserError("no question has answers or a gold passage to compare with; predict questions that have them")
    found: Measures = {name: _each(records, of) for name, of in _ANSWERS.items()}
    found |= _at_depths("answer_recall", records, _has_answer) if _was_looked(records) else {}
    found |= _at_depths("recall", records, _is_gold)
    found["reader_oracle"] = np.array([float(record.get("reader_oracle", np.nan)) for record in records])
    return {name: values for name, values in found.items() if not np.isnan(values).all()}


def summarise(values: NDArray[np.float64]) -> dict[str, Any]:
    """{"value": mean, "low", "high": its interval, "questions": how many it is over} of a measure."""
    counted = values[~np.isnan(values)]
    low, high = interval(counted)
    return {"value": float(counted.mean()), "low": low, "high": high, "questions": len(counted)}


def _is_regex(record: Record) -> bool:
    return record.get("match") == "regex"


def _of_strings(score: Callable[[str, list[str]], float]) -> Callable[[Record], float]:
    return lambda record: np.nan if _is_regex(record) else score(record["prediction"], record["answers"])


def _of_patterns(score: Callable[[str, list[str]], float]) -> Callable[[Record], float]:
    return lambda record: score(record["prediction"], record["answers"]) if _is_regex(record) else np.nan


_ANSWERS: dict[str, Callable[[Record], float]] = {
    "exact_match": lambda record: exact_match(record["prediction"], record["answers"], _is_regex(record)),
    "exact_match_squad": _of_strings(squad_match),
    "f1": _of_strings(token_f1),
    "regex_match": _of_patterns(lambda prediction, answers: exact_match(prediction, answers, is_regex=True)),
    "regex_full_match": _of_patterns(full_match),
}


def _each(records: Sequence[Record], of: Callable[[Record], float]) -> NDArray[np.float64]:
    """A measure of every record that has answers."""
    return np.array([float(of(record)) if record.get("answers") else np.nan for record in records])


def _has_answer(record: Record) -> list[bool] | None:
    """Which of the retrieved passages have an answer; None where nobody looked."""
    if not record.get("answers") or "retrieved" not in record:
        return None
    retrieved = record["retrieved"]
    if any("has_answer" not in passage for passage in retrieved):
        return None
    return [passage["has_answer"] for passage in retrieved]


def _is_gold(record: Record) -> list[bool] | None:
    """Which of the retrieved passages are the one that the question was asked about; None where there is none."""
    gold, retrieved = record.get("gold_passage_id"), record.get("retrieved")
    return None if gold is None or retrieved is None else [str(passage["id"]) == str(gold) for passage in retrieved]


def _was_looked(records: Sequence[Record]) -> bool:
    """Whether anybody looked for answers in what was retrieved; where nothing was, there is nothing to look at."""
    retrieved = [passage for record in records for passage in record.get("retrieved", ())]
    return not retrieved or any("has_answer" in passage for passage in retrieved)


def _at_depths(name: str, records: Sequence[Record], hits_of: Callable[[Record], list[bool] | None]) -> Measures:
    """Whether the first k passages have a hit, for k of DEPTHS as far as some question has passages.

    Beyond the last passage of a question nothing hits, as in TREC's evaluation: a search by words may find fewer for
    one question than for another.
    """
    hits = [hits_of(record) for record in records]
    counted = [number for number, one in enumerate(hits) if one is not None]
    room = max((len(one) for one in hits if one), default=min(1, len(counted)))
    matrix = np.array([one + [False] * (room - len(one)) for one in hits if one is not None], bool)
    found: Measures = {}
    for k in (k for k in DEPTHS if k <= room):
        found[f"{name}@{k}"] = np.full(len(records), np.nan)
        found[f"{name}@{k}"][counted] = found_within(matrix, k)
    return found


# ---- files


def read_predictions(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a predictions file. Raises UserError, with file and line, for one that cannot be scored.

    Also raised where `realm predict` has not written all of it, or something was added to what it wrote.
    """
    _check_whole(Path(path))
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


def whole_lines(predictions: Path) -> int:
    """How many lines of a predictions file were written to their ends."""
    with open(predictions, "rb") as stream:
        return sum(line.endswith(b"\n") for line in stream)


def _check_whole(path: Path) -> None:
    """Raise UserError unless a file has as many lines as its settings promise; a file without them is as it is."""
    asked = read_settings(path).get("lines")
    if not isinstance(asked, int) or not path.is_file():
        return
    found = whole_lines(path)
    if found < asked:
        raise UserError(
            f"{path}: {found:,} of {asked:,} questions are answered; repeat the `realm predict` command that wrote it"
        )
    if found > asked:
        raise UserError(surplus(path, found, asked))


def surplus(name: str | os.PathLike[str], found: int, asked: int) -> str:
    """What is said of a file with more lines than questions."""
    return f"{name}: holds {found:,} lines for {asked:,} questions; remove the file and predict again"


def _fault(record: Record) -> str | None:
    """What is wrong with the fields of a record, if anything."""
    answers, retrieved = record.get("answers", []), record.get("retrieved", [])
    if not isinstance(record.get("question"), str) or not isinstance(record.get("prediction"), str):
        return '"question" and "prediction" must be texts'
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        return '"answers" must be a list of texts'
    if answers and (unknown := match_fault(record.get("match"))) is not None:
        return str(unknown)
    for name in ("id", "gold_passage_id"):
        if record.get(name) is not None and not _is_id(record[name]):
            return f'"{name}" must be a text or a whole number'
    if not isinstance(record.get("reader_oracle", False), bool):
        return '"reader_oracle" must be true or false'
    if not isinstance(retrieved, list):
        return '"retrieved" must be a list of passages with "id" and "score"'
    if (fault := next(filter(None, map(_passage_fault, retrieved)), None)) is not None:
        return fault
    if len({"has_answer" in passage for passage in retrieved}) > 1:
        return 'either every passage of "retrieved" or none has "has_answer"'
    return None


def _passage_fault(passage: Any) -> str | None:
    """What is wrong with a retrieved passage, if anything. A score has to fit a float32, as a TREC run has it."""
    if not isinstance(passage, dict) or not {"id", "score"} <= passage.keys():
        return '"retrieved" must be a list of passages with "id" and "score"'
    if not _is_id(passage["id"]):
        return 'every "id" of "retrieved" must be a text or a whole number'
    score = passage["score"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= _LARGEST:
        return 'every "score" of "retrieved" must be a finite number'
    if not isinstance(passage.get("has_answer", False), bool):
        return 'every "has_answer" of "retrieved" must be true or false'
    return None


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def write_record(record: Record) -> str:
    """A record as a line of a predictions file."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def trec_run(records: Sequence[Record], tag: str) -> str:
    """The retrieved passages as a TREC run: `qid Q0 docid rank score tag` a line, the best first.

    A document of several passages stands once, at its best place. Tools that read such files sort by the score and not
    by the rank, so a score that is not below the one before (in float32) is lowered by one step. White space in ids is
    written as in URLs. Raises UserError where two questions have one id.
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
    """The gold passages as TREC's judgements, `qid 0 docid 1` a line. Raises as `trec_run` does."""
    golds = [(number, record.get("gold_passage_id")) for number, record in zip(trec_ids(records), records, strict=True)]
    return "".join(f"{number} 0 {_trec(gold)} 1\n" for number, gold in golds if gold is not None)


def trec_ids(records: Sequence[Record]) -> list[str]:
    """One word for each question. Raises UserError where two would have the same."""
    ids = [_trec(record["id"]) for record in records]
    twice = next((one for one, count in Counter(ids).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"two questions have the id {twice}; TREC's files need one for each")
    return ids


def _trec(name: Any) -> str:
    """A name as one word."""
    return re.sub(r"[\s%]", lambda found: quote(found[0]), str(name)) or "-"
