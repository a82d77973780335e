"""Files of questions: every known kind is read into one form, or refused with file and line; prepared and measured."""

import csv
import json
from collections import Counter
from datetime import date
from pathlib import Path

import pytest
from capitals import write, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_run import PEOPLE

from realm_jax.cli import main as cli
from realm_jax.cli.prepare import prepare
from realm_jax.data.lines import BadRecord
from realm_jax.data.questions import IMPOSSIBLE, UNJUDGED, Question, parse_questions, question_lines, read_questions
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError

HEAD = "query-id\tcorpus-id\tscore\n"
QUERIES = [{"_id": "q1", "text": "where is it", "metadata": {}}, {"_id": "q2", "text": "what"}]
FUZZ = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def beir(folder: Path, queries: list[dict] = QUERIES, **judgments: str) -> Path:
    """Make a folder of BEIR; judgments: the lines below the header, by split."""
    for split, lines in judgments.items():
        write(folder / "qrels" / f"{split}.tsv", HEAD + lines)
    write_lines(folder / "queries.jsonl", queries)
    return folder


def array(*records: object, indent: int | None = None) -> str:
    return json.dumps(records, indent=indent)


def squad(*questions: object, indent: int | None = None, **fields: object) -> str:
    data = [{"title": "T", "paragraphs": [{"context": "me so", "qas": [question]}]} for question in questions]
    return json.dumps(fields | {"data": data}, indent=indent)


# --- Formats ----------------------------------------------------------------------------------------------------------

WHO = {"question": "who", "answers": ["me", "I"]}
PASSAGE = {"title": "T", "text": "x", "score": 1000}
DPR = array(
    {"dataset": "nq_train_psgs_w100", **WHO, "negative_ctxs": [PASSAGE], "hard_negative_ctxs": []}
    | {"positive_ctxs": [PASSAGE | {"passage_id": "18768923"}, PASSAGE | {"passage_id": "9"}]},
    WHO | {"positive_ctxs": [], "negative_ctxs": []},
    WHO | {"positive_ctxs": [PASSAGE | {"psg_id": 7}]},
    indent=4,
)
READ_DPR = [
    Question("who", ["me", "I"], {"18768923": 1}, {"dataset": "nq_train_psgs_w100"}),
    Question("who", ["me", "I"]),
    Question("who", ["me", "I"], {"7": 1}),
]
READ_WHO = [Question("who", ["me", "I"])]
READ_TARGET = [Question("who", ["me", "I"], {}, {"target": "me"})]
NUMBERED = [Question("who", ["me", "I"], {}, {"id": "s1"})]
SQUAD = [
    {"id": "s1", "question": "who", "answers": [{"text": "me", "answer_start": 0}, {"text": "me"}, {"text": "I"}]},
    {"id": "s2", "question": "why", "answers": [], "is_impossible": True, "plausible_answers": [{"text": "so"}]},
]
FLAT = [  # SQuAD's questions as Hugging Face has them
    {"id": "s1", "context": "By me.", "question": "who", "answers": {"text": ["me", "me", "I"], "answer_start": [3]}},
    {"id": "s2", "context": "By me.", "question": "when", "answers": {"text": [], "answer_start": []}},
]
TREC = "q1 0 oslo 1\nq2 Q0 rome 2\nq2 0 bern 0\nq3 0 bern 0\n"
READ_JUDGED = [Question("where is it", [], {"oslo": 1}, {"id": "q1"}), Question("what", [], {"rome": 2}, {"id": "q2"})]
PATTERN = r"New\s?York|\d+"
READ_PATTERN = [Question("where", [PATTERN], {}, {"match": "regex"})]
PATTERN_LINE = json.dumps({"question": "where", "answer": [PATTERN]})
FORMATS = [  # name, content, the questions, what is counted
    ("own.jsonl", '\ufeff{"question": "who?", "answers": ["me"], "gold_passage_id": "a", "split": "dev", "n": 1}\n',
     [Question("who?", ["me"], {"a": 1}, {"split": "dev", "n": 1})], {}),
    ("gold.jsonl", '{"question": "why", "gold_passage_id": "p", "match": "rouge"}\n\n'
     '{"question": "who", "answers": null, "gold_passages": {"p": 2, "q": 1, "r": 0, "s": -1}}\n',
     [Question("why", [], {"p": 1}, {"match": "rouge"}), Question("who", [], {"p": 2, "q": 1})], {}),
    ("NQ-open.dev.jsonl", json.dumps({"question": "who", "answer": ["me", "I"]}), READ_WHO, {}),
    ("null.jsonl", json.dumps({"question": "who", "answer": ["me", "I"], "answers": None}), READ_WHO, {}),
    ("val.json", array({"qId": "s1", "answers": ["me", "I"], "qText": "who"}), NUMBERED, {}),
    ("nq-train.json", DPR, READ_DPR, {}),
    ("nq-train.json.gz", DPR, READ_DPR, {}),
    ("nq-train.JSON.xz", DPR, READ_DPR, {}),
    ("nq-test.json", array(WHO | {"ctxs": [PASSAGE]}), READ_WHO, {}),
    ("fid.jsonl", json.dumps(WHO | {"target": "me", "ctxs": []}), READ_TARGET, {}),
    ("atlas.jsonl", json.dumps({"question": "who", "target": "me"}), [Question("who", ["me"])], {}),
    ("flashrag.jsonl", json.dumps({"id": "s1", "question": "who", "golden_answers": ["me", "I"]}), NUMBERED, {}),
    ("flashrag.jsonl", json.dumps({"question": "who", "golden_answers": ["me", "I"], "answers": None}), READ_WHO, {}),
    ("flashrag.jsonl", json.dumps({"question": "who", "golden_answers": ["me", "I"], "target": "me"}), READ_TARGET, {}),
    ("nq-test.qa.csv",
     "who is\t['Röntgen']\n"
     "who wrote it\t[\"O'Hara\", 'a \\'b\\'', 'tab\\t', '\\u00e9',]\n"
     '"what is ""it"""\t"[""one"", \'two\']"\n',
     [Question("who is", ["Röntgen"]), Question("who wrote it", ["O'Hara", "a 'b'", "tab\t", "é"]),
      Question('what is "it"', ["one", "two"])], {}),
    ("large2470-train.tsv", f'14\tfactoid\twhat "site"?\t{PATTERN}\n\n9\tfactoid\twho \t.*\n',
     [Question('what "site"?', [PATTERN], {}, {"match": "regex", "id": "14"}),
      Question("who ", [".*"], {}, {"match": "regex", "id": "9"})], {}),
    ("CuratedTrec-train.txt", PATTERN_LINE, READ_PATTERN, {}),
    ("curatedtrec-test.qa.csv", f"where\t['{PATTERN}']\n", READ_PATTERN, {}),
    ("WebQuestions-train.txt", PATTERN_LINE, [Question("where", [PATTERN])], {}),
    ("dev-v1.1.json", squad(SQUAD[0]), NUMBERED, {}),
    ("train-v2.0.json.gz", squad(*SQUAD, version="v2.0"), NUMBERED, {IMPOSSIBLE: 1}),
    ("xquad.json", squad(*SQUAD, version=1.0, indent=2), NUMBERED, {IMPOSSIBLE: 1}),
    ("flat.json", json.dumps({"version": 2.0, "data": FLAT}), NUMBERED, {IMPOSSIBLE: 1}),
    ("flat.jsonl", "".join(json.dumps(record) + "\n" for record in FLAT), NUMBERED, {IMPOSSIBLE: 1}),
    ("qrels/dev.tsv", HEAD + "q1\toslo\t1\nq2\trome\t2\nq2\tbern\t0\nq3\toslo\t-1\n", READ_JUDGED, {UNJUDGED: 1}),
    ("dev.tsv", "q1\toslo\t1\nq2\trome\t2\n", READ_JUDGED, {}),
    ("qrels.txt", HEAD.replace("\t", " ") + "q1 oslo 1\nq2 rome 2\n", READ_JUDGED, {}),
    ("qrels/test.tsv", TREC.replace(" ", "\t"), READ_JUDGED, {UNJUDGED: 1}),
    ("qrels/dev.trec", TREC, READ_JUDGED, {UNJUDGED: 1}),
    ("all.qrels", TREC.replace(" ", "   "), READ_JUDGED, {UNJUDGED: 1}),
]  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "content", "expected", "counted"), FORMATS)
def test_a_file_is_read_into_the_normal_form_which_reads_back(tmp_path, name, content, expected, counted):
    beir(tmp_path)
    dropped = Counter()
    questions = read_questions(write(tmp_path / name, content), dropped=dropped)
    unplaced = [Question(one.question, one.answers, one.gold, one.fields) for one in questions]
    assert unplaced == expected and dropped == counted
    copy = read_questions(write(tmp_path / "copy.jsonl", question_lines(questions)))
    assert [Question(one.question, one.answers, one.gold, one.fields) for one in copy] == expected


def test_the_normal_form_names_a_single_gold_passage_of_grade_1_by_its_id(tmp_path):
    written = question_lines([Question("a", ["b"], {"p": 1}, {"n": 1}), Question("c", [], {"p": 2, "q": 1})])
    assert written.decode().splitlines() == [
        '{"question": "a", "answers": ["b"], "gold_passage_id": "p", "n": 1}',
        '{"question": "c", "answers": [], "gold_passages": {"p": 2, "q": 1}}',
    ]


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("curated.tsv", "1\tfactoid\twho is\t.\n\n2\tfactoid\twhat is\t.\n", [1, 3]),
        ("qrels.tsv", HEAD + "q2\toslo\t1\nq1\toslo\t1\nq2\trome\t1\n", [2, 3]),
        ("squad.json", squad(SQUAD[0], SQUAD[1], SQUAD[0]), [1, 3]),
        ("val.json", f"[\n {json.dumps(WHO)},\n\n {json.dumps(WHO)}\n]", [2, 4]),
    ],
)
def test_a_question_has_the_line_that_its_record_begins_on_or_its_number(tmp_path, name, content, lines):
    beir(tmp_path)
    assert [question.line for question in read_questions(write(tmp_path / name, content))] == lines


@pytest.mark.parametrize("match", [None, "string", "exact", "norm", "none", "regex"])
def test_a_question_says_how_its_answers_are_compared(tmp_path, match):
    (question,) = read_questions(write(tmp_path / "q.jsonl", json.dumps(WHO | {"match": match})))
    assert question.is_regex == (match == "regex")


@pytest.mark.parametrize("first", ["1\tfactoid\tWhen?\t1999\n", "1\tfactoid\tWhen?\tSept\n", ""])
def test_questions_of_curated_trec_stay_questions_next_to_queries(tmp_path, first):
    path = write(beir(tmp_path) / "qrels" / "test.tsv", first + "2\tfactoid\tWhen is it?\t1999\n")
    assert read_questions(path)[-1].answers == ["1999"] and read_questions(path)[-1].is_regex


def test_questions_may_be_the_rows_of_a_parquet_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(FLAT), tmp_path / "flat.parquet")
    assert read_questions(tmp_path / "flat.parquet") == [Question("who", ["me", "I"], {}, {"id": "s1"}, 1)]
    rows = [WHO | {"asked": date(2020, 1, 2), "score": float("nan"), "raw": b"z"}, WHO]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "own.parquet")
    first = read_questions(tmp_path / "own.parquet")[0]
    assert first == Question("who", ["me", "I"], {}, {"asked": "2020-01-02", "score": None, "raw": "z"}, 1)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "own.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match=r"cut\.parquet is truncated or damaged .*; fetch or make it again"):
        read_questions(tmp_path / "cut.parquet")


def test_an_array_may_be_read_in_pieces_of_any_size(tmp_path, monkeypatch):
    lines = [{"question": f"who is {n} é\n?", "answers": ['"]}', "\\"], "n": [n, -1.5e3, None]} for n in range(50)]
    path = write(tmp_path / "q.json", "\ufeff \n" + json.dumps(lines, indent=1, ensure_ascii=False))
    whole = read_questions(path)
    assert [question.question for question in whole] == [line["question"] for line in lines]
    assert [question.line for question in whole] == [3 + 12 * n for n in range(50)]
    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr("realm_jax.data.lines._CHUNK", size)
        assert read_questions(path) == whole


# --- Faults -----------------------------------------------------------------------------------------------------------

NO_ANSWERS = r"1: the question has no answers and no \"gold_passage_id\"; add one or remove the line"
NO_GRADES = r"1: \"gold_passages\" is no object of ids and grades; write {id: grade}, each grade .* at most 1,000"
RECORDS = [  # fields that are added to a question, and the message
    ({"question": ""}, '1: "question" is empty; fill it'),
    ({"question": 7}, '1: "question" must hold text but holds 7; put it in quotes'),
    ({"question": "x" * 10_001}, "1: the question has 10,001 characters, more than 10,000; shorten it"),
    ({"answers": None}, NO_ANSWERS),
    ({"answers": []}, NO_ANSWERS),
    ({"answers": "y"}, '1: "answers" must be a list of strings'),
    ({"answers": "y", "gold_passage_id": "p"}, '1: "answers" must be a list'),
    ({"answers": [3]}, '1: "answers" must hold text but holds 3'),
    ({"answers": [""]}, '1: "answers" is empty'),
    ({"match": 7}, '1: "match" is 7; write "regex" for answers'),
    ({"match": "regexp"}, '1: "match" is "regexp"; write "regex" .*, or one of "string", "exact", "norm", "none"$'),
    ({"match": "regex", "answers": ["a", "("]}, r"1: '\(' is not a regular expression .*; correct the pattern or"),
    ({"match": "regex", "answers": ["a{99999999999}"]}, "1: .* is not a regular expression"),
    ({"gold_passage_id": 3}, '1: "gold_passage_id" must hold text but holds 3'),
    ({"gold_passages": ["p"]}, NO_GRADES),
    ({"gold_passages": {"p": 1.5}}, NO_GRADES),
    ({"gold_passages": {"p": True}}, NO_GRADES),
    ({"gold_passages": {"p": 1001}}, NO_GRADES),
    ({"gold_passages": {" ": 1}}, NO_GRADES),
    ({"gold_passages": {"p": 0}, "answers": []}, NO_ANSWERS),
    ({"gold_passages": {"p": 1}, "gold_passage_id": "q"}, '1: .*has "gold_passage_id" and "gold_passages"; leave one'),
]
NOT_SQUAD = r"json: not data\[\]\.paragraphs\[\]\.qas\[\], as SQuAD's are"
NO_JUDGMENT = r", not query-id, corpus-id, score \(a whole number\); correct or remove the line"
UNCLEAR = "1: may be a judgment of TREC or a question of CuratedTREC; write 0 into the second column"
FILES = [  # name, content, and what the message has behind the name
    ("q.jsonl", '{"answers": ["x"]}', '1: the record has no "question"; add it'),
    ("q.jsonl", '{"question": "who", "answers": ["me"]}\n[]', r"2: holds '\[\]', not an object; write"),
    ("q.csv", "who\t['me']\nwhat\n", "2: the row has 1 columns, not two"),
    ("q.csv", "who\n", "1: the first line has 1 columns; tables of questions have two"),
    ("q.csv", "who\t[]\n", "1: the question has no answers"),
    ("q.tsv", "1\t2\t3\t4\t5\n", "1: the first line has 5 columns; tables of questions have two"),
    ("q.tsv", "1\tfactoid\twho\t.\n\n2\twhat\t.\n", "3: the row has 3 columns, the first line four"),
    ("q.tsv", "1\tfactoid\t\t.\n", '1: "question" is empty'),
    ("q.tsv", "1\tfactoid\twho\t*\n", r"1: '\*' is not a regular expression"),
    ("q.tsv", "", r"tsv holds no questions; give one"),
    ("q.json", "[]", "json holds no questions"),
    ("q.json", '[{"question": "who", "answers": ["me"]},\n 3]', r"2: the array holds '3\]', not an object"),
    ("q.json", '\n[\n{"question": "who",\n "answers": [}]', r"4: not readable as JSON \(Expecting value\)"),
    ("q.json", '[\n{"question": "who", "answers": ["me', r"2: not readable as JSON \(Unterminated"),
    ("q.json", '[\n{"question": "who", "answers": ["me"]}\n', r"3: .*\(the array does not end\)"),
    ("q.json", '[{"question": "who", "answers": ["me"]}\n{}]', r"2: .*\(no comma after an object\)"),
    ("q.json", '[{"question": "who", "answers": ["me"]}]\n\n]', r"3: .*\(there is more after the end"),
    ("q.json", '[{"question": "who", "answers": ["me"]},]', r"1: the array holds '\]', not an object"),
    ("q.json", '[\n{"question": "\\ud83d"}]', '2: "question" holds half of a surrogate pair'),
    ("q.json", b'[\n{"question": "who"},\n{"question": "\xff"}]', "3: a byte of the line is not UTF-8"),
    ("q.json", b'[\n{"question": "\xc3', "2: a byte of the line is not UTF-8"),
    ("q.json", '[{"question": ' + "9" * 5000 + "}]", "1: not readable as JSON"),
    ("q.json", '[{"question": ' + "[" * 100_000, "1: not readable as JSON"),
    ("q.json", squad(SQUAD[0], {"question": "who", "answers": [{}]}), '2: no "question" with "answers" of a "text"'),
    (
        "q.json",
        squad({"question": "who", "answers": "me"}),
        '1: no "question" with "answers" of a "text" each; correct',
    ),
    ("q.json", squad({"question": "who", "answers": {"text": "me"}}), '1: no "question" with "answers"'),
    ("q.json", squad("who"), '1: no "question" with "answers"'),
    ("q.json", squad({"question": " ", "answers": [{"text": "me"}]}), '1: "question" is empty'),
    ("q.json", squad({"question": "who", "answers": []}), "1: the question has no answers"),
    ("q.json", squad({"question": "\ud800", "answers": []}), '1: "question" holds half of a surrogate pair'),
    ("q.json", '{"data": [', "json: not readable as JSON"),
    ("q.json", '{"data": [{"title": "T"}]}', NOT_SQUAD),
    ("q.json", '{"data": [3]}', NOT_SQUAD),
    ("q.json", '{"data": []}', "json holds no questions"),
    ("q.tsv", "id\ttext\ttitle\n", "1: holds 'id text title'" + NO_JUDGMENT),
    ("q.tsv", HEAD + "q1\tparis\n", "2: holds 'q1 paris'" + NO_JUDGMENT),
    ("q.tsv", HEAD + "q1\tparis\t1\nq1\trome\thigh\n", "3: holds 'q1 rome high'" + NO_JUDGMENT),
    ("q.tsv", HEAD + "q1\tparis\t5000\n", '2: "gold_passages" is no object of ids and grades; .* at most 1,000'),
    ("q.tsv", HEAD + "q1\tparis\t1\nlost\tparis\t1\n", r"3: query 'lost' is not in .*queries\.jsonl; put both files"),
    ("q.txt", "q1 0 paris 1\nq2 0 rome 0.5\n", r"2: holds 'q2 0 rome 0\.5'" + NO_JUDGMENT),
    ("q.txt", "q1 Q0 paris 1 12.5 bm25\n", r"1: is a ranking \(a run of TREC\), not judgments; name the file of qrels"),
    ("q.txt", "q1\tQ0\tparis\t1\t12\tbm25\n", "1: is a ranking"),
    ("q.txt", "q1\tparis\t1\nq1\toslo\t2\n", r"txt: may be a ranking \(query, document, rank\).*; put query-id<tab>"),
    ("q.txt", "q1 3 paris 1\n", UNCLEAR),
    ("q.txt", "1756\tfactoid\tWhen?\t1999\n", UNCLEAR),
]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [*FILES, *(("q.jsonl", json.dumps(WHO | fields), message) for fields, message in RECORDS)],
)
def test_a_fault_is_named_with_file_and_line(tmp_path, name, content, message):
    path = write(beir(tmp_path) / name, content)
    with pytest.raises(UserError, match=rf"{path.stem}\.({path.suffix[1:]}:)?{message}"):
        read_questions(path)


NO_LISTS = ["__import__('os').system('true')", "['a'] + ['b']", "['a' 'b']", "['a', 3]", "[b'a']", "[f'{1}']", "'a'"]
NO_LISTS += ["['a'", r"['\x']", r"['\ud83d']", r"['\N{no such character}']", "[" * 5000 + "]" * 5000]
NO_LISTS += ["[" + "-" * 60_000 + "1]", "['" + "\\" * 60_001 + "]"]


@pytest.mark.parametrize("answers", NO_LISTS)
def test_nothing_but_a_list_of_strings_is_evaluated(tmp_path, answers):
    path = write(tmp_path / "q.csv", f"who\t['me']\nwhat\t{answers}\n")
    with pytest.raises(UserError, match=r"q\.csv:2: the second column holds .* not a list of quoted answers"):
        read_questions(path)


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (None, r"queries\.jsonl is not there; put queries\.jsonl of the judgments there"),
        ('{"_id": "q1", "text": "where"}\n{', r"queries\.jsonl:2: not JSON"),
    ],
)
def test_faulty_queries_are_named_by_their_own_file(tmp_path, queries, message):
    folder = beir(tmp_path, dev="q1\tparis\t1\n")
    write(folder / "queries.jsonl", queries) if queries else (folder / "queries.jsonl").unlink()
    with pytest.raises(UserError, match=message):
        read_questions(folder / "qrels" / "dev.tsv")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "q.jsonl",
            '{"question": "a", "answers": ["b"]}\n{]\n{"question": "c"}\n{"question": "d", "answers": ["e"]}\n',
        ),
        ("q.csv", "a\t['b']\nbroken\nc\tno list\nd\t['e']\n"),
        ("curatedtrec.tsv", "1\tx\ta\tb\n2\tx\n3\tx\tc\t(\n4\tx\td\te\n"),
    ],
)
def test_a_bad_question_is_in_its_place_and_the_others_are_read(tmp_path, name, content):
    records = [record for _, record in parse_questions(write(tmp_path / name, content))]
    assert [isinstance(record, BadRecord) for record in records] == [False, True, True, False]
    assert [record.question for record in records if isinstance(record, Question)] == ["a", "d"]


def test_an_object_without_end_is_not_read_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("realm_jax.data.lines._CHUNK", 10)
    monkeypatch.setattr("realm_jax.data.lines.LONGEST_LINE", 1000)
    with pytest.raises(UserError, match=r"q\.json:1: .*an object is longer than 1,000 characters"):
        read_questions(write(tmp_path / "q.json", '[{"question": "' + "x" * 5000))


# --- Any content ------------------------------------------------------------------------------------------------------

words = st.text("abcé ", min_size=1, max_size=8).map(str.strip).filter(bool)
any_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)
cell = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), min_size=1).filter(str.strip)


@FUZZ
@given(st.dictionaries(words, st.dictionaries(words, st.integers(-1, 3), min_size=1, max_size=4), min_size=1))
def test_passages_that_are_judged_above_zero_are_gold(tmp_path_factory, judged):
    rows = "".join(f"{query}\t{name}\t{grade}\n" for query, gold in judged.items() for name, grade in gold.items())
    queries = [{"_id": query, "text": f"what of {query}"} for query in judged]
    path = beir(tmp_path_factory.mktemp("drawn"), queries, test=rows) / "qrels" / "test.tsv"
    read = {one.fields["id"]: one.gold for _, one in parse_questions(path) if isinstance(one, Question)}
    above = {query: {name: grade for name, grade in gold.items() if grade > 0} for query, gold in judged.items()}
    assert read == {query: gold for query, gold in above.items() if gold}


@FUZZ
@given(rows=st.lists(st.tuples(cell, st.lists(cell, min_size=1, max_size=3)), min_size=1, max_size=5))
def test_a_table_that_csv_writes_is_read_back(tmp_path, rows):
    with open(tmp_path / "q.csv", "w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, delimiter="\t", lineterminator="\n")
        writer.writerows((question, repr(answers)) for question, answers in rows)
    first = (tmp_path / "q.csv").read_text(encoding="utf-8").partition("\n")[0]
    if first.count("\t") == 1:  # a quoted tab or line end in the first line hides how many columns it has
        read = [(question.question, question.answers) for question in read_questions(tmp_path / "q.csv")]
        assert read == rows


@FUZZ
@given(
    golds=st.lists(st.dictionaries(any_text, st.integers(1, 3), max_size=3), min_size=1, max_size=5),
    source=any_text,
    question=any_text,
    answers=st.lists(any_text, min_size=1),
)
def test_the_normal_form_is_read_back(tmp_path, golds, source, question, answers):
    questions = [Question(question, answers, gold, {"source": source}, line) for line, gold in enumerate(golds, 1)]
    assert read_questions(write(tmp_path / "q.jsonl", question_lines(questions))) == questions


# --- Preparing and measuring ------------------------------------------------------------------------------------------


def test_a_folder_of_beir_has_the_questions_of_its_splits(tmp_path, capsys):
    passages = write_lines(tmp_path / "p.jsonl", [{"id": name, "text": f"{name} is a town."} for name in "or"])
    folder = beir(tmp_path / "set", train="q1\to\t1\n", test="q2\tr\t2\nq2\to\t1\nq3\to\t0\nq2\tlost\t1\n")
    prepare(passages, tmp_path / "data", questions=[folder], vocabulary_size=300)
    questions = open_sources(tmp_path / "data").questions
    assert {split: [one.gold for one in asked] for split, asked in questions.items()} == {
        "train": [{"o": 1}],
        "test": [{"r": 2, "o": 1, "lost": 1}],
    }
    out = capsys.readouterr().out
    assert "questions: train 1, test 1; dropped 1 without a passage of a grade above 0\n" in out
    assert "1 × gold passage that is not there, of questions that have others, such as lost\n" in out
    counts = json.loads((tmp_path / "data" / "PREPARED.json").read_text())["counts"]["questions"]
    assert counts["records"] == 3
    for name, argument in {"test": f"test={folder}", "dev": f"dev={folder}/qrels/test.tsv"}.items():
        prepare(passages, tmp_path / name, questions=[argument], vocabulary_size=300)
        assert {*open_sources(tmp_path / name).questions} == {name}
    with pytest.raises(UserError, match=r"--questions=dev=.*set: there are judgments of train, test there; leave out"):
        prepare(passages, tmp_path / "none", questions=[f"dev={folder}"], vocabulary_size=300)
    with pytest.raises(UserError, match=r"a folder without qrels/test\.tsv, as BEIR has it; name a file of questions"):
        prepare(passages, tmp_path / "none", questions=[f"dev={tmp_path}"], vocabulary_size=300)


@pytest.mark.parametrize("judgments", ["qrels/dev.tsv", "qrels.txt"])
def test_other_texts_of_the_same_judgments_are_another_preparation(tmp_path, capsys, judgments):
    passages = write_lines(tmp_path / "p.jsonl", [{"id": "oslo", "text": "Oslo is a town."}])
    folder = beir(tmp_path / "set", dev="q1\toslo\t1\n")
    write(folder / "qrels.txt", "q1 0 oslo 1\n")
    given = {"questions": [f"dev={folder}/{judgments}"], "vocabulary_size": 300}
    prepare(passages, tmp_path / "data", **given)
    prepare(passages, tmp_path / "data", **given)
    assert "nothing to do" in capsys.readouterr().out
    write_lines(folder / "queries.jsonl", [QUERIES[0] | {"text": "where is Oslo"}])
    with pytest.raises(UserError, match="prepared with other questions"):
        prepare(passages, tmp_path / "data", **given)


def test_a_document_with_a_title_and_no_text_can_be_the_gold_passage(tmp_path):
    documents = [
        {"_id": "oslo", "title": "Tides of Oslo", "text": ""},
        {"_id": "rome", "title": "Rome", "text": "A town."},
    ]
    folder = beir(tmp_path / "set", test="q1\toslo\t1\n")
    write_lines(folder / "corpus.jsonl", documents)
    prepare(folder, tmp_path / "data", questions=[folder], vocabulary_size=300)
    sources = open_sources(tmp_path / "data")
    assert [one.gold for one in sources.questions["test"]] == [{"oslo": 1}]
    row = sources.passages.rows_of("oslo").start
    assert (sources.passages.title(row), sources.passages.text(row)) == ("", "Tides of Oslo")


def test_questions_of_squad_and_dpr_are_prepared_without_their_passages(tmp_path, capsys):
    passages = write_lines(tmp_path / "p.jsonl", [{"id": "t", "text": "Me, so."}])
    files = [f"dev={write(tmp_path / 'dev-v2.0.json', squad(*SQUAD))}", f"train={write(tmp_path / 'nq.json', DPR)}"]
    with pytest.raises(UserError, match=r"nq\.json:2: gold_passage_id '18768923' is not in .*; correct it, or use"):
        prepare(passages, tmp_path / "data", questions=files, vocabulary_size=300)
    prepare(passages, tmp_path / "data", questions=files, vocabulary_size=300, ignore_gold=True)
    questions = open_sources(tmp_path / "data").questions
    assert [one.question for one in questions["dev"]] == ["who"] and not any(one.gold for one in questions["train"])
    assert "questions: dev 1, train 3; dropped 1 that no passage answers (is_impossible)\n" in capsys.readouterr().out


def test_a_run_is_measured_by_the_judgments_of_a_folder(trained_run, tmp_path, capsys):
    queries = [{"_id": f"q{n}", "text": f"When was {PEOPLE[n]} born?"} for n in range(4)]
    lines = "".join(f"q{n}\tp{n}\t2\nq{n}\tp{n + 1}\t1\n" for n in range(3)) + "q3\tgone\t1\nq3\tp3\t1\n"
    folder, output = beir(tmp_path / "set", queries, test=lines), tmp_path / "p.jsonl"
    command = [f"--workdir={trained_run.workdir}", f"--questions={folder}/qrels/test.tsv"]
    assert cli.main(["predict", *command, f"--output={output}"]) == 0
    assert "1 gold passages, such as 'gone', are not in the corpus and count as misses" in capsys.readouterr().err
    first = json.loads(output.read_text().splitlines()[0])
    assert first["gold_passages"] == {"p0": 2, "p1": 1} and first["id"] == "q0"
    assert cli.main(["evaluate", str(output), "--json", f"--qrels={tmp_path}/qrels.txt"]) == 0
    measures = json.loads(capsys.readouterr().out)["measures"]
    assert {name: one["questions"] for name, one in measures.items()} == dict.fromkeys(
        ("recall@1", "recall@5", "mrr@10", "ndcg@10"), 4
    )
    assert "q0 0 p0 2\nq0 0 p1 1\n" in (tmp_path / "qrels.txt").read_text()
    assert cli.main(["evaluate", *command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measures"] == measures and {*found["bm25"]} == {*measures}
    assert found["bm25"]["recall@1"] == 1 > found["bm25"]["ndcg@10"]


# --- Real files -------------------------------------------------------------------------------------------------------


def test_real_files_of_questions_are_read_whole(shared_data):
    sizes = {
        "webquestions/devtest.json": 189,
        "webquestions/val.json": 755,
        "webquestions/trainmodel.json": 2_834,
        "webquestions/test.json": 2_032,
        "curatedtrec/large2470-train.tsv": 1_704,
        "curatedtrec/large2470-test.tsv": 766,
        "curatedtrec/curated-full.tsv": 867,
        "wiki_qa/questions.jsonl.gz": 21_455,
        "nq_open/NQ-open.dev.jsonl": 3_610,
        "nq_open/NQ-open.efficientqa.test.1.1.jsonl": 1_769,
        "nq_open/densephrases_nq_train_subset7500/train.json": 6_000,
    }
    assert {name: len(read_questions(shared_data / name)) for name in sizes} == sizes
