"""Dumps of MediaWiki: every page once, whatever the packing and the parts, and every damaged place told."""

import bz2
import dataclasses
import gzip
import io
import pickle
from pathlib import Path

import pytest
from capitals import digests
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.corpora import articles, dumps, ranges, wikipedia
from realm_jax.corpora.articles import ArticleSource, Processes
from realm_jax.corpora.dumps import Page, Part, parts, read_pages
from realm_jax.corpora.outcomes import CorruptRecord
from realm_jax.data import files
from realm_jax.errors import UserError

HEAD = b"""<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" version="0.10" xml:lang="en">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <namespaces><namespace key="0" case="first-letter" /></namespaces>
  </siteinfo>
"""
TAIL = b"</mediawiki>\n"
PAGE = """  <page>
    <title>{title}</title>
    <ns>{namespace}</ns>
    <id>{number}</id>{redirect}
    <revision>
      <id>7</id>
      <model>wikitext</model>
      <text xml:space="preserve">{text}</text>
    </revision>
  </page>
"""


def page(number: int, text: str = "", namespace: int = 0, redirect: str = "") -> bytes:
    made = PAGE.format(
        title=f"Page {number}", namespace=namespace, number=number, redirect=redirect, text=text or f"Text {number}."
    )
    return made.encode()


def pages(*numbers: int) -> bytes:
    return b"".join(map(page, numbers))


def read(path: Path, content: bytes, part_bytes: int = dumps.PART_BYTES) -> list[Page | CorruptRecord]:
    path.write_bytes(content)
    return [found for part in parts(path, part_bytes) for found in read_pages(part)]


def numbers(found: list[Page | CorruptRecord]) -> list[int]:
    return [int(one.id) for one in found if isinstance(one, Page)]


def damage(found: list[Page | CorruptRecord]) -> list[str]:
    return [one.reason for one in found if isinstance(one, CorruptRecord)]


def multistream(*streams: bytes) -> bytes:
    return b"".join(map(bz2.compress, streams))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "wiki-pages-articles.xml"


def test_a_page_is_read_with_all_its_fields(path):
    text = "''Kakadu'' &amp;nbsp; &lt;ref&gt;é&lt;/ref&gt;\n"
    redirect = '\n    <redirect title="A &amp; B" />'
    found = read(path, HEAD + page(12, text) + page(13, namespace=14, redirect=redirect) + TAIL)
    where = str(path)
    assert found == [
        Page("12", "Page 12", 0, None, "wikitext", "''Kakadu'' &nbsp; <ref>é</ref>\n", f"{where}, page 1"),
        Page("13", "Page 13", 14, "A & B", "wikitext", "Text 13.", f"{where}, page 2"),
    ]


def test_of_several_revisions_the_last_one_counts(path):
    old = page(1, "old").replace(b"  </page>\n", b"")
    new = b"<revision><id>8</id><text>new</text></revision></page>"
    (found,) = read(path, HEAD + old + new + TAIL)
    assert isinstance(found, Page) and found.wikitext == "new" and found.model == "wikitext"


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress], ids=["plain", "gz", "bz2"])
def test_every_packing_gives_the_same_pages(path, pack):
    found = read(path, pack(HEAD + pages(*range(50)) + TAIL))
    assert numbers(found) == list(range(50)) and not damage(found)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    part_bytes=st.integers(30, 3000),
    packed=st.booleans(),
    aligned=st.booleans(),
)
def test_parts_have_every_page_once(tmp_path_factory, sizes, part_bytes, packed, aligned):
    """Streams may end between pages, as Wikimedia's do, or anywhere, as pbzip2's do."""
    whole = [page(number, "x" * size) for number, size in enumerate(sizes)]
    blocks = [HEAD, *whole, TAIL]
    if not aligned:
        joined = b"".join(blocks)
        blocks = [joined[start : start + 171] for start in range(0, len(joined), 171)]
    found = read(
        tmp_path_factory.mktemp("dump") / "d.xml", multistream(*blocks) if packed else b"".join(blocks), part_bytes
    )
    assert numbers(found) == list(range(len(sizes))) and not damage(found)


def test_parts_are_few_bytes_to_send_and_cover_the_file(path):
    path.write_bytes(multistream(HEAD, *(pages(number) for number in range(100)), TAIL))
    found = parts(path, 2000)
    size = path.stat().st_size
    assert len(found) > 5 and found[0].start == 0 and found[-1].stop is None
    assert [part.stop for part in found[:-1]] == [part.start for part in found[1:]]
    assert all(len(pickle.dumps(part)) < 300 for part in found)
    assert 1000 <= size - found[-1].start <= 3000
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_single_stream_belongs_to_the_first_part(path):
    path.write_bytes(bz2.compress(HEAD + pages(*range(300)) + TAIL))
    first, *others = [list(read_pages(part)) for part in parts(path, 500)]
    assert numbers(first) == list(range(300)) and others and not any(others)


def test_empty_streams_are_no_damage(path):
    found = read(path, multistream(HEAD, pages(1), b"", b"", pages(2), TAIL), 200)
    assert numbers(found) == [1, 2] and not damage(found)


def test_a_folder_gives_its_dump_files_in_order(tmp_path):
    for name in ("b.xml.bz2", "a.xml-p1p9.gz", "a-index.txt.bz2", "a.xml.bz2-rss.xml", "notes.txt", ".b.xml.partial"):
        (tmp_path / name).write_bytes(b"x")
    assert [Path(part.path).name for part in parts(tmp_path)] == ["a.xml-p1p9.gz", "b.xml.bz2"]
    assert [Path(part.path).name for part in parts(f"{tmp_path}/b*.bz2")] == ["b.xml.bz2"]


def test_a_bucket_is_read_like_a_folder():
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe("/dumps/d.xml.bz2", multistream(HEAD + pages(1, 2), pages(3), TAIL))
    found = parts("memory://dumps", 150)
    assert len(found) > 1 and found[0].path == "memory:///dumps/d.xml.bz2"
    assert numbers([one for part in found for one in read_pages(part)]) == [1, 2, 3]


@pytest.mark.parametrize(
    "other", ["wiki-1-pages-articles-multistream.xml.bz2", "wiki-1-pages-articles1.xml-p1p41242.bz2"]
)
def test_a_folder_with_the_same_dump_twice_is_refused(tmp_path, other):
    for name in ("wiki-1-pages-articles.xml.bz2", "wiki-2-pages-articles.xml.bz2", other):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"wiki-1-pages-articles.* and wiki-1-pages-articles.* hold the same pages"):
        parts(tmp_path)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.xml: no dump files"):
        parts(tmp_path / "none.xml")
    with pytest.raises(UserError, match="no dump files"):
        parts(tmp_path)
    with pytest.raises(UserError, match=r"cannot read .*none\.xml \(No such file"):
        list(read_pages(Part(str(tmp_path / "none.xml"))))
    with pytest.raises(UserError, match="install what opens such paths"):
        parts("nowhere://bucket/d.xml")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (page(2).replace(b"Text 2.", b"a \xff b"), dumps.NOT_UTF8),
        (page(2).replace(b"Text 2.", b"a < b"), dumps.BROKEN_XML),
        (page(2).replace(b"Text 2.", b"a \x00 b"), dumps.BROKEN_XML),
        (page(2).replace(b"Text 2.", b"&lol9;"), dumps.BROKEN_XML),
        (page(2).replace(b"</text>", b""), dumps.BROKEN_XML),
        (page(2).replace(b"    <revision>", b"\r\r\r<revision><"), dumps.BROKEN_XML),
        (page(2).replace(b"</page>", b"</pa"), dumps.NO_END),
        (page(2).replace(b"<page>", b"<pa"), dumps.STRAY),
        (page(2).replace(b"<title>Page 2</title>", b""), dumps.NO_FIELD),
        (page(2).replace(b"<ns>0</ns>", b"<ns>" + b"9" * 5000 + b"</ns>"), dumps.NO_FIELD),
        (page(2).replace(b"<id>2</id>", b"<id> </id>"), dumps.NO_FIELD),
        (b"<page><title>A</title><ns>0</ns><id>2</id></page>", dumps.NO_FIELD),
        (b"<page>" + b"<a>" * 300_000 + b"</a>" * 300_000 + b"</page>", dumps.NO_FIELD),
    ],
)
def test_a_broken_page_is_told_and_the_others_are_read(path, broken, reason):
    found = read(path, HEAD + page(1) + broken + pages(3, 4) + TAIL)
    assert numbers(found) == [1, 3, 4] and damage(found) == [reason]
    told = next(one for one in found if isinstance(one, CorruptRecord))
    assert told.where == f"{path}, page 2" and "\n" not in told.sample and len(told.sample) <= dumps.SAMPLE


def test_a_page_without_bounds_is_passed_over(path, monkeypatch):
    monkeypatch.setattr(dumps, "LARGEST_PAGE", 1_000_000)
    endless = page(2, "x" * 3_000_000)
    found = read(path, HEAD + page(1) + endless + pages(3) + TAIL)
    assert numbers(found) == [1, 3] and damage(found) == [dumps.TOO_LARGE]
    found = read(path, HEAD + page(1) + b"x" * 3_000_000 + pages(3) + TAIL)
    assert numbers(found) == [1, 3] and damage(found) == [dumps.STRAY]


def test_entities_of_a_document_type_are_never_expanded(path):
    bomb = b'<!DOCTYPE m [<!ENTITY a "aaaaaaaaaa">' + b"".join(
        b'<!ENTITY %c "&%c;&%c;&%c;&%c;&%c;&%c;&%c;&%c;">' % ((name, *[name - 1] * 8)) for name in range(98, 122)
    )
    found = read(path, bomb + b"]>" + HEAD + page(1, "&y;") + pages(2) + TAIL)
    assert numbers(found) == [2] and damage(found) == [dumps.STRAY, dumps.BROKEN_XML]


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b"\x00\xff" * 9000, b"<feed><doc>x</doc></feed>", b"BZ", b"7z\xbc\xaf"]
)
def test_a_file_that_is_no_dump_is_told_once(path, content):
    assert damage(read(path, content)) == [dumps.NO_BEGINNING]


def test_a_dump_without_a_beginning_is_told_and_read(path):
    found = read(path, pages(1, 2) + TAIL)
    assert numbers(found) == [1, 2] and damage(found) == [dumps.NO_BEGINNING]


@pytest.mark.parametrize("part_bytes", [400, 1 << 20])
def test_a_file_that_ends_too_early_is_told(path, part_bytes):
    whole = HEAD + pages(1, 2, 3) + TAIL
    for cut, left in ((len(TAIL), [1, 2, 3]), (len(TAIL) + 40, [1, 2])):
        found = read(path, whole[:-cut], part_bytes)
        assert numbers(found) == left and damage(found) == [ranges.CUT_OFF]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress], ids=["gz", "bz2"])
def test_a_packed_file_that_ends_too_early_is_told(path, pack):
    found = read(path, pack(HEAD + pages(*range(3000)) + TAIL)[:-30])
    assert damage(found) == [ranges.CUT_OFF]
    assert numbers(found) == list(range(len(numbers(found))))


def test_damaged_gzip_ends_its_file(path):
    packed = bytearray(gzip.compress(HEAD + b"".join(page(n, str(n**50)) for n in range(3000)) + TAIL))
    packed[len(packed) // 2] ^= 0xFF
    found = read(path, bytes(packed))
    assert damage(found) == [ranges.BAD_PACKING]
    assert numbers(found) == list(range(len(numbers(found))))


@pytest.mark.parametrize("part_bytes", [500, 1 << 20])
def test_behind_a_damaged_stream_the_next_one_is_read(path, part_bytes):
    streams = [bz2.compress(block) for block in (HEAD, *(pages(n, n + 1) for n in range(0, 20, 2)), TAIL)]
    hurt = bytearray(streams[4])
    hurt[len(hurt) // 2] ^= 0x10
    found = read(path, b"".join([*streams[:4], bytes(hurt), *streams[5:]]), part_bytes)
    assert numbers(found) == [n for n in range(20) if n not in (6, 7)]
    assert damage(found) == [ranges.BAD_PACKING]
    place = sum(map(len, streams[:4]))
    told = next(one for one in found if isinstance(one, CorruptRecord))
    assert told.where == f"{path}, stream at byte {place:,}"


def test_a_stream_without_a_header_is_told(path):
    streams = [bz2.compress(block) for block in (HEAD, pages(1), pages(2), TAIL)]
    found = read(path, streams[0] + streams[1] + b"x" + streams[2][1:] + streams[3])
    assert numbers(found) == [1] and damage(found) == [ranges.BAD_PACKING]


def test_a_page_that_runs_into_a_damaged_stream_of_the_next_part_is_told(path):
    whole = HEAD + pages(1, 2) + TAIL
    cut = whole.index(b"Text 2")
    first, second = bz2.compress(whole[:cut]), bytearray(bz2.compress(whole[cut:]))
    second[30] ^= 0xFF
    path.write_bytes(first + second)
    found = [list(read_pages(part)) for part in (Part(str(path), 0, len(first)), Part(str(path), len(first)))]
    assert [numbers(one) for one in found] == [[1], []]
    assert [damage(one) for one in found] == [[ranges.CUT_OFF], [ranges.BAD_PACKING]]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_change_of_a_byte_is_told_or_harmless(tmp_path_factory, data):
    """Whatever byte is wrong: no traceback, and fewer pages only beside damage that is told."""
    pack = data.draw(st.sampled_from([bytes, gzip.compress, lambda whole: multistream(HEAD, whole[len(HEAD) :])]))
    content = bytearray(pack(HEAD + pages(1, 2, 3) + TAIL))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    found = read(tmp_path_factory.mktemp("dump") / "d.xml", bytes(content), data.draw(st.integers(50, 5000)))
    assert len(numbers(found)) == 3 or damage(found)


def test_failing_storage_is_no_damage():
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(UserError, match=r"cannot read d\.xml \(Input/output error\)"):
        files._RawFile(Failing(), "d.xml").read(1)


def test_the_real_piece_is_read_whole_in_any_parts(shared_data):
    folder = shared_data / "wiki_dump"
    whole = [one for part in parts(folder) for one in read_pages(part)]
    assert len(whole) == 206 and not damage(whole)
    assert sum(one.redirect is not None for one in whole if isinstance(one, Page)) == 100
    again = [one for part in parts(folder, 200_000) for one in read_pages(part)]
    assert [one.id for one in again if isinstance(one, Page)] == [one.id for one in whole if isinstance(one, Page)]


@pytest.mark.parametrize("small_parts", [False, True])
def test_processes_that_take_whole_parts_write_the_same_shards(path, tmp_path, monkeypatch, small_parts):
    """And go on where they were cut off: the third part of the first attempt fails."""
    monkeypatch.setattr(articles, "SAVED_BYTES", 1)
    text = "A village in the north. " * 40
    path.write_bytes(multistream(HEAD, *(page(number, f"{text} {number}") for number in range(1, 41)), TAIL))
    texts = ArticleSource("dump", tuple(parts(path, 500)), read_pages, wikipedia.article, [], 3, small_parts)
    assert len(texts.parts) > 8
    counts = Processes(1).extract(texts, str(tmp_path / "one"), 3, False, print)
    assert counts.articles == 40
    broken = dataclasses.replace(texts, parts=(*texts.parts[:2], None, *texts.parts[3:]))
    with pytest.raises(AttributeError):
        Processes(2).extract(broken, str(tmp_path / "two"), 3, False, print)
    assert (tmp_path / "two" / articles.PROGRESS).exists() and not (tmp_path / "two" / articles.COUNTS).exists()
    assert Processes(2).extract(texts, str(tmp_path / "two"), 3, False, print) == counts
    assert digests(tmp_path / "two") == digests(tmp_path / "one")
