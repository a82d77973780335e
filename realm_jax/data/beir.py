"""Judged questions of BEIR and TREC: `queries.jsonl`, and `qrels/{train,dev,test}.tsv` or any file of judgements.

A row of judgements is `query, document, grade` as BEIR has it, or `query, 0, document, grade` as TREC has it (or Q0 for
0). Tabs separate the columns, or spaces if a line has no tab; BEIR's header may come first. A file of judgements stands
for its questions; the queries lie in its folder or in the one above. Not for BEIR's corpora, which are files of
passages (`realm_jax.corpora.texts`). What the records mean: read `realm_jax.data.questions` next.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from realm_jax.data.lines import OTHER_COLUMNS, Records, ending_of, is_table, json_records, text_lines
from realm_jax.data.records import BadRecord, Path_, strictly
from realm_jax.errors import UserError

SPLITS = ("train", "dev", "test")
ENDINGS = (".tsv", ".csv", ".txt", ".trec", ".qrels", ".qrel")  # of the names of files that may hold judgements
COLUMNS = ["query-id", "corpus-id", "score"]  # BEIR's first line of a file of judgements
ITERATIONS = ("0", "Q0", "q0")  # TREC's second column, which means nothing
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
    """Where the texts are that belong to a file of judgements: in its folder, or in the one above."""
    folder = os.path.dirname(os.path.abspath(path))
    same, above = (os.path.join(parent, "queries.jsonl") for parent in (folder, os.path.dirname(folder)))
    return same if os.path.isfile(same) else above


def has_judgements(path: Path_) -> bool:
    """True for a file of judgements, of questions whose texts are in another file.

    The first row that can only be a judgement, or can only be something else, decides. Raises UserError if every row
    may be a judgement of TREC or a question of CuratedTREC, and for a ranking of TREC.
    """
    if ending_of(path) not in ENDINGS:
        return False
    unclear_line = width = 0
    for line, text in text_lines(path):
        row, has_tabs = _columns(text), "\t" in text
        width = width or len(row)
        match row:
            case []:
                continue
            case _ if len(row) != width:
                break
            case [_, iteration, _, _] if iteration in ITERATIONS:
                return True
            case [_, _, name, _] if has_tabs and len(name.split()) > 1:
                return False  # a question: names of documents have no spaces at TREC
            case [_, _, _, grade] if _is_whole_number(grade):
                unclear_line = unclear_line or line
            case [_, _, _, _] if has_tabs:
                continue
            case [_, _, grade]:
                return (has_tabs and is_table(path)) or row == COLUMNS or _is_whole_number(grade)
            case [_, iteration, _, rank, _, _] if iteration in ITERATIONS and _is_whole_number(rank):
                raise UserError(f"{path}:{line}: is a ranking (a run of TREC), not judgements; name the file of qrels")
            case _:
                return False
    if unclear_line:
        raise UserError(
            f"{path}:{unclear_line}: may be a judgement of TREC or a question of CuratedTREC; write 0 into the second "
            'column of judgements, or give questions as {"question", "answers", "match": "regex"}, one a line'
        )
    return False


def judged_records(path: Path_, dropped: Counter[str]) -> Records:
    """{"question", "gold_passages", "id"} of each query of a file of judgements, with the line of its first one.

    dropped: counts the queries without a passage that is right. Raises UserError for a fault of the queries, and for
    what may be a ranking.
    """
    golds: dict[str, dict[str, int]] = defaultdict(dict)
    lines: dict[str, int] = {}
    may_be_ranking = True
    for line, text in text_lines(path):
        row = _columns(text)
        may_be_ranking &= row != COLUMNS and len(row) != 4
        if row in ([], COLUMNS):
            continue
        try:
            query, document, grade = _judgement(row)
        except BadRecord as bad:
            yield line, bad
        else:
            lines.setdefault(query, line)
            golds[query][document] = grade
    if may_be_ranking and len(golds) < sum(map(len, golds.values())) and all(map(_counts_up, golds.values())):
        raise UserError(
            f"{path}: may be a ranking (query, document, rank), as the numbers of each query are 1, 2, 3 …; "
            f"put {'<tab>'.join(COLUMNS)} into the first line of judgements, or name the file of qrels"
        )
    texts = _texts(queries_file(path), golds)
    for query, gold in golds.items():
        if max(gold.values()) <= 0:
            dropped[UNJUDGED] += 1
        elif query in texts:
            yield lines[query], {"question": texts[query], "gold_passages": gold, "id": query}
        else:
            fault = f"query {query!r} is not in {queries_file(path)}"
            yield lines[query], BadRecord(fault, "put both files of one set there", "a query that is not there")


def _columns(text: str) -> list[str]:
    """The columns of a line; [] for a blank one."""
    return text.split("\t") if "\t" in text and text.strip() else text.split()


def _counts_up(gold: dict[str, int]) -> bool:
    return [*gold.values()] == [*range(1, len(gold) + 1)]


def _is_whole_number(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _judgement(row: list[str]) -> Judgement:
    try:
        is_of_trec = len(row) == 4 and row[1] in ITERATIONS
        query, document, grade = row[:1] + row[2:] if is_of_trec else row
        return Judgement(query, document, int(grade))
    except ValueError:
        message = f"holds {' '.join(row)[:60]!r}, not {', '.join(COLUMNS)} (a whole number)"
        raise BadRecord(message, "correct or remove the line", OTHER_COLUMNS) from None


def _texts(path: str, wanted: Collection[str]) -> dict[str, str]:
    """The texts of some queries, by id."""
    if not Path(path).is_file():
        raise UserError(f"{path} is not there; put queries.jsonl of the judgements there")
    records = (record for _, record in strictly(path, json_records(path)))
    return {str(one.get("_id")): one.get("text", "") for one in records if str(one.get("_id")) in wanted}
