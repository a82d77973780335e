"""Questions of BEIR, TREC and SQuAD: read, refused where they are damaged, prepared and measured."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from capitals import write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_run import PEOPLE

from realm_jax.cli import main as cli
from realm_jax.cli.prepare import prepare
from realm_jax.data.questions import Question, parse_questions, read_questions
from realm_jax.data.records import BadRecord
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError

HEAD = "query-id\tcorpus-id\tscore\n"
QUERIES = [
    {"_id": "q1", "text": "where is it", "metadata": {}},
    {"_id": "q2", "text": "what"},
    {"_id": "q3", "text": "?"},
]


def beir(folder: Path, queries: list[dict] = QUERIES, **judgements: str) -> Path:
    """A folder of BEIR's; judgements: the lines below the head, by split."""
    (folder / "qrels").mkdir(parents=True)
    write_lines(folder / "queries.jsonl", queries)
    for split, lines in judgements.items():
        (folder / "qrels" / f"{split}.tsv").write_text(HEAD + lines)
    return folder


# --- BEIR -------------------------------------------------------------------------------------------------------------


def test_judgements_are_questions_in_the_order_of_their_queries(tmp_path):
    lines = "q2\toslo\t2\nq1\tparis\t1\nq2\trome\t1\nq2\tbern\t0\nq3\toslo\t0\nq3\trome\t-1\n"
    folder, dropped = beir(tmp_path / "set", dev=lines), Counter()
    assert read_questions(folder / "qrels" / "dev.tsv", dropped=dropped) == [
        Question("what", [], {"oslo": 2, "rome": 1}, {"id": "q2"}, 2),
        Question("where is it", [], {"paris": 1}, {"id": "q1"}, 3),
    ]
    assert dropped == {"without a passage of a grade above 0": 1}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("q1\tparis\n", r"dev\.tsv:2: holds 'q1 paris', not query-id, corpus-id, score \(a whole number\); correct"),
        ("q1\tparis\t1\nq1\trome\thigh\n", r"dev\.tsv:3: holds 'q1 rome high', not query-id"),
        ("q1\tparis\t5000\n", r'dev\.tsv:2: "gold_passages" is no object of ids and grades; .* at most 1,000'),
        ("q1\tparis\t1\nlost\tparis\t1\n", r"dev\.tsv:3: query 'lost' is not in .*queries\.jsonl; put both files"),
    ],
)
def test_a_judgement_that_cannot_be_read_is_named(tmp_path, lines, message):
    path = beir(tmp_path / "set", dev=lines) / "qrels" / "dev.tsv"
    with pytest.raises(UserError, match=message):
        read_questions(path)
    assert sum(isinstance(found, BadRecord) for _, found in parse_questions(path)) == 1


def test_judgements_without_queries_are_told(tmp_path):
    folder = beir(tmp_path / "set", dev="q1\tparis\t1\n")
    (folder / "queries.jsonl").unlink()
    with pytest.raises(UserError, match=r"queries\.jsonl is not there; put queries\.jsonl of the judgements there"):
        read_questions(folder / "qrels" / "dev.tsv")


def test_queries_that_are_damaged_are_told_by_their_own_line(tmp_path):
    folder = beir(tmp_path / "set", dev="q1\tparis\t1\n")
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "where"}\n{')
    with pytest.raises(UserError, match=r"queries\.jsonl:2: not JSON"):
        read_questions(folder / "qrels" / "dev.tsv")


words = st.text("abcé ", min_size=1, max_size=8).map(str.strip).filter(bool)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(words, st.dictionaries(words, st.integers(-1, 3), min_size=1, max_size=4), min_size=1))
def test_what_is_judged_above_zero_is_gold(tmp_path_factory, judged):
    rows = "".join(f"{query}\t{name}\t{grade}\n" for query, gold in judged.items() for name, grade in gold.items())
    queries = [{"_id": query, "text": f"what of {query}"} for query in judged]
    path = beir(tmp_path_factory.mktemp("drawn") / "set", queries, test=rows) / "qrels" / "test.tsv"
    read = {one.fields["id"]: one.gold for _, one in parse_questions(path) if isinstance(one, Question)}
    above = {query: {name: grade for name, grade in gold.items() if grade > 0} for query, gold in judged.items()}
    assert read == {query: gold for query, gold in above.items() if gold}


def test_a_folder_has_the_questions_of_its_splits(tmp_path, capsys):
    passages = write_lines(
        tmp_path / "p.jsonl", [{"id": name, "text": f"{name} is a town."} for name in ("oslo", "rome")]
    )
    folder = beir(tmp_path / "set", train="q1\toslo\t1\n", test="q2\trome\t2\nq2\toslo\t1\nq3\toslo\t0\nq2\tlost\t1\n")
    prepare(passages, tmp_path / "data", questions=[folder], vocabulary_size=300)
    questions = open_sources(tmp_path / "data").questions
    assert {split: [one.gold for one in asked] for split, asked in questions.items()} == {
        "train": [{"oslo": 1}],
        "test": [{"rome": 2, "oslo": 1, "lost": 1}],
    }
    out = capsys.readouterr().out
    assert "questions: train 1, test 1; dropped 1 without a passage of a grade above 0\n" in out
    assert "1 × gold passage that is not there, of questions that have others, such as lost\n" in out
    counts = json.loads((tmp_path / "data" / "PREPARED.json").read_text())["counts"]["questions"]
    assert counts["records"] == 3
    prepare(passages, tmp_path / "one", questions=[f"test={folder}"], vocabulary_size=300)
    assert {*open_sources(tmp_path / "one").questions} == {"test"}
    prepare(passages, tmp_path / "dev", questions=[f"dev={folder}/qrels/test.tsv"], vocabulary_size=300)
    assert {*open_sources(tmp_path / "dev").questions} == {"dev"}
    with pytest.raises(UserError, match=r"--questions=dev=.*set: there are judgements of train, test there; leave out"):
        prepare(passages, tmp_path / "none", questions=[f"dev={folder}"], vocabulary_size=300)
    with pytest.raises(UserError, match=r"a folder without qrels/test\.tsv, as BEIR has it; name a file of questions"):
        prepare(passages, tmp_path / "none", questions=[f"dev={tmp_path}"], vocabulary_size=300)


def test_other_texts_of_the_same_judgements_are_another_preparation(tmp_path, capsys):
    passages = write_lines(tmp_path / "p.jsonl", [{"id": "oslo", "text": "Oslo is a town."}])
    folder = beir(tmp_path / "set", dev="q1\toslo\t1\n")
    prepare(passages, tmp_path / "data", questions=[folder], vocabulary_size=300)
    prepare(passages, tmp_path / "data", questions=[folder], vocabulary_size=300)
    assert "nothing to do" in capsys.readouterr().out
    write_lines(folder / "queries.jsonl", [QUERIES[0] | {"text": "where is Oslo"}])
    with pytest.raises(UserError, match="data"):
        prepare(passages, tmp_path / "data", questions=[folder], vocabulary_size=300)


# --- TREC -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["\t", " ", "   "])
@pytest.mark.parametrize("name", ["qrels/test.tsv", "qrels.txt", "qrels/dev.trec", "all.qrels"])
def test_judgements_of_trec_are_read_by_their_columns(tmp_path, name, between):
    folder = beir(tmp_path / "set")
    rows = ["q1", "0", "paris", "1"], ["q2", "Q0", "rome", "2"], ["q2", "0", "bern", "0"]
    (folder / name).write_text("\n".join(map(between.join, rows)) + "\n")
    assert read_questions(folder / name, dropped=Counter()) == [
        Question("where is it", [], {"paris": 1}, {"id": "q1"}, 1),
        Question("what", [], {"rome": 2}, {"id": "q2"}, 2),
    ]


@pytest.mark.parametrize(
    "text",
    ["q1\tparis\t1\nq1\toslo\t1\n", "q1 paris 1\nq1 oslo 1\n", HEAD.replace("\t", " ") + "q1 paris 1\nq1 oslo 1\n"],
)
def test_judgements_of_three_columns_need_neither_a_header_nor_tabs(tmp_path, text):
    path = beir(tmp_path / "set") / "qrels" / "test.tsv"
    path.write_text(text)
    assert [one.gold for one in read_questions(path)] == [{"paris": 1, "oslo": 1}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q1 Q0 paris 1 12.5 bm25\n", r"q\.txt:1: is a ranking \(a run of TREC\), not judgements; name"),
        ("q1\tQ0\tparis\t1\t12\tbm25\n", r"q\.txt:1: is a ranking"),
        ("q1\tparis\t1\nq1\toslo\t2\n", r"q\.txt: may be a ranking \(query, document, rank\).*; put query-id<tab>"),
        ("q1 3 paris 1\n", r"q\.txt:1: may be a judgement of TREC or a question of CuratedTREC; write 0 into"),
        ("1756\tfactoid\tWhen?\t1999\n", r"q\.txt:1: may be a judgement of TREC or a question of CuratedTREC"),
        ("q1 0 paris 1\nq2 0 rome 0.5\n", r"q\.txt:2: holds 'q2 0 rome 0\.5', not query-id, corpus-id, score"),
    ],
)
def test_a_table_that_may_be_no_judgements_is_refused(tmp_path, text, message):
    (beir(tmp_path / "set") / "q.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        read_questions(tmp_path / "set" / "q.txt")


@pytest.mark.parametrize("first", ["1\tfactoid\tWhen?\t1999\n", "1\tfactoid\tWhen?\tSept\n", ""])
def test_questions_of_curated_trec_stay_questions_beside_queries(tmp_path, first):
    path = beir(tmp_path / "set") / "qrels" / "test.tsv"
    path.write_text(first + "2\tfactoid\tWhen is it?\t1999\n")
    assert read_questions(path)[-1].answers == ["1999"] and read_questions(path)[-1].is_regex


def test_other_texts_of_judgements_of_trec_are_another_preparation(tmp_path):
    passages = write_lines(tmp_path / "p.jsonl", [{"id": "oslo", "text": "Oslo is a town."}])
    folder = beir(tmp_path / "set")
    (folder / "qrels.txt").write_text("q1 0 oslo 1\n")
    prepare(passages, tmp_path / "data", questions=[f"dev={folder}/qrels.txt"], vocabulary_size=300)
    write_lines(folder / "queries.jsonl", [QUERIES[0] | {"text": "where is Oslo"}])
    with pytest.raises(UserError, match="data"):
        prepare(passages, tmp_path / "data", questions=[f"dev={folder}/qrels.txt"], vocabulary_size=300)


def test_a_document_with_a_title_alone_can_be_the_gold_passage(tmp_path):
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


# --- SQuAD ------------------------------------------------------------------------------------------------------------


ASKED = [
    {"id": "s1", "question": "who", "answers": [{"text": "me", "answer_start": 0}, {"text": "me"}, {"text": "I"}]},
    {"id": "s2", "question": "why", "answers": [], "is_impossible": True, "plausible_answers": [{"text": "so"}]},
    {"id": "s3", "question": "how", "answers": [{"text": "so"}], "is_impossible": False},
]


def squad(path: Path, asked: list, indent: int | None = None, **fields) -> Path:
    data = [{"title": "T", "paragraphs": [{"context": "me so", "qas": [one]}]} for one in asked]
    text = json.dumps(fields | {"data": data}, indent=indent).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize(
    ("name", "indent", "fields"),
    [
        ("dev-v1.1.json", None, {}),
        ("train-v2.0.json.gz", None, {"version": "v2.0"}),
        ("xquad.json", 2, {"version": 1.0}),
    ],
)
def test_questions_of_squad_have_each_answer_once(tmp_path, name, indent, fields):
    dropped = Counter()
    assert read_questions(squad(tmp_path / name, ASKED, indent, **fields), dropped=dropped) == [
        Question("who", ["me", "I"], {}, {"id": "s1"}, 1),
        Question("how", ["so"], {}, {"id": "s3"}, 3),
    ]
    assert dropped == {"that no passage answers (is_impossible)": 1}


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ({"question": "who", "answers": [{}]}, r'd\.json:2: no "question" with "answers" of a "text" each; correct'),
        ({"question": "who", "answers": "me"}, r'd\.json:2: no "question" with "answers"'),
        ("who", r'd\.json:2: no "question" with "answers"'),
        ({"question": " ", "answers": [{"text": "me"}]}, r'd\.json:2: "question" is empty'),
        ({"question": "who", "answers": []}, r"d\.json:2: the question has no answers"),
        ({"question": "\ud800", "answers": []}, r'd\.json:2: "question" holds half of a surrogate pair'),
    ],
)
def test_a_question_of_squad_that_cannot_be_used_is_named_by_its_number(tmp_path, one, message):
    with pytest.raises(UserError, match=message):
        read_questions(squad(tmp_path / "d.json", [ASKED[0], one]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": [', r"d\.json: not readable as JSON"),
        ('{"data": [{"title": "T"}]}', r"d\.json: not data\[\]\.paragraphs\[\]\.qas\[\], as SQuAD's are"),
        ('{"data": [3]}', r"d\.json: not data\[\]"),
        ('{"data": []}', "holds no questions"),
    ],
)
def test_a_file_that_only_begins_like_squad_is_told(tmp_path, content, message):
    (tmp_path / "d.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_questions(tmp_path / "d.json")


def test_questions_of_squad_are_prepared_and_counted(tmp_path, capsys):
    passages = write_lines(tmp_path / "p.jsonl", [{"id": "t", "text": "Me, so."}])
    file = squad(tmp_path / "dev-v2.0.json", ASKED)
    prepare(passages, tmp_path / "data", questions=[f"dev={file}"], vocabulary_size=300)
    assert [one.question for one in open_sources(tmp_path / "data").questions["dev"]] == ["who", "how"]
    assert "questions: dev 2; dropped 1 that no passage answers (is_impossible)\n" in capsys.readouterr().out


# --- A run ------------------------------------------------------------------------------------------------------------


def test_a_run_is_measured_by_the_judgements_of_a_folder(trained_run, tmp_path, capsys):
    queries = [{"_id": f"q{n}", "text": f"When was {PEOPLE[n]} born?"} for n in range(4)]
    lines = "".join(f"q{n}\tp{n}\t2\nq{n}\tp{n + 1}\t1\n" for n in range(3)) + "q3\tgone\t1\nq3\tp3\t1\n"
    folder, output = beir(tmp_path / "set", queries, test=lines), tmp_path / "p.jsonl"
    command = [f"--workdir={trained_run.workdir}", f"--questions={folder}/qrels/test.tsv"]
    assert cli.main(["predict", *command, f"--output={output}"]) == 0
    assert "1 gold passages, such as 'gone', are not in the corpus: misses" in capsys.readouterr().err
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
