"""Files of articles, ours and those of other projects: each is read, or refused with file and line."""

import bz2
import gzip
import json
import lzma
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest
from capitals import write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realm_jax.corpora.articles import Article
from realm_jax.corpora.texts import read_passages
from realm_jax.data import lines
from realm_jax.data.questions import Question, read_questions
from realm_jax.errors import UserError

GOOD_PASSAGE = b'{"id": "a", "title": "A", "text": "Some text."}\n'
DPR_PASSAGES = (
    b"id\ttext\ttitle\n"
    b'1\t"Aaron Aaron ( or ; ""Ah\xc3\xa4r\xc3\xb4n"") is a prophet, high priest"\tAaron\n'
    b"2\tGod at Sinai granted Aaron the priesthood\tAaron\n"
    b'3\t"A tab\tand\na line end"\t"The ""Title"""\n'
)


def passages_of(path: Path, content: bytes) -> list[Article]:
    path.write_bytes(content)
    return list(read_passages(path))


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
        (b'{"id": "b", "text": null}\n', r"p\.jsonl:2: .* \(without text\)"),
        (b'{"id": "b", "text": ["x"]}\n', r"p\.jsonl:2: the text is not a string"),
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
        ('"one\nname"\ttwo\n1\t2\n', r"p\.tsv: its columns are one name, two "),
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


# --- Any bytes --------------------------------------------------------------------------------------------------------

NAMES = ["f.jsonl", "f.json", "f.txt", "f.tsv", "f.csv", "curatedtrec.csv", "f.json.gz", "f.tsv.xz"]
PIECES = [
    *(bytes([mark]) for mark in b"[]{},:\t\n\r\"'\\"),
    *(b"\\ud83d", b"\xef\xbb\xbf", b"1e999", b"NaN", b"id\ttext\ttitle\n", b"who\t['me']\n", b"1\tfactoid\twho\t.\n"),
    *(b'"question": "who"', b'"answers": ["("]', b'"match": "regex"', b'{"id": "a", "text": "x"}'),
    *(b'{"question": "q", "answers": ["a"]}', b'{"qText": "q", "qId": 1}'),
    b'{"question": "q", "target": 3, "positive_ctxs": [{"passage_id": [1]}]}',
]
pieces = st.lists(st.binary(max_size=8) | st.sampled_from(PIECES), max_size=12).map(b"".join)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# --- Real files -------------------------------------------------------------------------------------------------------


def test_a_real_file_of_passages_is_read_whole(shared_data):
    assert sum(1 for _ in read_passages(shared_data / "wiki_qa" / "passages.jsonl.gz")) == 24_668
