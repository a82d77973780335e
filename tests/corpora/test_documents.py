"""Documents of every known format become articles, and what cannot be read is counted by its reason."""

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from backports import zstd
from capitals import TEXTS, digests, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realm_jax.cli.prepare import prepare
from realm_jax.corpora import documents
from realm_jax.corpora.articles import Article, Outcome, Skipped
from realm_jax.corpora.documents import FORMATS
from realm_jax.corpora.raw_records import NO_FIELD
from realm_jax.corpora.texts import open_texts
from realm_jax.data.store import PassageStore
from realm_jax.errors import UserError

pytest.importorskip("lxml")
pytest.importorskip("pypdfium2")

PROSE = "The dodo was a large bird of Mauritius that could not fly and had no fear of people at all."


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def records(source: Path | str) -> list[Outcome]:
    return [record for file in documents.find(str(source)) for record in documents.read(file)]


def only(source: Path | str) -> Article:
    (article,) = records(source)
    assert isinstance(article, Article), article
    return article


def reason(path: Path) -> str:
    (found,) = records(path)
    assert isinstance(found, Skipped) and not found.is_damage, found
    return found.reason


# --- Documents by hand ------------------------------------------------------------------------------------------------


def pdf_file(pages: list[list[str]], title: str = "", encrypted: bool = False) -> bytes:
    """A PDF file with these lines on its pages."""
    streams = ["BT /F 10 Tf 12 TL 50 700 Td " + " ".join(f"({line}) Tj T*" for line in page) + " ET" for page in pages]
    kids = " ".join(f"{5 + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        f"<< /Title ({title}) >>",
    ]
    for n, stream in enumerate(streams):
        page = f"/Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F 3 0 R >> >> /Contents {6 + 2 * n} 0 R"
        objects += [f"<< /Type /Page {page} >>", f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream"]
    body, places = b"%PDF-1.4\n", []
    for number, text in enumerate(objects, 1):
        places.append(len(body))
        body += f"{number} 0 obj\n{text}\nendobj\n".encode("latin-1")
    key = f"<{'ab' * 32}>"
    lock = f"/Encrypt << /Filter /Standard /V 1 /R 2 /O {key} /U {key} /P -4 >> /ID [{key} {key}]" if encrypted else ""
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    trailer = f"trailer << /Size {len(objects) + 1} /Root 1 0 R /Info 4 0 R {lock} >>\nstartxref\n{len(body)}\n%%EOF"
    return body + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode()


def word_file(paragraphs: list[tuple[str, str]], title: str = "") -> bytes:
    """A Word file with paragraphs of (style, text), and a title among its properties."""
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    names = {style for style, _ in paragraphs if style}
    styles = "".join(f'<w:style w:type="paragraph" w:styleId="{n}"><w:name w:val="{n}"/></w:style>' for n in names)
    body = "".join(
        f'<w:p><w:pPr><w:pStyle w:val="{style}"/></w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>'
        for style, text in paragraphs
    )
    relation = f'<Relationship Id="r1" Type="{office}/%s" Target="%s"/>'
    relations = '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">%s</Relationships>'
    core = "http://schemas.openxmlformats.org/package/2006/metadata/core-properties"
    parts = {
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
        '<Default Extension="xml" ContentType="application/xml"/></Types>',
        "_rels/.rels": relations % (relation % ("officeDocument", "word/document.xml")),
        "word/_rels/document.xml.rels": relations % (relation % ("styles", "styles.xml")),
        "word/styles.xml": f'<w:styles xmlns:w="{word}">{styles}</w:styles>',
        "word/document.xml": f'<w:document xmlns:w="{word}"><w:body>{body}</w:body></w:document>',
        "docProps/core.xml": f'<c:coreProperties xmlns:c="{core}" xmlns:d="http://purl.org/dc/elements/1.1/">'
        f"<d:title>{title}</d:title></c:coreProperties>",
    }
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as packed:
        for name, content in parts.items():
            packed.writestr(name, content)
    return target.getvalue()


# --- Formats of documents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstd.compress)],
)
@pytest.mark.parametrize("spell", [str.lower, str.upper])
def test_a_text_file_is_called_by_its_name_however_it_is_packed(tmp_path, suffix, pack, spell):
    path = write(tmp_path / f"the_dodo{spell(f'.txt{suffix}')}", pack(PROSE.encode()))
    assert only(path) == Article(path.name, "the dodo", PROSE)


def test_a_large_text_is_cut_at_blank_lines_and_never_held_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 1000)
    text = "".join(f"Paragraph {number} says this much.\n\n" for number in range(200)) + "x" * 5000
    found = records(write(tmp_path / "book.txt", text))
    assert "".join(article.text for article in found) == text
    assert [article.id for article in found] == [f"book.txt#{number}" for number in range(1, len(found) + 1)]
    assert all(len(article.text) <= 3000 for article in found) and found[0].text.endswith("much.\n\n")


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_the_first_accent_may_stand_far_behind(tmp_path, monkeypatch, encoding):
    monkeypatch.setattr(documents, "PIECE", 1000)
    text = "Plain words.\n\n" * 300 + "Le café était fermé à cause de la grève générale. Où êtes-vous allés ?\n"
    found = records(write(tmp_path / "book.txt", text.encode(encoding)))
    assert "".join(article.text for article in found) == text


def test_bytes_that_fit_no_encoding_are_shown_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 1000)
    text = "Café in Mauritius.\n\n" * 300
    found = records(write(tmp_path / "book.txt", text.encode() + b"One bad \xff byte.\n"))
    assert "".join(article.text for article in found) == f"{text}One bad \N{REPLACEMENT CHARACTER} byte.\n"


def test_blank_pieces_of_a_text_are_no_articles(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 1000)
    text = "word\n" * 300 + "\n" * 5000 + "last\n" + " \n" * 3000
    found = records(write(tmp_path / "book.txt", text))
    assert all(isinstance(article, Article) for article in found)
    assert "".join(article.text for article in found).split() == text.split()


def test_markdown_becomes_prose(tmp_path):
    text = (
        '# The *Dodo*\n\nA **large** bird[^1] of\n[Mauritius](http://x.org "hint").\n\n- first `code`\n- second\n\n'
        "> [!NOTE]\n> Quoted.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n![badge](b.svg)\n\n<!-- hidden -->\n"
    )
    article = only(write(tmp_path / "d.md", text))
    assert article.title == "The Dodo"
    assert article.text.split("\n\n") == [
        *("The Dodo", "A large bird[^1] of Mauritius.", "first code", "second", "Quoted.", "a, b", "1, 2")
    ]
    assert only(write(tmp_path / "e.md", f"---\ntitle: 'Front'\nlayout: x\n---\n{PROSE}")) == Article(
        "e.md", "Front", PROSE
    )


def test_restructured_text_becomes_prose_with_sphinx_s_markup_too(tmp_path):
    text = (
        "The Dodo\n========\n\n.. toctree::\n\n   other\n\n"
        "See :func:`~birds.fly` and :ref:`the bird <dodo>`, *large*.\n\n"
        ".. py:function:: fly(height)\n   :async:\n\n   Goes up.\n\n"
        ".. code-block:: python\n   :caption: X\n\n   fly()\n\n"
        ".. include:: /etc/passwd\n.. comment\n"
    )
    article = only(write(tmp_path / "d.rst", text))
    assert article.title == "The Dodo"
    assert article.text.split("\n\n") == [
        *("The Dodo", "See birds.fly and the bird, large.", "fly(height)", "Goes up.", "X", "fly()")
    ]


def test_a_web_page_loses_what_stands_around_its_text(tmp_path):
    page = (
        '<html><head><title>Dodo | Birds</title><style>p {}</style></head><body><nav><a href="/">Home</a></nav>%s'
        "<footer>All rights reserved. Contact us.</footer><script>x()</script></body></html>"
    )
    marked = page % f'<main><h1>Dodo<a class="headerlink" href="#d">¶</a></h1><p>{PROSE}</p><nav>next</nav></main>'
    assert only(write(tmp_path / "a.html", marked)) == Article("a.html", "Dodo", f"Dodo\n\n{PROSE}")
    plain = page % ("<div id=content>" + f"<p>{PROSE}</p>" * 5 + "</div>")
    article = only(write(tmp_path / "b.htm", plain))
    assert article.title == "Dodo | Birds" and set(article.text.split("\n\n")) == {PROSE}


def test_a_row_of_a_table_is_a_paragraph_without_empty_cells(tmp_path):
    rows = "<tr><th><p>Name</p></th><td> </td> <td><p>Year</p></td></tr><tr><td>Oslo</td><td>1624</td><td></td></tr>"
    article = only(write(tmp_path / "a.html", f"<main>Before.<table>{rows}</table>After.</main>"))
    assert article.text.split("\n\n") == ["Before.", "Name, Year", "Oslo, 1624", "After."]


def test_a_word_file_has_its_title_from_a_heading_or_its_properties(tmp_path):
    headed = word_file([("Title", "The Dodo"), ("", PROSE)], title="Template")
    assert only(write(tmp_path / "a.docx", headed)) == Article("a.docx", "The Dodo", f"The Dodo\n\n{PROSE}")
    assert only(write(tmp_path / "b.docx", word_file([("", PROSE)], title="Birds"))) == Article(
        "b.docx", "Birds", PROSE
    )


# --- Formats of records -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "article"),
    [
        ({"_id": "7", "title": "Dodo", "text": PROSE, "metadata": {}}, Article("7", "Dodo", PROSE, 1)),
        ({"id": "7", "contents": f'"Dodo"\n{PROSE}'}, Article("7", "Dodo", PROSE, 1)),
        ({"id": 7, "contents": PROSE}, Article("7", "", PROSE, 1)),
        ({"Body": PROSE, "url": "http://x.org"}, Article("c.jsonl#1", "", PROSE, 1)),
    ],
    ids=["BEIR", "FlashRAG", "Pyserini", "no id"],
)
def test_records_of_other_projects_are_known(tmp_path, record, article):
    assert only(write_lines(tmp_path / "c.jsonl", [record])) == article


def test_a_file_of_objects_may_have_any_name_where_it_is_named_itself(tmp_path):
    assert only(write_lines(tmp_path / "passages", [{"id": "7", "text": PROSE}])) == Article("7", "", PROSE, 1)


def test_contexts_of_squad_are_articles(tmp_path):
    paragraphs = [{"context": text, "qas": [{"question": "?"}]} for text in TEXTS.values()]
    squad = {"version": "1.1", "data": [{"title": "Beyonc%C3%A9_K", "paragraphs": paragraphs}]}
    found = records(write(tmp_path / "train.json", json.dumps(squad, indent=1)))
    assert [(a.id, a.title, a.text) for a in found] == [
        (f"train.json#{n}", "Beyoncé K", text) for n, text in enumerate(TEXTS.values(), 1)
    ]


def test_a_context_of_squad_without_paragraphs_is_one_article(tmp_path):
    first, second = list(TEXTS.values())[:2]
    flat = [{"context": text, "question": "?", "answers": {"text": ["x"]}} for text in (first, first, second)]
    found = records(write(tmp_path / "dev.json", json.dumps({"version": 2.0, "data": flat})))
    assert [a.text for a in found] == [first, second]


def test_a_json_file_may_hold_one_object_or_many(tmp_path):
    one = {"title": "Dodo", "text": PROSE}
    assert only(write(tmp_path / "a.json", json.dumps(one, indent=2))) == Article("a.json", "Dodo", PROSE, 1)
    assert len(records(write(tmp_path / "b.json", json.dumps(one) + "\n" + json.dumps(one)))) == 2
    assert len(records(write(tmp_path / "c.json", json.dumps([one, one])))) == 2
    assert reason(write(tmp_path / "d.json", '{"name": "x"}')) == NO_FIELD


@pytest.mark.parametrize(
    "content", ['Title,Content\nDodo,"{}"\n', 'Title;Content\nDodo;"{}"\n', "title\tcontent\nDodo\t{}\n"]
)
def test_a_table_is_read_by_the_names_of_its_columns(tmp_path, content):
    assert only(write(tmp_path / "t.csv", content.format(PROSE))) == Article("t.csv#2", "Dodo", PROSE, 2)


def test_rows_of_parquet_files_are_articles(tmp_path):
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [{"title": name, "text": text, "vector": [1.0]} for name, text in TEXTS.items()]
    rows += [{"title": "A title alone", "text": None}, {"title": None, "text": None}]
    (tmp_path / "data").mkdir()
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / "train-0.parquet")
    *found, last = records(tmp_path)
    kept = [*TEXTS.items(), ("", "A title alone")]
    assert found == [Article(f"data/train-0.parquet#{n}", *row, n) for n, row in enumerate(kept, 1)]
    assert last.reason == "without text"


def test_a_folder_of_a_saved_hugging_face_data_set_is_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist([{"id": name, "text": text} for name, text in TEXTS.items()])
    with pa.ipc.new_stream(tmp_path / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    for beside in ("state.json", "dataset_info.json"):
        write(tmp_path / beside, "{}")
    found = records(tmp_path)
    assert [one.text for one in found if isinstance(one, Article)] == list(TEXTS.values())
    assert [one.reason for one in found if isinstance(one, Skipped)] == ["metadata of a Hugging Face dataset"] * 2


def test_of_a_folder_of_beir_the_corpus_is_read(tmp_path):
    write_lines(tmp_path / "corpus.jsonl", [{"_id": name, "title": "", "text": text} for name, text in TEXTS.items()])
    write_lines(tmp_path / "queries.jsonl", [{"_id": "q", "text": "what is the capital"}])
    write(tmp_path / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore\nq\tparis\t1\n")
    assert [article.id for article in records(tmp_path)] == list(TEXTS)


# --- What cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"\x7fELF\x00\x01", "binary in place of text"),
        ("a.txt", bytes(range(128, 256)) * 4, "in no known encoding"),
        ("a.txt", b"", "empty"),
        ("a.txt", b" \n", "without text"),
        ("a.txt.gz", gzip.compress(PROSE.encode() * 99)[:-9], "damaged .txt files"),
        ("a.txt.gz", PROSE.encode(), "damaged .txt files"),
        ("a.txt.zst", zstd.compress(PROSE.encode() * 99)[:-9], "damaged .txt files"),
        ("a.txt.zst", PROSE.encode(), "damaged .txt files"),
        ("a.md", b"", "empty"),
        ("a.html", b"<!-- nothing -->", "without text"),
        ("a.pdf", pdf_file([[], []]), "PDF files without text"),
        ("a.pdf", pdf_file([[PROSE]], encrypted=True), "encrypted"),
        ("a.pdf", b"%PDF-1.4 and no more", "damaged .pdf files"),
        ("a.docx", word_file([("", PROSE)])[:-40], "damaged .docx files"),
        ("a.docx", b"PK", "damaged .docx files"),
        ("a.csv", b"", "empty"),
    ],
)
def test_what_cannot_be_read_is_left_out_for_a_reason(tmp_path, name, content, expected):
    assert reason(write(tmp_path / name, content)) == expected


def test_what_is_too_large_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LARGEST", 100)
    assert reason(write(tmp_path / "a.md", "x" * 101)) == "too large"
    monkeypatch.setattr(documents.markup, "LARGEST_UNPACKED", 100)
    monkeypatch.setattr(documents, "LARGEST", 10_000)
    assert reason(write(tmp_path / "a.docx", word_file([("", PROSE)]))) == "too large"


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.json", '[{"id": "a", "text": "x"},\n{"id": ', r"a\.json:2"),
        ("a.csv", 'id,text\n1,"x', r"a\.csv:2"),
        ("a.parquet", "PAR1", r"a\.parquet"),
        ("a.arrow", "ARROW1", r"a\.arrow"),
    ],
)
def test_a_broken_file_of_records_ends_the_preparation_unless_damage_is_skipped(tmp_path, name, content, where):
    write(tmp_path / "texts" / name, content)
    write(tmp_path / "texts" / "b.txt", PROSE)
    with pytest.raises(
        UserError, match=rf"a file that cannot be read to its end \(1×\), first at .*{where}: .*--skip-damage"
    ):
        prepare(tmp_path / "texts", tmp_path / "data", vocabulary_size=100)
    prepare(tmp_path / "texts", tmp_path / "data", vocabulary_size=100, skip_damage=True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ending=st.sampled_from(sorted(FORMATS)), content=st.binary(max_size=200), cut=st.floats(0, 1))
def test_no_bytes_are_raised_at(tmp_path, ending, content, cut):
    whole = {".pdf": pdf_file([[PROSE]]), ".docx": word_file([("", PROSE)])}.get(ending, b"# A\n\nb: `c`\n")
    place = int(cut * len(whole))
    for found in records(write(tmp_path / f"f{ending}", whole[:place] + content + whole[place:])):
        assert isinstance(found, Outcome)


# --- Folders ----------------------------------------------------------------------------------------------------------


def folder_of_everything(folder: Path) -> Path:
    for number in range(6):
        write(folder / f"{number}.txt", f"{PROSE} It was seen {number} times.")
    write(folder / "deep" / "a.md", f"# A\n\n{PROSE}")
    write(folder / "deep" / "b.html", f"<main><h1>B</h1><p>{PROSE}</p></main>")
    write(folder / "deep" / "c.pdf", pdf_file([[PROSE]]))
    write(folder / "deep" / "d.pdf", pdf_file([[]]))
    write(folder / "e.docx", word_file([("", PROSE)]))
    write(folder / "f.csv", f"text\n{PROSE}\n")
    write_lines(folder / "g.jsonl", [{"text": text} for text in TEXTS.values()])
    write(folder / "h.exe", b"MZ")
    write(folder / ".git" / "config", "hidden")
    return folder


def test_a_mixed_folder_is_counted_whole_and_the_same_with_any_workers(tmp_path, capsys):
    texts = folder_of_everything(tmp_path / "texts")
    prepare(texts, tmp_path / "one", vocabulary_size=200, workers=1)
    out = capsys.readouterr().out
    assert "passages: 14 articles" in out
    assert "dropped 1 PDF files without text, 1 of an unknown format" in out
    assert "PDF files without text, such as: deep/d.pdf: 1 pages" in out and "such as: h.exe" in out
    prepare(texts, tmp_path / "two", vocabulary_size=200, workers=2)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    if find_spec("apache_beam"):
        prepare(texts, tmp_path / "beam", vocabulary_size=200, beam="--runner=DirectRunner")
        assert digests(tmp_path / "one") == digests(tmp_path / "beam")
    store = PassageStore.open(tmp_path / "one" / "passages")
    assert store.rows_of("deep/c.pdf") and store.rows_of("g.jsonl#3") and store.rows_of("f.csv#2")


def test_an_id_that_two_files_have_is_named_with_both(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        write_lines(tmp_path / "texts" / f"{name}.jsonl", [{"id": "1", "text": f"The house of {name} stands."}])
    with pytest.raises(UserError, match=r"id '1' was already given on line 1 of a\.jsonl, .* line 1 of b\.jsonl"):
        prepare(tmp_path / "texts", tmp_path / "ready", vocabulary_size=200, workers=1)


def test_a_repeated_command_does_nothing_until_a_file_changes(tmp_path, capsys):
    texts = folder_of_everything(tmp_path / "texts")
    prepare(texts, tmp_path / "data", vocabulary_size=200)
    prepare(texts, tmp_path / "data", vocabulary_size=200)
    assert "nothing to do" in capsys.readouterr().out
    write(texts / "deep" / "a.md", "# Another\n\nAnother text.")
    with pytest.raises(UserError, match="was prepared with other passages"):
        prepare(texts, tmp_path / "data", vocabulary_size=200)


def test_a_pattern_names_files_by_their_path_from_its_fixed_part_on(tmp_path):
    folder_of_everything(tmp_path / "texts")
    assert [article.id for article in records(tmp_path / "texts" / "d*" / "*.md")] == ["deep/a.md"]
    assert [article.id for article in records(f"{tmp_path}/**/[ab].*")] == ["texts/deep/a.md", "texts/deep/b.html"]


def test_a_file_that_several_names_lead_to_is_read_once(tmp_path):
    (tmp_path / "docs" / "en").mkdir(parents=True)
    (tmp_path / "docs" / "en" / "page.html").write_text("<h1>Moss</h1><p>Ada Moss sings.</p>", encoding="utf-8")
    (tmp_path / "docs" / "a.html").symlink_to("en/page.html")
    (tmp_path / "elsewhere").write_text("Ada Moss writes.", encoding="utf-8")
    (tmp_path / "docs" / "b.txt").symlink_to("../elsewhere")  # as caches of models and data sets are laid out
    (tmp_path / "docs" / "c.txt").symlink_to("../elsewhere")
    (tmp_path / "docs" / "README").write_text("Ada Moss reads.", encoding="utf-8")
    (tmp_path / "docs" / "d.txt").symlink_to("README")  # which cannot be read by that name
    (tmp_path / "docs" / "gone.txt").symlink_to("nowhere")
    (tmp_path / "docs" / os.fsdecode(b"latin\xe9.txt")).write_text("Ada Moss wrote.", encoding="utf-8")
    assert open_texts(tmp_path / "docs").identity is not None
    found = [one for file in documents.find(f"{tmp_path}/docs") for one in documents.read(file)]
    assert [one.id for one in found if isinstance(one, Article)] == ["b.txt", "d.txt", "en/page.html"]
    dropped = [(one.reason, one.sample) for one in found if isinstance(one, Skipped)]
    assert dropped == [
        (documents.UNKNOWN, "README"),
        (documents.LINKED, "a.html → en/page.html"),
        (documents.LINKED, "c.txt → b.txt"),
        (documents.DANGLING, "gone.txt"),
        (documents.UNNAMED, "latin\\udce9.txt"),
    ]


def test_a_folder_in_a_bucket_is_read_as_one_here():
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe({"/docs/deep/a.txt": PROSE.encode(), "/docs/.b/c.txt": b"x"})
    assert only("memory://docs") == Article("deep/a.txt", "a", PROSE)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", r"empty: no file in it has a known ending; name a file or a folder with some of \.txt"),
        ("unknown", r"unknown: none of its 1 files \(such as a\.exe\) has a known ending"),
        ("*.rst", r"no file fits .*\*\.rst; name a file or a pattern"),
        (
            "scan.pdf",
            r"scan\.pdf: none of 1 records is an article \(1 PDF files without text\); the first: scan\.pdf: 1 pages",
        ),
        ("absent", r"cannot read .*absent \(No such file"),
    ],
)
def test_a_source_without_a_text_is_refused_in_one_line(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "unknown" / "a.exe", b"MZ")
    write(tmp_path / "scan.pdf", pdf_file([[]]))
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / name, tmp_path / "data", vocabulary_size=100)


def test_records_and_texts_are_prepared_without_the_extra_of_documents(tmp_path):
    write(tmp_path / "texts" / "b.txt", PROSE)
    write_lines(tmp_path / "texts" / "a.jsonl", [{"text": text} for text in TEXTS.values()])
    extra = "backports chardet datasketch docutils lxml mammoth markdown_it mwparserfromhell pyarrow pypdfium2"
    code = (
        f"import sys; sys.modules |= dict.fromkeys({extra.split()}); from realm_jax.cli.prepare import prepare\n"
        f"prepare({str(tmp_path / 'texts')!r}, {str(tmp_path / 'data')!r}, vocabulary_size=100, workers=1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and f"passages: {len(TEXTS) + 1} articles" in done.stdout, done.stderr


def test_a_library_that_is_missing_for_an_ending_ends_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "zstd", None)
    with pytest.raises(UserError, match=r"\.zst needs backports\.zstd; run `pip install"):
        records(write(tmp_path / "a.txt.zst", zstd.compress(PROSE.encode())))


def test_a_missing_library_is_named_with_how_to_install_it(tmp_path, monkeypatch):
    write(tmp_path / "a.pdf", pdf_file([[PROSE]]))
    monkeypatch.setattr(documents, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"\.pdf needs pypdfium2; run `pip install -e '.\[documents\]'`"):
        open_texts(tmp_path)
