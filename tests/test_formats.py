"""Files of articles and questions, ours and those of other projects: each is read, or refused with file and line."""

import bz2
import csv
import gzip
import json
import lzma
import re
import tracemalloc
from collections import Counter
from datetime import date
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realm_jax.corpora.outcomes import Article
from realm_jax.corpora.texts import read_passages
from realm_jax.data import lines
from realm_jax.data.questions import Question, parse_questions, question_lines, read_questions
from realm_jax.data.records import BadRecord
from realm_jax.data.squad import IMPOSSIBLE
from realm_jax.errors import UserError

GOOD_PASSAGE = b'{"id": "a", "title": "A", "text": "Some text."}\n'
GOOD_QUESTION = b'{"question": "who?", "answers": ["me"]}\n'
DPR_PASSAGES = (
    b"id\ttext\ttitle\n"
    b'1\t"Aaron Aaron ( or ; ""Ah\xc3\xa4r\xc3\xb4n"") is a prophet, high priest"\tAaron\n'
    b"2\tGod at Sinai granted Aaron the priesthood\tAaron\n"
    b'3\t"A tab\tand\na line end"\t"The ""Title"""\n'
)
DPR_RETRIEVER = [
    {
        "dataset": "nq_train_psgs_w100",
        "question": "big little lies season 2 how many episodes",
        "answers": ["seven"],
        "positive_ctxs": [
            {"title": "Big Little Lies", "text": "of seven", "score": 1000, "passage_id": "18768923"},
            {"title": "Big Little Lies", "text": "seven", "score": 13, "passage_id": "9"},
        ],
        "negative_ctxs": [{"title": "Cloud", "text": "x", "passage_id": "2"}],
        "hard_negative_ctxs": [],
    },
    {"question": "who", "answers": ["me"], "positive_ctxs": [], "negative_ctxs": [], "hard_negative_ctxs": []},
    {"question": "what", "answers": ["it"], "positive_ctxs": [{"title": "T", "text": "it", "psg_id": 7}]},
]


def write(path: Path, content: bytes | str) -> Path:
    content = content.encode("utf-8") if isinstance(content, str) else content
    packed = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(packed(content))
    return path


def passages_of(path: Path, content: bytes) -> list[Article]:
    path.write_bytes(content)
    return list(read_passages(path))


def questions_of(path: Path, content: bytes) -> list[Question]:
    path.write_bytes(content)
    return read_questions(path)


# --- Passages ---------------------------------------------------------------------------------------------------------


def test_a_passage_has_an_id_a_title_and_a_text(tmp_path):
    content = b'\xef\xbb\xbf{"id": "a", "title": "A", "text": "Caf\xc3\xa9"}\n\n{"id": "b", "text": "B", "more": 1}'
    assert passages_of(tmp_path / "p.jsonl", content) == [Article("a", "A", "Café", 1), Article("b", "", "B", 3)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "b", "text": "x"\n', r"p\.jsonl:2: not JSON \(Expecting ',' delimiter at column 24\)"),
        (b'{"id": "b", "text": "\xff"}\n', r"p\.jsonl:2: byte 22 of the line is not UTF-8"),
        (b'["b", "x"]\n', r"p\.jsonl:2: holds .* not an object"),
        (b'{"id": "b"}\n', r"p\.jsonl:2: without a field \"text\" or the like: {'id': 'b'}"),
        (b'{"id": "b", "text": " \\n"}\n', r"p\.jsonl:2: {'id': 'b', .* \(without text\)"),
        (b'{"id": 7.5, "text": "x"}\n', r"p\.jsonl:2: the id is not a string"),
        (b'{"id": "b", "text": null}\n', r"p\.jsonl:2: .* \(without text\)"),
        (b'{"id": "b", "text": ["x"]}\n', r"p\.jsonl:2: the text is not a string"),
        (b'{"id": "b", "title": 3, "text": "x"}\n', r"p\.jsonl:2: the title is not a string"),
        (b'{"id": "a", "text": "x"}\n', r"p\.jsonl:2: id 'a' was already given on line 1"),
        (b'{"id": "b", "text": "\\ud83d"}\n', r'p\.jsonl:2: "text" holds half of a surrogate pair'),
        (b'{"id": "b", "text": "x", "more": [{"\\uD83d": 1}]}\n', r'p\.jsonl:2: "more" holds half of a surrogate pair'),
        (b'{"id": "b", "text": "x", "\\udfff": 1}\n', r'p\.jsonl:2: "\\udfff" holds half of a surrogate pair'),
        (b'{"id": ' + b"9" * 5000 + b"}\n", r"p\.jsonl:2: not readable as JSON"),
        (b"[" * 100_000 + b"\n", r"p\.jsonl:2: not readable as JSON"),
    ],
)
def test_a_faulty_passage_is_named_with_file_and_line(tmp_path, line, message):
    with pytest.raises(UserError, match=message):
        passages_of(tmp_path / "p.jsonl", GOOD_PASSAGE + line)


@pytest.mark.parametrize("name", ["psgs_w100.tsv", "psgs_w100.tsv.gz", "psgs_w100.TSV.xz", "psgs_w100.tsv.bz2"])
def test_a_table_of_dpr_is_read_with_its_quotes(tmp_path, name):
    assert list(read_passages(write(tmp_path / name, DPR_PASSAGES))) == [
        Article("1", "Aaron", 'Aaron Aaron ( or ; "Ahärôn") is a prophet, high priest', 2),
        Article("2", "Aaron", "God at Sinai granted Aaron the priesthood", 3),
        Article("3", 'The "Title"', "A tab\tand\na line end", 4),
    ]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (['1\t"Never closed\tA', "2\ty\tB"], [('"Never closed', "A"), ("y", "B")]),
        (["1\tx\tA", '2\t"At the end\tB'], [("x", "A"), ('"At the end', "B")]),
        (['1\t"One," he said.\tA', '2\t"Two\tB"'], [('"One," he said.', "A"), ('"Two', 'B"')]),
        (['1\t"Whole"\tA', '2\tThe 5" pipe\tB'], [("Whole", "A"), ('The 5" pipe', "B")]),
        (['1\t"x\ty"\tA', '2\t"""y"" z"\tB'], [("x\ty", "A"), ('"y" z', "B")]),
        (["1\t\"Over\ntwo\tlines, \"\"too\"\"\"\tA", '2\t"y\tB'], [('Over\ntwo\tlines, "too"', "A"), ('"y', "B")]),
        (['1\t"x"\t"y"'], [('x', "y")]),
        (['1\t"Never\tA', "", '2\tthe end."\tB'], [('"Never', "A"), ('the end."', "B")]),
        (['1\t"Over\n2\tthree\tlines\nin all"\tA'], [("Over\n2\tthree\tlines\nin all", "A")]),
        (['1\tx\tA\r', "\r", '2\ty\tB'], [("x", "A"), ("y", "B")]),
    ],
)  # fmt: skip
def test_a_quote_between_tabs_may_be_a_character_like_any_other(tmp_path, rows, expected):
    found = read_passages(write(tmp_path / "p.tsv", "id\ttext\ttitle\n" + "\n".join(rows) + "\n"))
    assert [(article.text, article.title) for article in found] == expected


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-8-sig"])
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_table_is_read_in_its_encoding(tmp_path, encoding, delimiter):
    rows = [("id", "text", "title"), ("1", "Le café est fermé jusqu’à la fin de l’été.", "Générale"), ("2", "x", "É")]
    text = "".join(delimiter.join(row) + "\r\n" for row in rows)
    found = read_passages(write(tmp_path / "p.csv", text.encode(encoding)))
    assert [(article.id, article.text, article.title) for article in found] == rows[1:]


def test_a_table_that_is_cut_is_read_to_there(tmp_path):
    rows = "".join(f"{number}\t{hash((number, 7))}\tA\n" for number in range(2000)).encode()
    packed = gzip.compress(b"id\ttext\ttitle\n" + rows)
    (tmp_path / "p.tsv.gz").write_bytes(packed[:-2000])
    found = read_passages(tmp_path / "p.tsv.gz")
    assert [article.id for article in islice(found, 1000)] == [str(number) for number in range(1000)]
    with pytest.raises(UserError, match=r"p\.tsv\.gz:\d+: .*truncated"):
        list(found)


def test_a_quote_that_nothing_closes_costs_no_more_than_its_neighbourhood(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MOST_LINES", 10)
    rows = [line for number in range(100) for line in (f'{number}\t5"\t"foo', "")]
    taken = []
    real = lines.text_lines
    monkeypatch.setattr(lines, "text_lines", lambda *a: (taken.append(1) or line for line in real(*a)))
    table = lines.table_rows(write(tmp_path / "p.tsv", "id\ttext\ttitle\n" + "\n".join(rows)))
    assert next(table) and next(table) == (2, ["0", '5"', '"foo'])
    assert len(taken) <= 12


def test_a_field_of_a_table_may_be_a_long_article(tmp_path):
    (article,) = read_passages(write(tmp_path / "p.tsv", "id\ttext\ttitle\n1\t" + 200_000 * "x" + "\tA\n"))
    assert len(article.text) == 200_000


def test_the_columns_of_a_table_are_found_by_their_names(tmp_path):
    path = write(tmp_path / "p.tsv", "\ufefftitle\tid\tviews\ttext\r\nA\t1\t9\tSome text\r\n\r\nB\t2\t9\tMore\r\n")
    assert list(read_passages(path)) == [Article("1", "A", "Some text", 2), Article("2", "B", "More", 4)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1\tSome text\tA\n", r"p\.tsv: its columns are 1, Some text, A \(without a field .text. or the like\)"),
        ("id\ttext\ttitle\n1\tSome text\n", r"p\.tsv:2: the row has 2 columns"),
        ("id\ttext\ttitle\n1\tx\tA\n1\ty\tB\n", r"p\.tsv:3: id '1' was already given on line 2"),
        ("id\ttext\ttitle\n1\t\t \n", r"p\.tsv:2: .* \(without text\)"),
        ('id\ttext\ttitle\n1\tx\n2\t"y\tB\n', r"p\.tsv:2: the row has 2 columns"),
        ('id,text,title\n1,x,A\n2,"y,B\n3,z,C\n', r"p\.tsv:3: no row of columns \(unexpected end of data\)"),
        ('id,text,title\n1,"x" y,A\n', r"p\.tsv:2: no row of columns"),
        ("id\ttext\ttitle\n1\tx\rA\n", r"p\.tsv:2: no row of columns \(new-line character"),
        ("id\ttext\ttitle\n1\té\tA\n2\t".encode() + b"\xff\tA\n", r"p\.tsv:3: byte 3 of the line is not UTF-8"),
        ("", r"p\.tsv: no bytes \(empty\)"),
    ],
)
def test_a_faulty_table_of_passages_is_named_with_file_and_line(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        list(read_passages(write(tmp_path / "p.tsv", content)))


def test_the_sections_of_atlas_go_behind_the_title(tmp_path):
    lines = [
        {"id": "7", "title": "Oslo", "section": "History", "text": "It burned."},
        {"id": "8", "title": "Oslo", "section": "", "text": "A city."},
        {"id": "9", "section": "History", "text": "Of nothing."},
    ]
    path = write(tmp_path / "text-list-100-sec.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert [article.title for article in read_passages(path)] == ["Oslo: History", "Oslo", ""]


def test_a_file_without_records_and_a_missing_file_are_named(tmp_path):
    for content in (b"", b"\n \n"):
        with pytest.raises(UserError, match=r"p\.jsonl: no records \(empty\)"):
            passages_of(tmp_path / "p.jsonl", content)
        with pytest.raises(UserError, match=r"q\.jsonl holds no questions"):
            questions_of(tmp_path / "q.jsonl", content)
    with pytest.raises(UserError, match=r"cannot read .*absent\.jsonl \(No such file or directory\)"):
        list(read_passages(tmp_path / "absent.jsonl"))


@pytest.mark.parametrize(("suffix", "module"), [(".gz", gzip), (".xz", lzma), (".bz2", bz2)])
def test_a_truncated_packed_file_is_named(tmp_path, suffix, module):
    records = b"".join(b'{"id": "%d", "text": "some text"}\n' % number for number in range(1000))
    path = tmp_path / f"p.jsonl{suffix}"
    assert len(passages_of(path, module.compress(records))) == 1000
    with pytest.raises(UserError, match="is truncated or damaged"):
        passages_of(path, module.compress(records)[:-20])
    with pytest.raises(UserError, match="is truncated or damaged"):
        passages_of(path, records)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_endless_line_is_named_and_not_held_in_memory(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(lines, "LONGEST_LINE", 1000)
    path = tmp_path / f"p.jsonl{suffix}"
    endless = GOOD_PASSAGE + b'{"id": "b", "text": "' + b"x" * 5_000_000 + b'"}'
    path.write_bytes(gzip.compress(endless) if suffix else endless)
    tracemalloc.start()
    with pytest.raises(UserError, match=rf"p\.jsonl{suffix}:2: the line has more than 1,000 bytes"):
        list(read_passages(path))
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    (article,) = passages_of(tmp_path / "p.jsonl", b'{"id": "a", "text": "\\ud83d\\ude42"}')
    assert article.text == "🙂"


def test_an_id_cannot_break_the_line_of_an_error(tmp_path):
    with pytest.raises(UserError, match=r"p\.jsonl:2: id 'a\\nb' was already given on line 1"):
        passages_of(tmp_path / "p.jsonl", b'{"id": "a\\nb", "text": "x"}\n' * 2)


# --- Questions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 4])
@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_questions_of_dpr_have_their_first_positive_passage_as_gold(tmp_path, indent, suffix):
    path = write(tmp_path / f"nq-train.json{suffix}", json.dumps(DPR_RETRIEVER, indent=indent))
    read = read_questions(path)
    assert [question.gold for question in read] == [{"18768923": 1}, {}, {"7": 1}]
    assert [question.answers for question in read] == [["seven"], ["me"], ["it"]]
    assert read[0].fields == {"dataset": "nq_train_psgs_w100"}, "no passages"


def test_questions_of_a_reader_lose_their_passages(tmp_path):
    found = [{"id": "3", "title": "T", "text": "x", "score": "81.2", "has_answer": False}]
    line = {"question": "who", "answers": ["me", "I"], "ctxs": found}
    (question,) = read_questions(write(tmp_path / "nq-test.json", json.dumps([line])))
    assert question == Question("who", ["me", "I"], line=1)
    (question,) = read_questions(write(tmp_path / "fid.jsonl", json.dumps({"question": "who", "target": "me"} | line)))
    assert question.answers == ["me", "I"] and question.fields == {"target": "me"}
    (question,) = read_questions(write(tmp_path / "atlas.jsonl", json.dumps({"question": "who", "target": "me"})))
    assert question == Question("who", ["me"], line=1)


@pytest.mark.parametrize("further", [{}, {"answers": None}, {"target": "me", "choices": ["me", "you"]}])
def test_golden_answers_of_flashrag_are_the_answers(tmp_path, further):
    line = {"id": "test_0", "question": "who", "golden_answers": ["me", "I"], "metadata": {}} | further
    (question,) = read_questions(write(tmp_path / "test.jsonl", json.dumps(line)))
    assert (question.question, question.answers, question.fields["id"]) == ("who", ["me", "I"], "test_0")


def test_a_table_of_answers_is_read_with_either_quote(tmp_path):
    path = write(
        tmp_path / "nq-test.qa.csv",
        "who got the first nobel prize in physics\t['Wilhelm Conrad Röntgen']\n"
        "who wrote it\t[\"O'Hara\", 'a \\'b\\'', 'tab\\t', '\\u00e9',]\n"
        '"what is ""it"""\t"[""one"", \'two\']"\n',
    )
    assert [(question.question, question.answers) for question in read_questions(path)] == [
        ("who got the first nobel prize in physics", ["Wilhelm Conrad Röntgen"]),
        ("who wrote it", ["O'Hara", "a 'b'", "tab\t", "é"]),
        ('what is "it"', ["one", "two"]),
    ]


@pytest.mark.parametrize(
    "answers",
    [
        "__import__('os').system('true')",
        "['a'] + ['b']",
        "['a' 'b']",
        "['a', 3]",
        "[b'a']",
        "[f'{1}']",
        "'a'",
        "['a'",
        "['\\x']",
        "['\\ud83d']",
        "['\\N{no such character}']",
        "[" * 5000 + "]" * 5000,
        "[" + "-" * 60_000 + "1]",
        "['" + "\\" * 60_001 + "]",
    ],
)
def test_nothing_but_a_list_of_strings_is_evaluated(tmp_path, answers):
    path = write(tmp_path / "q.csv", f"who\t['me']\nwhat\t{answers}\n")
    with pytest.raises(UserError, match=r"q\.csv:2: the second column holds .* not a list of quoted answers"):
        read_questions(path)


@pytest.mark.filterwarnings("error")
def test_answers_of_curated_trec_are_patterns_whatever_the_file(tmp_path):
    pattern = r"New\s?York|\d+"
    table = write(tmp_path / "large2470-train.tsv", f'1434\tfactoid\twhat "site"?\t{pattern}\n\n9\tfactoid\twho \t.*\n')
    first, second = read_questions(table)
    assert first == Question('what "site"?', [pattern], {}, {"match": "regex", "id": "1434"}, 1)
    assert (second.question, second.line) == ("who ", 3), "verbatim"
    lines = json.dumps({"question": "where", "answer": [pattern]}) + "\n"
    for name, content in {
        "CuratedTrec-train.txt": lines,
        "CuratedTrec.resplit.dev.jsonl": lines,
        "curatedtrec-test.qa.csv": f"where\t['{pattern}']\n",
    }.items():
        (question,) = read_questions(write(tmp_path / name, content))
        assert question == Question("where", [pattern], {}, {"match": "regex"}, 1), name
    (question,) = read_questions(write(tmp_path / "WebQuestions-train.txt", lines))
    assert question.fields == {}


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "*"])
def test_a_pattern_that_does_not_compile_is_named(tmp_path, pattern):
    path = write(tmp_path / "t.tsv", f"1\tfactoid\twho\t.\n2\tfactoid\twhat\t{pattern}\n")
    with pytest.raises(UserError, match=r"t\.tsv:2: .* is not a regular expression .*; correct the pattern or remove"):
        read_questions(path)
    assert len(read_questions(path, check_patterns=False)) == 2
    plain = write(tmp_path / "q.jsonl", json.dumps({"question": "what", "answers": [pattern]}))
    assert read_questions(plain)[0].answers == [pattern], "a string like any other"


def test_web_questions_have_names_of_their_own(tmp_path):
    line = {"qId": "wqr000001", "answers": ["Yiddish"], "qText": "what language?"}
    (question,) = read_questions(write(tmp_path / "val.json", f"[\n {json.dumps(line)}\n]\n"))
    assert question == Question("what language?", ["Yiddish"], {}, {"id": "wqr000001"}, 2)


def test_a_question_may_have_a_gold_passage_and_no_answers(tmp_path):
    """The kind of match is of no account then, whatever it is."""
    lines = b'{"question": "why?", "gold_passage_id": "p", "match": "rouge"}\n'
    lines += b'{"question": "who?", "answers": null, "gold_passage_id": "q"}\n'
    first, second = questions = questions_of(tmp_path / "q.jsonl", lines)
    assert (first.answers, first.gold, first.is_regex) == ([], {"p": 1}, False)
    assert (second.answers, second.gold) == ([], {"q": 1})
    assert questions_of(tmp_path / "again.jsonl", question_lines(questions)) == questions


def test_a_question_may_have_several_gold_passages(tmp_path):
    lines = b'{"question": "why?", "gold_passages": {"p": 2, "q": 1, "r": 0, "s": -1}}\n'
    lines += b'{"question": "who?", "answers": ["me"], "gold_passages": {"p": 1}, "n": 1}\n'
    lines += b'{"question": "how?", "answers": ["so"], "gold_passages": {"p": 0}}\n'
    questions = questions_of(tmp_path / "q.jsonl", lines)
    assert [one.gold for one in questions] == [{"p": 2, "q": 1}, {"p": 1}, {}]
    written = question_lines(questions)
    assert b'"answers": [], "gold_passages": {"p": 2, "q": 1}}\n' in written
    assert b'"answers": ["me"], "gold_passage_id": "p", "n": 1}\n' in written, "as folders have it that exist"
    assert questions_of(tmp_path / "again.jsonl", written) == questions


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"gold_passages": ["p"]},
            '"gold_passages" is no object of ids and grades; write {id: grade}, each grade a whole',
        ),
        ({"gold_passages": {"p": 1.5}}, '"gold_passages" is no object of ids and grades'),
        ({"gold_passages": {"p": True}}, '"gold_passages" is no object of ids and grades'),
        ({"gold_passages": {"p": 1001}}, "each grade a whole number of at most 1,000"),
        ({"gold_passages": {" ": 1}}, '"gold_passages" is no object of ids and grades'),
        ({"gold_passages": {"p": 0}}, 'the question has no answers and no "gold_passage_id"'),
        (
            {"gold_passages": {"p": 1}, "gold_passage_id": "q"},
            'has "gold_passage_id" and "gold_passages"; leave one out',
        ),
    ],
)
def test_grades_that_mean_nothing_are_named(tmp_path, fields, message):
    path = write(tmp_path / "q.jsonl", json.dumps({"question": "why?"} | fields))
    with pytest.raises(UserError, match=r"q\.jsonl:1: .*" + re.escape(message)):
        read_questions(path)


def test_a_question_keeps_its_further_fields(tmp_path):
    content = b'{"question": "who?", "answers": ["me"], "gold_passage_id": "a", "split": "dev", "n": 1}\n'
    expected = Question("who?", ["me"], {"a": 1}, {"split": "dev", "n": 1}, 1)
    assert questions_of(tmp_path / "q.jsonl", content) == [expected]
    (question,) = questions_of(tmp_path / "q.jsonl", b'{"question": "who?", "answer": ["me"]}\n')  # as NQ-open has it
    assert question.answers == ["me"] and question.fields == {}


@pytest.mark.parametrize(
    ("match", "is_regex"),
    [("null", False), *((f'"{kind}"', False) for kind in ("string", "exact", "norm", "none")), ('"regex"', True)],
)
def test_a_question_says_how_its_answers_are_compared(tmp_path, match, is_regex):
    line = f'{{"question": "who?", "answers": ["m."], "match": {match}}}'
    (question,) = questions_of(tmp_path / "q.jsonl", line.encode())
    assert question.is_regex == is_regex


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"answers": ["x"]}\n', r'q\.jsonl:2: the record has no "question"'),
        (b'{"question": "", "answers": ["x"]}\n', r'q\.jsonl:2: "question" is empty'),
        (b'{"question": "%s", "answers": ["x"]}\n' % (b"x" * 2001), r"q\.jsonl:2: the question has 2,001 characters"),
        (b'{"question": "x"}\n', r'q\.jsonl:2: the question has no answers and no "gold_passage_id"; add one'),
        (b'{"question": "x", "answers": []}\n', r'q\.jsonl:2: the question has no answers and no "gold_passage_id"'),
        (b'{"question": "x", "answers": "y"}\n', r'q\.jsonl:2: "answers" must be a list of strings'),
        (b'{"question": "x", "answers": "y", "gold_passage_id": "p"}\n', r'q\.jsonl:2: "answers" must be a list'),
        (b'{"question": "x", "answers": [3]}\n', r'q\.jsonl:2: "answers" must hold text but holds 3'),
        (b'{"question": "x", "answers": [""]}\n', r'q\.jsonl:2: "answers" is empty'),
        (b'{"question": "x", "answers": ["y"], "match": 7}\n', r'q\.jsonl:2: "match" is 7; write "regex" for answers'),
        (
            b'{"question": "x", "answers": ["y"], "match": "regexp"}\n',
            r'q\.jsonl:2: "match" is "regexp"; write "regex" for .*, or one of "string", "exact", "norm", "none"$',
        ),
        (b'{"question": "x", "answers": ["y"], "gold_passage_id": 3}\n', r'q\.jsonl:2: "gold_passage_id" must hold'),
    ],
)
def test_a_faulty_question_is_named_with_file_and_line(tmp_path, line, message):
    with pytest.raises(UserError, match=message):
        questions_of(tmp_path / "q.jsonl", GOOD_QUESTION + line)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.csv", "who\t['me']\nwhat\n", r"q\.csv:2: the row has 1 columns"),
        ("q.csv", "who\n", r"q\.csv:1: the first line has 1 columns; tables of questions have two"),
        ("q.tsv", "id\ttext\ttitle\n", r"q\.tsv:1: holds 'id text title', not query-id, corpus-id, score"),
        ("q.tsv", "1\t2\t3\t4\t5\n", r"q\.tsv:1: the first line has 5 columns; tables of questions have two"),
        ("q.tsv", "1\tfactoid\twho\t.\n\n2\twhat\t.\n", r"q\.tsv:3: the row has 3 columns, the first line four"),
        ("q.tsv", "1\tfactoid\t\t.\n", r'q\.tsv:1: "question" is empty'),
        ("q.tsv", "", r"q\.tsv holds no questions"),
        ("q.csv", "who\t[]\n", r"q\.csv:1: the question has no answers"),
        ("q.json", '[{"question": "who", "answers": ["me"]},\n 3]', r"q\.json:2: the array holds '3\]', not an object"),
        ("q.json", '\n[\n{"question": "who",\n "answers": [}]', r"q\.json:4: not readable as JSON \(Expecting value\)"),
        ("q.json", '[\n{"question": "who", "answers": ["me', r"q\.json:2: not readable as JSON \(Unterminated"),
        ("q.json", '[\n{"question": "who", "answers": ["me"]}\n', r"q\.json:3: .*\(the array does not end\)"),
        ("q.json", '[{"question": "who", "answers": ["me"]}\n{}]', r"q\.json:2: .*\(no comma after an object\)"),
        ("q.json", '[{"question": "who", "answers": ["me"]}]\n\n]', r"q\.json:3: .*\(there is more after the end"),
        ("q.json", '[{"question": "who", "answers": ["me"]},]', r"q\.json:1: the array holds '\]', not an object"),
        ("q.json", '[\n{"question": "\\ud83d"}]', r'q\.json:2: "question" holds half of a surrogate pair'),
        ("q.json", b'[\n{"question": "who"},\n{"question": "\xff"}]', r"q\.json:3: a byte of the line is not UTF-8"),
        ("q.json", b'[\n{"question": "\xc3', r"q\.json:2: a byte of the line is not UTF-8"),
        ("q.json", '[{"question": ' + "9" * 5000 + "}]", r"q\.json:1: not readable as JSON"),
        ("q.json", '[{"question": ' + "[" * 100_000, r"q\.json:1: not readable as JSON"),
        ("q.json", "[]", r"q\.json holds no questions"),
    ],
)
def test_a_faulty_file_of_questions_is_named_with_file_and_line(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message):
        read_questions(write(tmp_path / name, content))


@pytest.mark.parametrize(
    "name, content, faults",
    [
        (
            "q.jsonl",
            '{"question": "a", "answers": ["b"]}\n{]\n{"question": "c"}\n{"question": "d", "answers": ["e"]}\n',
            2,
        ),
        ("q.csv", "a\t['b']\nbroken\nc\tno list\nd\t['e']\n", 2),
        ("curatedtrec.tsv", "1\tx\ta\tb\n2\tx\n3\tx\tc\t(\n4\tx\td\te\n", 2),
    ],
)
def test_a_bad_question_stands_in_its_place_and_the_others_are_read(tmp_path, name, content, faults):
    found = [one for _, one in parse_questions(write(tmp_path / name, content))]
    assert [one.question for one in found if isinstance(one, Question)] == ["a", "d"]
    assert sum(isinstance(one, BadRecord) for one in found) == faults


def test_an_array_may_be_read_in_pieces_of_any_size(tmp_path, monkeypatch):
    lines = [{"question": f"who is {n} é\n?", "answers": ['"]}', "\\"], "n": [n, -1.5e3, None]} for n in range(50)]
    path = write(tmp_path / "q.json", "\ufeff \n" + json.dumps(lines, indent=1, ensure_ascii=False))
    whole = read_questions(path)
    assert [question.question for question in whole] == [line["question"] for line in lines]
    assert [question.line for question in whole] == [3 + 12 * n for n in range(50)]
    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr("realm_jax.data.lines._CHUNK", size)
        assert read_questions(path) == whole


def test_an_object_without_end_is_not_read_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("realm_jax.data.lines._CHUNK", 10)
    monkeypatch.setattr("realm_jax.data.lines.LONGEST_LINE", 1000)
    with pytest.raises(UserError, match=r"q\.json:1: .*an object is longer than 1,000 characters"):
        read_questions(write(tmp_path / "q.json", '[{"question": "' + "x" * 5000))


FLAT = [  # SQuAD's questions as Hugging Face has them
    {"id": "a", "context": "By x.", "question": "By whom?", "answers": {"text": ["x", "x"], "answer_start": [3, 3]}},
    {"id": "b", "context": "By x.", "question": "When?", "answers": {"text": [], "answer_start": []}},
]


def test_questions_of_squad_may_be_flat(tmp_path):
    (tmp_path / "dev.json").write_text(json.dumps({"version": 2.0, "data": FLAT}), encoding="utf-8")
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(one) + "\n" for one in FLAT), encoding="utf-8")
    for name in ("dev.json", "dev.jsonl"):
        dropped = Counter()
        assert read_questions(tmp_path / name, dropped=dropped) == [Question("By whom?", ["x"], {}, {"id": "a"}, 1)]
        assert dropped == {IMPOSSIBLE: 1}


def test_questions_may_be_the_rows_of_a_parquet_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(FLAT), tmp_path / "flat.parquet")
    assert read_questions(tmp_path / "flat.parquet") == [Question("By whom?", ["x"], {}, {"id": "a"}, 1)]
    rows = [
        {"question": "By whom?", "answers": ["x"], "asked": date(2020, 1, 2), "score": float("nan"), "raw": b"z"},
        {"question": "?", "answers": ["y"]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "own.parquet")
    found = read_questions(tmp_path / "own.parquet")
    assert found[0] == Question("By whom?", ["x"], {}, {"asked": "2020-01-02", "score": None, "raw": "z"}, 1)
    assert questions_of(tmp_path / "q.jsonl", question_lines(found))[1].answers == ["y"]
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "own.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match=r"cut\.parquet is truncated or damaged .*; fetch or make it again"):
        read_questions(tmp_path / "cut.parquet")


# --- Any bytes --------------------------------------------------------------------------------------------------------

NAMES = ["f.jsonl", "f.json", "f.txt", "f.tsv", "f.csv", "curatedtrec.csv", "f.json.gz", "f.tsv.xz"]
pieces = st.lists(
    st.one_of(
        st.binary(max_size=8),
        st.sampled_from(
            [b"[", b"]", b"{", b"}", b",", b":", b"\t", b"\n", b"\r", b'"', b"'", b"\\", b"\\ud83d", b"\xef\xbb\xbf"]
            + [
                b"id\ttext\ttitle\n",
                b"who\t['me']\n",
                b"1\tfactoid\twho\t.\n",
                b'"question": "who"',
                b'"answers": ["("]',
            ]
            + [
                b'{"id": "a", "text": "x"}',
                b'{"question": "q", "answers": ["a"]}',
                b'"match": "regex"',
                b"1e999",
                b"NaN",
            ]
            + [b'{"question": "q", "target": 3, "positive_ctxs": [{"passage_id": [1]}]}', b'{"qText": "q", "qId": 1}']
        ),
    ),
    max_size=12,
).map(b"".join)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=pieces, packed=st.booleans())
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path, name, content, packed):
    path = tmp_path / name
    write(path, content) if packed else path.write_bytes(content)
    for read in (read_questions, read_passages):
        try:
            for found in read(path):
                assert isinstance(found, Question | Article) and found.line >= (path.suffix != ".txt")
        except UserError as fault:
            assert name in str(fault) and "\n" not in str(fault)


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), min_size=1, max_size=20).filter(
    str.strip
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(text, st.lists(text, min_size=1, max_size=3)), min_size=1, max_size=5))
def test_what_csv_writes_is_read_back(tmp_path, rows):
    with open(tmp_path / "q.csv", "w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, delimiter="\t", lineterminator="\n")
        writer.writerows((question, repr(answers)) for question, answers in rows)
    first = (tmp_path / "q.csv").read_text(encoding="utf-8").partition("\n")[0]
    if first.count("\t") == 1:  # one that goes on behind a quoted tab or line end hides how many columns it has
        read = [(question.question, question.answers) for question in read_questions(tmp_path / "q.csv")]
        assert read == rows


any_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    golds=st.lists(st.dictionaries(any_text, st.integers(1, 3), max_size=3), min_size=1, max_size=5),
    title=any_text,
    body=any_text,
    answers=st.lists(any_text, min_size=1),
)
def test_what_is_written_is_read_back(tmp_path, golds, title, body, answers):
    questions = [Question(body, answers, gold, {"source": title}, line) for line, gold in enumerate(golds, start=1)]
    assert questions_of(tmp_path / "q.jsonl", question_lines(questions)) == questions


# --- Real files -------------------------------------------------------------------------------------------------------


def test_real_files_are_read_whole(shared_data):
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
    assert sum(1 for _ in read_passages(shared_data / "wiki_qa" / "passages.jsonl.gz")) == 24_668
