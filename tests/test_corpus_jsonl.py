"""JSON Lines files of articles and questions: every fault is named with its file and line."""

import bz2
import gzip
import lzma
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realm_jax.corpora.outcomes import Article
from realm_jax.corpora.texts import read_passages
from realm_jax.data import lines
from realm_jax.data.questions import Question, question_lines, read_questions
from realm_jax.errors import UserError

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
GOOD_PASSAGE = b'{"id": "a", "title": "A", "text": "Some text."}\n'
GOOD_QUESTION = b'{"question": "who?", "answers": ["me"]}\n'


def passages_of(path: Path, content: bytes) -> list[Article]:
    path.write_bytes(content)
    return list(read_passages(path))


def questions_of(path: Path, content: bytes) -> list[Question]:
    path.write_bytes(content)
    return read_questions(path)


def test_a_passage_has_an_id_a_title_and_a_text(tmp_path):
    content = b'\xef\xbb\xbf{"id": "a", "title": "A", "text": "Caf\xc3\xa9"}\n\n{"id": "b", "text": "B", "more": 1}'
    assert passages_of(tmp_path / "p.jsonl", content) == [Article("a", "A", "Café", 1), Article("b", "", "B", 3)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "b", "text": "x"\n', r"p\.jsonl:2: not JSON \(Expecting ',' delimiter at column 24\)"),
        (b'{"id": "b", "text": "\xff"}\n', r"p\.jsonl:2: byte 22 of the line is not UTF-8"),
        (b'["b", "x"]\n', r"p\.jsonl:2: holds .* not an object"),
        (b'{"text": "x"}\n', r'p\.jsonl:2: the record has no "id"'),
        (b'{"id": "b"}\n', r'p\.jsonl:2: the record has no "text"'),
        (b'{"id": "b", "text": " \\n"}\n', r'p\.jsonl:2: "text" is empty'),
        (b'{"id": 7, "text": "x"}\n', r'p\.jsonl:2: "id" must hold text but holds 7'),
        (b'{"id": "b", "text": null}\n', r'p\.jsonl:2: "text" must hold text but holds null'),
        (b'{"id": "b", "title": 3, "text": "x"}\n', r'p\.jsonl:2: "title" must hold text'),
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


def test_a_file_without_records_and_a_missing_file_are_named(tmp_path):
    for content in (b"", b"\n \n"):
        with pytest.raises(UserError, match=r"p\.jsonl holds no passages"):
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


def test_a_question_may_have_a_gold_passage_and_no_answers(tmp_path):
    """The kind of match is of no account then, whatever it is."""
    lines = b'{"question": "why?", "gold_passage_id": "p", "match": "rouge"}\n'
    lines += b'{"question": "who?", "answers": null, "gold_passage_id": "q"}\n'
    first, second = questions = questions_of(tmp_path / "q.jsonl", lines)
    assert (first.answers, first.gold_passage_id, first.is_regex) == ([], "p", False)
    assert (second.answers, second.gold_passage_id) == ([], "q")
    assert questions_of(tmp_path / "again.jsonl", question_lines(questions)) == questions


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


def test_a_question_keeps_its_further_fields(tmp_path):
    content = b'{"question": "who?", "answers": ["me"], "gold_passage_id": "a", "split": "dev", "n": 1}\n'
    expected = Question("who?", ["me"], "a", {"split": "dev", "n": 1}, 1)
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


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(golds=st.lists(text, min_size=1, max_size=5), title=text, body=text, answers=st.lists(text, min_size=1))
def test_what_is_written_is_read_back(tmp_path, golds, title, body, answers):
    questions = [Question(body, answers, gold, {"source": title}, line) for line, gold in enumerate(golds, start=1)]
    assert questions_of(tmp_path / "q.jsonl", question_lines(questions)) == questions


@pytest.mark.skipif(not DATA.exists(), reason="needs the real data in ../shared/data")
def test_real_files_are_read_whole():
    assert sum(1 for _ in read_passages(DATA / "wiki_qa" / "passages.jsonl.gz")) == 24_668
    assert len(read_questions(DATA / "wiki_qa" / "questions.jsonl.gz")) == 21_455
    assert len(read_questions(DATA / "nq_open" / "NQ-open.dev.jsonl")) == 3_610
