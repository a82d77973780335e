"""Judged questions as BEIR publishes them: a folder with `queries.jsonl` and `qrels/{train,dev,test}.tsv`.

A file of judgements stands for its questions; the queries lie two folders above it. Not for BEIR's corpora, which are
files of passages (`realm_jax.corpora.texts`). What the records mean: read `realm_jax.data.questions` next.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from realm_jax.data.lines import OTHER_COLUMNS, Records, json_records, text_lines
from realm_jax.data.records import BadRecord, Path_, applied, strictly
from realm_jax.errors import UserError

SPLITS = ("train", "dev", "test")
COLUMNS = ["query-id", "corpus-id", "score"]  # the first line of a file of judgements
UNJUDGED = "without a passage of a grade above 0"


class Judgement(NamedTuple):
    query: str
    document: str
    grade: int


def judgement_files(folder: Path_) -> dict[str, str]:
    """The files of judgements of a folder, by split. Raises UserError if there are none."""
    files = {split: os.path.join(folder, "qrels", f"{split}.tsv") for split in SPLITS}
    found = {split: file for split, file in files.items() if os.path.isfile(file)}
    if not found:
        raise UserError(f"{folder}: a folder without qrels/test.tsv, as BEIR has it; name a file of questions")
    return found


def queries_file(path: Path_) -> str:
    """Where the texts are that belong to a file of judgements."""
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(path))), "queries.jsonl")


def judged_records(path: Path_, dropped: Counter[str]) -> Records:
    """{"question", "gold_passages", "id"} of each query of a file of judgements, with the line of its first one.

    dropped: counts the queries without a passage that is right. Raises UserError for a fault of the queries.
    """
    golds: dict[str, dict[str, int]] = defaultdict(dict)
    lines: dict[str, int] = {}
    for line, found in applied(_judgement, _rows(path)):
        if isinstance(found, BadRecord):
            yield line, found
        else:
            lines.setdefault(found.query, line)
            golds[found.query][found.document] = found.grade
    texts = _texts(queries_file(path), golds)
    for query, gold in golds.items():
        if max(gold.values()) <= 0:
            dropped[UNJUDGED] += 1
        elif query in texts:
            yield lines[query], {"question": texts[query], "gold_passages": gold, "id": query}
        else:
            fault = f"query {query!r} is not in {queries_file(path)}"
            yield lines[query], BadRecord(fault, "put both files of one set there", "a query that is not there")


def _rows(path: Path_) -> Iterator[tuple[int, list[str]]]:
    rows = ((line, text.split("\t")) for line, text in text_lines(path) if text.strip())
    yield from ((line, row) for line, row in rows if row != COLUMNS)


def _judgement(row: list[str]) -> Judgement:
    try:
        query, document, grade = row
        return Judgement(query, document, int(grade))
    except ValueError:
        message = f"holds {' '.join(row)[:60]!r}, not {', '.join(COLUMNS)} (a whole number)"
        raise BadRecord(message, "correct or remove the line", OTHER_COLUMNS) from None


def _texts(path: str, wanted: Collection[str]) -> dict[str, str]:
    """The texts of some queries, by id."""
    if not Path(path).is_file():
        raise UserError(f"{path} is not there; judgements lie in the folder qrels beside their queries")
    records = (record for _, record in strictly(path, json_records(path)))
    return {str(one.get("_id")): one.get("text", "") for one in records if str(one.get("_id")) in wanted}
