"""Dumps of Wikipedia: every page once, damage reported, and the words of articles without their markup."""

import bz2
import gzip
from collections import Counter
from pathlib import Path

import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.corpora import texts, wikipedia
from realm_jax.corpora.articles import Article, Skipped
from realm_jax.corpora.texts import open_texts
from realm_jax.corpora.wikipedia import ELEMENT, SECTION, TEMPLATE, Page, clean_page, dump_files, read_pages
from realm_jax.errors import UserError

HEAD = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/"><siteinfo><sitename>W</sitename></siteinfo>\n'
PAGE = """<page><title>{title}</title><ns>{namespace}</ns><id>{number}</id>{redirect}
<revision><id>7</id><model>wikitext</model><text xml:space="preserve">{text}</text></revision></page>\n"""
TAIL = "</mediawiki>\n"


def page_xml(number: int, text: str = "Text.", namespace: int = 0, redirect: str = "") -> str:
    return PAGE.format(title=f"Page {number}", number=number, text=text, namespace=namespace, redirect=redirect)


def write_dump(path: Path, *pages: str, pack=bytes) -> str:
    path.write_bytes(pack("".join((HEAD, *pages, TAIL)).encode()))
    return str(path)


def page(text: str, title: str = "Kakadu", **fields) -> Page:
    given = {"id": "1", "namespace": "0", "is_redirect": False, "model": "wikitext", "where": "d.xml, page 1"} | fields
    return Page(title=title, wikitext=text, **given)


def text_of(wikitext: str) -> str:
    article = clean_page(page(wikitext), Counter())
    assert isinstance(article, Article), article
    return article.text


# --- Dumps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstd.compress)]
)
def test_read_pages_gives_every_page_of_a_dump_once(tmp_path, suffix, pack):
    redirect = '<redirect title="A &amp; B" />'
    pages = [page_xml(12, "''Kakadu'' &amp;nbsp; é"), page_xml(13, namespace=14, redirect=redirect)]
    path = write_dump(tmp_path / f"wiki.xml{suffix}", *pages, *map(page_xml, range(50)), pack=pack)
    first, second, *others = read_pages(path)
    assert first == Page("12", "Page 12", "0", False, "wikitext", "''Kakadu'' &nbsp; é", f"{path}, page 1")
    assert second == Page("13", "Page 13", "14", True, "wikitext", "Text.", f"{path}, page 2")
    assert [int(other.id) for other in others] == list(range(50))


def test_read_pages_takes_the_last_revision(tmp_path):
    new = "<revision><id>8</id><text>new</text></revision></page>"
    (found,) = read_pages(write_dump(tmp_path / "w.xml", page_xml(1, "old").replace("</page>", new)))
    assert found.wikitext == "new" and found.model == "wikitext"


@pytest.mark.parametrize("pack", [bytes, bz2.compress, gzip.compress])
def test_read_pages_reports_where_a_damaged_dump_ends(tmp_path, pack):
    suffix = {bytes: "", bz2.compress: ".bz2", gzip.compress: ".gz"}[pack]
    path = Path(write_dump(tmp_path / f"w.xml{suffix}", *map(page_xml, range(2000)), pack=pack))
    path.write_bytes(path.read_bytes()[:-200])
    *pages, damage = read_pages(str(path))
    assert damage.is_damage and damage.reason == wikipedia.UNREADABLE_DUMP
    assert f"after page {len(pages):,}" in damage.where
    assert [int(found.id) for found in pages] == list(range(len(pages)))


@pytest.mark.parametrize("encoding", ["foo", "utf-7"])
def test_read_pages_reports_an_encoding_that_nobody_knows(tmp_path, encoding):
    (tmp_path / "w.xml").write_text(f'<?xml version="1.0" encoding="{encoding}"?>{HEAD}{page_xml(1)}{TAIL}')
    (damage,) = read_pages(str(tmp_path / "w.xml"))
    assert damage.is_damage and damage.reason == wikipedia.UNREADABLE_DUMP


def test_a_missing_parser_is_named_with_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="a dump of Wikipedia needs mwparserfromhell; run `pip install"):
        open_texts(write_dump(tmp_path / "w.xml", page_xml(1)))


def test_read_pages_reports_a_page_without_its_fields_and_goes_on(tmp_path):
    broken = page_xml(1).replace("<id>1</id>", "")
    found = list(read_pages(write_dump(tmp_path / "w.xml", broken, page_xml(2))))
    assert [type(outcome) for outcome in found] == [Skipped, Page]


def test_dump_files_rejects_a_folder_with_the_same_dump_twice(tmp_path):
    for name in ("wiki-pages-articles.xml.bz2", "wiki-pages-articles1.xml.bz2"):
        write_dump(tmp_path / name, page_xml(1), pack=bz2.compress)
    with pytest.raises(UserError, match="hold the same pages; name one of them"):
        dump_files(str(tmp_path))
    assert len(dump_files(f"{tmp_path}/*articles1*")) == 1


def test_a_folder_with_a_dump_is_read_as_a_dump(tmp_path):
    (tmp_path / "page.xml").write_text("<html/>")
    assert not wikipedia.is_dump_folder(str(tmp_path))
    write_dump(tmp_path / "wiki.xml.gz", page_xml(1), pack=gzip.compress)
    (tmp_path / "wiki-rss.xml").write_text("<mediawiki>")
    source = open_texts(tmp_path)
    assert [part.rpartition("/")[2] for part in source.parts] == ["page.xml", "wiki.xml.gz"]


# --- Which pages are articles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dropped", "reason"),
    [
        (page("x", "Talk:Kakadu", namespace="1"), "not in the namespace of articles"),
        (page("x", is_redirect=True), "redirect"),
        (page(" #redirect: [[Kakadu National Park]]"), "redirect"),
        (page('{"labels": {}}', "Q42", model="wikibase-item"), "not wikitext"),
        (page("x", "List of parks"), "list, index or outline"),
        (page("x", "Kakadu (disambiguation)"), "disambiguation page"),
        (page("'''Kakadu''' may be:\n* a park\n{{disambig}}"), "disambiguation page"),
        (page("x {{ Human name disambiguation }}"), "disambiguation page"),
        (page("x {{hndis|Kakadu}}"), "disambiguation page"),
        (page("x __DISAMBIG__"), "disambiguation page"),
        (page(""), "no text"),
        (page("{{Infobox park|name=Kakadu}}\n== References ==\n{{reflist}}"), "no text"),
        (page("== Only ==\n=== Headings ==="), "no text"),
    ],
)
def test_clean_page_gives_the_reason_why_a_page_is_no_article(dropped, reason):
    assert clean_page(dropped, Counter()) == Skipped(reason, dropped.title)


@pytest.mark.parametrize(
    "kept",
    [
        page("x", "Listed building"),
        page("x {{disambiguation needed|date=May 2014}}"),
        page("x <!-- {{disambig}} -->"),
        page("x {{about|the park|other uses|Kakadu (disambiguation)}}"),
        page("#redirects are pages"),
    ],
)
def test_clean_page_keeps_pages_that_only_look_like_others(kept):
    assert isinstance(clean_page(kept, Counter()), Article)


def test_sections_of_references_are_left_out_with_those_below_them_and_counted():
    text = """Lead.
== History ==
Old.
== See also ==
* [[Uluru]]
=== Other parks ===
* [[Banff]]
== Geology ==
=== Maps ===
{|
| x
|}
=== ''Rocks'' {{anchor|b}} ===
Rock.
==References==
{{reflist}}
== External links ==<!-- few -->
* [http://example.org Site]"""
    notes: Counter[tuple[str, str]] = Counter()
    article = clean_page(page(text), notes)
    assert isinstance(article, Article)
    assert article.text == "Lead.\n\nHistory\n\nOld.\n\nGeology\n\nRocks\n\nRock."
    assert +notes == {
        (SECTION, "see also"): 1,
        (SECTION, "references"): 1,
        (SECTION, "external links"): 1,
        (ELEMENT, "table"): 1,
        (TEMPLATE, "anchor"): 1,
    }


# --- Wikitext ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("One\nparagraph.\n\n\nParks:\n* Kakadu,\n** north\n# ''Uluru''\nNext.", None),
        ("A<br/>b.<p>C.</p><ul><li>One</li><li>Two</li></ul>", "A b.\n\nC.\n\nOne\nTwo"),
        ("A [[park]] of [[rock (geology)|rock]]s.", "A park of rocks."),
        ("[[Mercury (planet)|]] and [[:Category:Parks]].", "Mercury and Category:Parks."),
        ("A [[File:a.jpg|thumb|A [[bird]] of ''Kakadu'']] park.[[Category:Parks]] [[de:Kakadu]]", "A park."),
        ("[http://example.org A site][http://example.org] and [//example.org b].", "A site and b."),
        ("'''''Both''''' '''bold''' ''italic'' d'oh", "Both bold italic d'oh"),
        ("A<ref>b</ref> c<ref name=d />, e<REF NAME='f'>g</Ref >.", "A c, e."),
        ("A <!-- b\n\n== c == --> d\n<!-- e -->\nf", "A d f"),
        ("A<gallery>\nFile:b.jpg|c\n</gallery> d <source lang=c>e</source>", "A d"),
        ("x<sub>1</sub> 10<sup>6</sup> 10<sup>−3</sup> 5<sup>th</sup>", "x1 10^6 10^−3 5th"),
        ("a&nbsp;b &ndash; c AT&T", "a b – c AT&T"),
        ("A\n{|\n|-\n| b || {{c}}\n{|\n| d\n|}\n|}\ne", "A\n\ne"),
        ("A {{Infobox park\n| name = b {{c|d}}\n| map = [[File:x|y]]\n}} park.", "A park."),
        ("Kakadu ({{IPAc-en|k|a}}) is, {{cn}} or ({{IPA|k}}; born 1950) so{{cn}}.", "Kakadu is, or (born 1950) so."),
        ("call main() of {{x}} (see map{{cn}})", "call main() of (see map)"),
        ("{{convert|1300|mi|km}}, {{cvt|10|to|20|km|mi}}", "1300 mi, 10 to 20 km"),
        ("{{lang|grc|ἀναρχία}} {{lang-de|Park}} {{Nowrap|a {{lang|fr|b}}}}", "ἀναρχία Park a b"),
        ("{{Nihongo|'''Aikido'''|合気道|Aikidō|lead=yes}}", "Aikido (合気道, Aikidō)"),
        ("{{as of|2014|3}} {{quote|A park.|Ann}} {{quote|text=Rocks.}}", "as of 2014-3 A park. Rocks."),
        ("{{hlist|a|b|c}} {{frac|3|2}} {{circa|1400}}", "a, b, c 3/2 c. 1400"),
    ],
)
def test_markup_becomes_words(markup, text):
    assert text_of(markup) == (text or "One paragraph.\n\nParks:\nKakadu,\nnorth\nUluru\n\nNext.")


def test_templates_that_are_left_out_are_counted_by_name():
    notes: Counter[tuple[str, str]] = Counter()
    clean_page(page("A {{Some_thing |x}} b {{some thing}} {{other}}."), notes)
    assert +notes == {(TEMPLATE, "some_thing"): 2, (TEMPLATE, "other"): 1}


@pytest.mark.parametrize("opener", ["{{a|", "[[a|", "{{a|[[b|", "{|\n| a\n", "<ref>", "<div>", "[http://x ", "{{{"])
@pytest.mark.parametrize("times", [1, 1000])
def test_markup_that_nothing_closes_does_not_reach_the_next_section(opener, times):
    text = text_of(f"Lead.\n== One ==\nFirst. {opener * times}\n== Two ==\nSecond.")
    assert text.startswith("Lead.") and text.endswith("Two\n\nSecond.")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*"{}[]|='<>*#:\n ", "{{", "}}", "[[", "]]", "{|", "|}", "''", "==", "<ref>", "word"])))
def test_no_markup_raises(pieces):
    clean_page(page("".join(pieces)), Counter())


def test_the_words_of_a_real_piece_of_a_dump(shared_data):
    pages = [found for path in dump_files(str(shared_data / "wiki_dump")) for found in read_pages(path)]
    outcomes = [clean_page(found, Counter()) for found in pages if isinstance(found, Page)]
    reasons = Counter(found.reason if isinstance(found, Skipped) else "article" for found in outcomes)
    assert reasons == {
        "article": 96,
        "redirect": 99,
        "disambiguation page": 8,
        "list, index or outline": 2,
        "not in the namespace of articles": 1,
    }
    texts = {found.title: found.text for found in outcomes if isinstance(found, Article)}
    assert texts["Aikido"].startswith("Aikido (合気道, Aikidō) is a modern Japanese martial art developed by Morihei")
    for title, text in texts.items():
        for mark in ("{{", "}}", "[[", "]]", "''", "<ref", "<!--", "  "):
            assert mark not in text, (title, mark)
