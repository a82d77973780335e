"""Pages of Wikipedia to articles: what is left out, what templates say, and markup that is wrong."""

import pickle
import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.corpora import wiki_templates, wikipedia, wikitext
from realm_jax.corpora.dumps import Page, parts, read_pages
from realm_jax.corpora.outcomes import Article, FilteredRecord
from realm_jax.corpora.wikitext import Note


def page(text: str, title: str = "Kakadu", **fields) -> Page:
    given = {"id": "1", "namespace": 0, "redirect": None, "model": "wikitext", "where": "d.xml, page 1"} | fields
    return Page(title=title, wikitext=text, **given)


def text_of(wikitext: str, title: str = "Kakadu") -> str:
    found = wikipedia.article(page(wikitext, title))
    assert isinstance(found, Article), found
    return found.text


def notes_of(wikitext: str) -> Counter[Note]:
    notes: Counter[Note] = Counter()
    wikipedia.article(page(wikitext), notes)
    return notes


# --- Which pages are articles -----------------------------------------------------------------------------------------


def test_an_article_has_the_id_the_title_and_the_text_of_its_page():
    assert wikipedia.article(page("'''Kakadu''' is a [[park]].", id="42")) == Article(
        "42", "Kakadu", "Kakadu is a park."
    )


@pytest.mark.parametrize(
    ("dropped", "reason"),
    [
        (page("x", "Talk:Kakadu", namespace=1), "not in the namespace of articles"),
        (page("x", redirect="Kakadu National Park"), "redirect"),
        (page("#REDIRECT [[Kakadu National Park]]"), "redirect"),
        (page(" #redirect: [[Kakadu National Park]]"), "redirect"),
        (page('{"labels": {}}', "Q42", model="wikibase-item"), "not wikitext"),
        (page("x", "List of parks"), "list, index or outline"),
        (page("x", "Index of parks"), "list, index or outline"),
        (page("x", "Outline of parks"), "list, index or outline"),
        (page("x", "Kakadu (disambiguation)"), "disambiguation page"),
        (page("'''Kakadu''' may be:\n* a park\n{{disambig}}"), "disambiguation page"),
        (page("x {{Disambiguation|geo}}"), "disambiguation page"),
        (page("x {{ Human name disambiguation }}"), "disambiguation page"),
        (page("x {{hndis|Kakadu}}"), "disambiguation page"),
        (page("x __DISAMBIG__"), "disambiguation page"),
        (page(""), "no text"),
        (page("{{Infobox park|name=Kakadu}}\n== References ==\n{{reflist}}"), "no text"),
        (page("== Only ==\n=== Headings ==="), "no text"),
    ],
)
def test_a_page_that_is_no_article_is_dropped_with_its_reason(dropped, reason):
    assert wikipedia.article(dropped) == FilteredRecord(reason, dropped.title)


@pytest.mark.parametrize(
    "kept",
    [
        page("x", "Listed building"),
        page("x", "list of parks"),
        page("x [[Kakadu (disambiguation)]]"),
        page("x {{disambiguation needed|date=May 2014}}"),
        page("x <!-- {{disambig}} -->"),
        page("x {{about|the park|other uses|Kakadu (disambiguation)}}"),
        page("x {{hndisx}}"),
        page("#redirects are pages"),
    ],
)
def test_what_only_looks_like_one_is_kept(kept):
    assert isinstance(wikipedia.article(kept), Article)


# --- Sections, paragraphs and lists -----------------------------------------------------------------------------------


def test_sections_of_references_and_links_are_left_out_with_those_under_them():
    text = """Lead.
== History ==
Old.
== See also ==
* [[Uluru]]
=== Other parks ===
* [[Banff]]
== Geology ==
Rock.
==References==
{{reflist}}
== External links ==<!-- few -->
* [http://example.org Site]"""
    assert text_of(text) == "Lead.\n\nHistory\n\nOld.\n\nGeology\n\nRock."
    assert {note.name: count for note, count in notes_of(text).items() if note.kind == wikipedia.SECTION} == {
        "see also": 1,
        "references": 1,
        "external links": 1,
    }


def test_a_heading_is_a_paragraph_if_text_stands_under_it():
    text = (
        "== Nature ==\n=== ''Birds'' {{anchor|b}} ===\nMany.\n=== Maps ===\n{|\n| x\n|}\n== None ==\n== People ==\nFew."
    )
    assert text_of(text) == "Nature\n\nBirds\n\nMany.\n\nPeople\n\nFew."


@pytest.mark.parametrize(
    ("line", "heading"), [("= One =", "One"), ("==Two==", "Two"), ("== a = b == ", "a = b"), ("=== Odd ==", "= Odd")]
)
def test_headings_are_found_as_mediawiki_finds_them(line, heading):
    assert text_of(f"{line}\nText.") == f"{heading}\n\nText."


@pytest.mark.parametrize("line", ["=", "= not closed", "==x== y"])
def test_other_lines_with_equals_signs_are_text(line):
    assert text_of(f"{line}\nText.") == f"{line} Text."


def test_lines_of_a_paragraph_are_joined_and_items_are_lines():
    text = (
        "One\nparagraph.\n\n\nParks:\n* Kakadu,\n** in the north<ref>x</ref>\n# ''Uluru''\n;Term\n:its meaning\nNext."
    )
    assert text_of(text) == ("One paragraph.\n\nParks:\nKakadu,\nin the north\nUluru\nTerm\nits meaning\n\nNext.")


def test_html_lists_and_paragraphs_are_lines_and_paragraphs():
    text = "A<br/>b.<p>C.</p><ul><li>One</li><li>Two</li></ul><blockquote>Said.</blockquote>D<hr>E"
    assert text_of(text) == "A b.\n\nC.\n\nOne\nTwo\n\nSaid.\n\nD\n\nE"


def test_lines_of_a_poem_are_lines():
    assert text_of("Sing:\n<poem>\nO park,\nmy park\n</poem>\nEnd.") == "Sing:\n\nO park,\nmy park\n\nEnd."


# --- Markup -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        # links
        ("A [[park]] of [[rock (geology)|rock]]s.", "A park of rocks."),
        ("[[Mercury (planet)|]] and [[:Category:Parks]], [[:de:Park|Park]].", "Mercury and Category:Parks, Park."),
        ("A [[File:a.jpg|thumb|A [[bird]] of ''Kakadu'']] park.", "A park."),
        ("A park.[[Category:Parks]] [[de:Kakadu]][[zh-min-nan:Kakadu]] [[Image:b.png]]", "A park."),
        ("[http://example.org A site][http://example.org] and [//example.org b].", "A site and b."),
        ("[mailto:a@b.org Write] to https://example.org/a_b.", "Write to https://example.org/a_b."),
        ("[[a|b [c] d]] [sic] [1]", "b [c] d [sic] [1]"),
        # type
        ("'''''Both''''' '''bold''' ''italic'' '''''a''' b'' d'oh", "Both bold italic a b d'oh"),
        ("The 1960s' ''Time'''s cover", "The 1960s' Time's cover"),
        ("''L'''''Été'' 'x'", "LÉté 'x'"),
        ("θ''<sub>''i''</sub>", "θi"),
        # elements
        ("A<ref>b</ref> c<ref name=d />, e<REF NAME='f'>g</Ref >.", "A c, e."),
        ("A <!-- b\n\n== c == --> d", "A d"),
        ("A\n<!-- b -->\nc", "A c"),
        ("A <nowiki>[[b]] ''c'' {{d}} <ref></nowiki> <nowiki/>e", "A [[b]] ''c'' {{d}} <ref> e"),
        ("A<gallery>\nFile:b.jpg|c\n</gallery> d <source lang=c>e</source>", "A d"),
        ("x<sub>1</sub> 10<sup>6</sup> 10<sup>−3</sup> 5<sup>th</sup> m<sup>2</sup>", "x1 10^6 10^−3 5th m2"),
        ("<small>a</small> <span style='x'>b</span> <code>int c</code> x < y > z <y>", "a b int c x < y > z <y>"),
        ("<math>E = mc^{2}</math>, <math>\\alpha \\le \\sin x_{10}</math>", "E = mc^2, α ≤ sin x_10"),
        ("so <math>\\frac{a}{b}</math>, or <math>\\begin{matrix}c\\end{matrix}</math>.", "so, or."),
        ("<onlyinclude>a</onlyinclude> <includeonly>b</includeonly> __NOTOC__ c", "a c"),
        # entities
        ("a&nbsp;b &ndash; c &lt;ref&gt; &#91;&#x5B;d&amp;amp; AT&T &copy", "a b – c <ref> [[d&amp; AT&T &copy"),
        ("a&shy;b\u200bc\xa0 d&#10;e &#xD800; &#0;f", "abc d e \ufffd \ufffdf"),
        # tables
        ("A\n{|\n|-\n| b || {{c}}\n{|\n| d\n|}\n|}\ne", "A\n\ne"),
        ("A\n:{| class=x\n! b\n|}\nc", "A\n\nc"),
        ("A <table><tr><td>b<table></table></td></tr></table> c", "A\n\nc"),
        ("{{quote|\n{|\n| a\n|}\nb\n}}", "b"),
        # templates
        ("A {{Infobox park\n| name = b {{c|d}}\n| map = [[File:x|y]]\n}} park.", "A park."),
        ("{{{1|a}}} {{{b}}}{{{{c}}}} d", "a d"),
        ("{{ Nowrap | a b }} {{nowrap|1=c=d}} {{nowrap|{{lang|fr|e ''f''}}}}", "a b c=d e f"),
        ("{{PAGENAME}} {{Template:nowrap|a}} {{formatnum:3003}} {{DEFAULTSORT:b}}{{lc:ABC}}", "Kakadu a 3,003 abc"),
    ],
)
def test_markup_becomes_words(markup, text):
    assert text_of(markup) == text


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("Kakadu ({{IPAc-en|k|a}}) is", "Kakadu is"),
        ("Kakadu ({{IPA|k}}; {{lang-fr|caca}}) is", "Kakadu (French: caca) is"),
        ("Kakadu ({{lang-fr|caca}}; {{IPA|k}}, {{respell|k}}; born 1950) is", "Kakadu (French: caca; born 1950) is"),
        ("Kakadu ({{IPA|k}}, {{respell|k}}) is", "Kakadu is"),
        ("Kakadu {{cn}}, a park {{cn}}. It {{cn}} is{{cn}}; so", "Kakadu, a park. It is; so"),
        ("one, {{x}}, two; {{x}}; three, {{x}} four: {{x}}", "one, two; three, four:"),
        ("worth $5 (${{Inflation|US|5|1929}} in {{CURRENTYEAR}} dollars) then", "worth $5 then"),
        ("call main() or f(;) of .NET {{x}} .NET", "call main() or f(;) of .NET .NET"),
        ("{{x}}, which {{x}}", "which"),
        ("the letter {{angbr|{{IPA|a}}}} [{{x}}] is", "the letter is"),
        ("A park (e.g.<ref>x</ref>), big (i.e., {{x}}; {{x}}) and (See {{x}}) old.", "A park, big and old."),
        ("A park (e.g. big{{cn}}) or (see map{{cn}}).", "A park (e.g. big) or (see map)."),
        ("{{x}}. First of a series.", "First of a series."),
        ("{{x}} | First", "First"),
        ("A:\n* {{x}}.\n* {{x}}, {{x}}. b", "A:\nb"),
        ("{{x}}.NET, or\n\n{{x}}... more,\n\n{{x}}.5", ".NET, or\n\n... more,\n\n.5"),
        ("The ninth Guru\n, Guru Tegh , and\n. So, \n.NET", "The ninth Guru, Guru Tegh , and. So, .NET"),
    ],
)
def test_a_line_closes_where_something_was_left_out(markup, text):
    assert text_of(markup) == text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{convert|1300|mi|km}}", "1,300 miles"),
        ("{{convert|1|mi|km}}", "1 mile"),
        ("{{Convert|52419|sqmi|km2|abbr=on|sp=us}}", "52,419 sq mi"),
        ("{{convert|10|to|20|km|mi}}", "10 to 20 kilometres"),
        ("{{convert|10|-|20.5|km|sp=us}}", "10–20.5 kilometers"),
        ("{{convert|5|ft|11|in|m}}", "5 feet 11 inches"),
        ("{{convert|60|mi|adj=on}}", "60-mile"),
        ("{{convert|15|C}}", "15 °C"),
        (
            "{{convert|7|zorn}} {{convert|7|zorn/e3}} {{convert|7|" + "/" * 5000 + "}}",
            "7 zorn 7 zorn/e3 7 " + "/" * 5000,
        ),
        ("{{convert|87|e6acre|km2}}, {{convert|1|e6acre|adj=on}}", "87 million acres, 1-million-acre"),
        ("{{convert|11|MUSgal|m3}}, {{convert|160|Tcuft|abbr=on}}", "11 million US gallons, 160 trillion cu ft"),
        ("{{convert|1.2|PD/sqmi|PD/km2}}, {{convert|2|PD/km2|abbr=on}}", "1.2 inhabitants per square mile, 2 /km2"),
        (
            "{{convert|900000|oilbbl/d|m3/d}}, {{convert|1.3|Moilbbl/d}}",
            "900,000 barrels per day, 1.3 million barrels per day",
        ),
        ("{{convert|5|C-change|F-change}}, {{convert|5|and(-)|7|C|F}}", "5 °C, 5 and 7 °C"),
        (
            "{{convert|1|t/ha}} {{convert|8|t/ha}} {{convert|36|MW}} {{convert|5|mg/m3}}",
            "1 tonne per hectare 8 tonnes per hectare 36 megawatts 5 milligrams per cubic metre",
        ),
        ("{{cvt|-4000.5|ft}}", "-4,000.5 feet"),
        ("{{lang|grc|ἀναρχία}}", "ἀναρχία"),
        ("{{lang-grc|Ἀχιλλεύς|x}}", "Ancient Greek: Ἀχιλλεύς"),
        ("{{langx|de|Park}}", "German: Park"),
        ("a {{lang|fr|}} {{lang|fr}} {{lang-fr|}} b", "a b"),
        ("{{lang-xyz|Park}} {{resize|90%|a}} {{resize|b}}", "Park a b"),
        ("{{transl|ar|ALA|Allāh}}", "Allāh"),
        ("{{Nihongo|'''Aikido'''|合気道|Aikidō|lead=yes}}", "Aikido (合気道, Aikidō)"),
        ("{{nihongo3|park|公園|kōen}}", "kōen (公園, park)"),
        ("{{zh|s=公园|t=公園|p=gōngyuán}}", "simplified Chinese: 公园; traditional Chinese: 公園; pinyin: gōngyuán"),
        ("{{ill|Park|de|Der Park}} {{ill|de|Park|Der Park}} {{ill|A (b)|fr|x|lt=A}}", "Park Der Park A"),
        ("{{as of|2014|3|lc=y}}, {{As of|2014|3|5|df=US}}", "as of March 2014, As of March 5, 2014"),
        (
            "{{birth date|1809|2|12}}, {{death date and age|1865|04|15|1809|2|12|df=y}}",
            "February 12, 1809, 15 April 1865",
        ),
        ("{{start date|1923}}, {{birth date|circa 400 BC}}", "1923, circa 400 BC"),
        ("{{circa|1400}}; {{c.}} 5; {{reign|1066|1087}}", "c. 1400; c. 5; r. 1066–1087"),
        ("{{OldStyleDate|February 2|1905|January 20}}", "February 2 [O.S. January 20] 1905"),
        (
            "{{frac|3}} {{frac|3|2}} {{sfrac|1|1|2}} {{val|6.241|e=18|u=C}} {{e|24}}",
            "1/3 3/2 1 1/2 6.241×10^18 C ×10^24",
        ),
        ("{{chem|C|''n''|H|2''n''+2}} {{nuclide|calcium|48}} {{su|p=2|b=1}}", "CnH2n+2 calcium-48 21"),
        ("{{US$|2 billion}} {{£|3000}} {{US patent|1781541}}", "US$2 billion £3,000 U.S. Patent 1,781,541"),
        ("{{USS|Hornet|CV-12}}, {{HMS|Hood|51|6}}, {{USS|Iowa|BB-61|2}}", "USS Hornet (CV-12), HMS Hood, Iowa"),
        (
            "{{ship|French frigate|Hermione|1779|2}}, {{sclass|Nimitz|aircraft carrier}}",
            "Hermione, Nimitz-class aircraft carrier",
        ),
        ("{{harvtxt|Boolos|Jeffrey|1999}} say", "Boolos & Jeffrey (1999) say"),
        ("a{{snd}}b {{'}}c{{' \"}} d{{nbsp}}e {{mdash}} f{{wbr}}g{{'s}}", "a – b 'c' \" d e — fg's"),
        (
            "{{hlist|a|b|c}} {{bibleverse|Mark|3:25}} {{angbr|a}} {{sortname|John|Smith}}",
            "a, b, c Mark 3:25 ⟨a⟩ John Smith",
        ),
        ("{{citation needed span|text=All birds|date=May}} {{small|text}} {{sic}}", "All birds text"),
        ("Said:\n{{quote|A park.|Ann|A Book}}\nSo.", "Said:\n\nA park. — Ann, A Book\n\nSo."),
        ("{{poem quote|One\ntwo}}", "One\ntwo"),
        ("Parks:{{unbulleted list|Kakadu|Uluru}}", "Parks:\nKakadu\nUluru"),
        ("{{div col}}\n* a\n* b\n{{div col end}}", "a\nb"),
        ("{{columns-list|2|\n* a\n* b}}", "a\nb"),
    ],
)
def test_templates_say_what_they_print(template, text):
    assert text_of(template) == text


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(
        sorted(wiki_templates.RULES) + ["lang-fr", "lang-", "script/x", "formatnum:1", "lc:", "cn", ""]
    ),
    given=st.lists(
        st.sampled_from(["", " ", "0", "12", "1809", "to", "ft", "-", "a b", "é", wikipedia.GAP, "۴۲"]), max_size=6
    ),
    named=st.dictionaries(st.sampled_from(["adj", "abbr", "sp", "df", "text", "e", "lt", "col1"]), st.text(max_size=5)),
)
def test_every_rule_takes_any_arguments(name, given, named):
    arguments = {str(number): value for number, value in enumerate(given, start=1)} | named
    assert isinstance(wiki_templates.render(name, arguments), str | None)


def test_an_outer_template_counts_for_what_is_in_it():
    text = "A {{Infobox|{{flagdeco|x}}}} {{oldid|1}} {{nowrap|b {{Oldid}}}} {{cn}}\n{|\n| {{oldid}}\n|}\n<pre>c</pre>"
    assert notes_of(text) == {
        Note(wikitext.WORDLESS_TEMPLATE, "infobox"): 1,
        Note(wikitext.WORDLESS_TEMPLATE, "cn"): 1,
        Note(wikitext.UNKNOWN_TEMPLATE, "oldid"): 2,
        Note(wikitext.ELEMENT, "table"): 1,
        Note(wikitext.ELEMENT, "pre"): 1,
    }


def test_a_unit_without_a_name_is_counted():
    text = "{{convert|7|zorn}} {{cvt|5|ft|3|zorn}} {{convert|7|e6acre}} {{convert|7}} {{convert}}"
    assert notes_of(text) == {Note(wikitext.UNKNOWN_UNIT, "zorn"): 2}


# --- Markup that is wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("markup", "text", "unclosed"),
    [
        ("A [[park of rock.\n\nB [[bird]].", "A park of rock.\n\nB bird.", "[["),
        ("A [[park|garden.\n\nB.", "A garden.\n\nB.", "[["),
        ("A [[File:x.jpg|thumb|a bird\nB [[bird]].", "A B bird.", "[["),
        ("A {{cite web|url=x\nB {{nowrap|c}}.", "A B c.", "{{"),
        ("{{Infobox park\n| name = x\n| area = 5\n'''Kakadu''' is.\n\nB.", "Kakadu is.\n\nB.", "{{"),
        ("A.\n{|\n! x\n|-\n| y\nB.", "A. B.", "{|"),
        ("A ]] b }} c.\n|}\nD", "A b c.\n\nD", "}}"),
        ("A ]] b", "A b", "]]"),
        ("A<ref>b. C", "Ab. C", "<ref>"),
        ("A <!-- b. C", "A b. C", "<!-->"),
        ("A {{nowrap|[[b}} c", "A b c", "[["),
        ("[[A|{{b]] c\nd", "d", "{{"),
    ],
)
def test_what_never_closes_gives_its_text_back(markup, text, unclosed):
    following = "\n== Next ==\nMore [[text|words]]."
    assert text_of(markup + following).replace("[[", "") == f"{text}\n\nNext\n\nMore words."
    assert any(note.kind == wikitext.UNCLOSED and unclosed[:3] in note.name for note in notes_of(markup))


OPENERS = (
    "{{ [[ {{{ {{a| [[a| <b> <ref> ''' <!-- {{a|b= [[a|{{ {{{a| [[File:a| <nowiki> ({{a}}; {{nowrap| <math> "
    "((((({{a}}) &# [ <poem> {{convert|1|to| $ <siteinfo>"
).split()
OPENERS += ["[http://a ", "<ref name='a", "\n{|\n", "\n{|\n|-\n", "\n== ", "<div ", "(\x1a", "}} {{", "\n:{|", "=\n"]


@pytest.mark.parametrize("opener", OPENERS)
def test_time_grows_with_the_length_alone(opener):
    """A parser that goes back for every bracket that nobody closes would take hours here, not a second."""
    started = time.process_time()
    assert "Still read." in text_of(opener * (200_000 // len(opener)) + "\n\n== Next ==\n\n\nStill read.")
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    "around", ["{{nowrap|%s}}", "[[a|%s]]", "{{{a|%s}}}", "{{quote|%s}}", "<b>%s</b>", "(%s)", "\n{|\n|%s\n|}"]
)
def test_deep_nesting_neither_raises_nor_takes_long(around):
    before, after = around.split("%s")
    started = time.process_time()
    found = text_of(before * 20_000 + "x" * 50_000 + after * 20_000 + "\n\nStill read.")
    assert "Still read." in found
    assert time.process_time() - started < 10


PIECES = (
    "}} ]] }}} | = |} </ref> --> </nowiki> </table> <table> '' * : ; ( ) &lt; &nbsp; {{IPA|x}} {{lang-fr| {{quote| "
    "#REDIRECT $( {{frac| {{ill| {{USS| {{val| {{nihongo| {{harvtxt| {{columns|col1="
).split()
PIECES += ["\n|", "\n|-", "\n", "\n\n", " ", "{{as of|", "{{birth date|"]
FRAGMENTS = st.sampled_from(OPENERS + PIECES)


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAGMENTS | st.text(max_size=8) | st.sampled_from(["12", "y", "de"]), max_size=40))
def test_no_markup_raises_or_is_left(pieces):
    found = wikipedia.article(page("".join(pieces).replace("nowiki", "b").replace("math", "i").replace("&", "")))
    assert isinstance(found, Article | FilteredRecord)
    if isinstance(found, Article):
        for mark in ("{{", "}}", "[[", "]]", "''", "<ref", "</ref", "<!--", wikipedia.GAP, "  ", "\n\n\n"):
            assert mark not in found.text
        assert found.text == found.text.strip() and " \n" not in found.text and "\n " not in found.text
        assert found == wikipedia.article(
            page("".join(pieces).replace("nowiki", "b").replace("math", "i").replace("&", ""))
        )


WORDS = st.text("abcdefghäλ語", min_size=1, max_size=6)


def _wrap(inner: st.SearchStrategy) -> st.SearchStrategy:
    """Wikitext whose brackets all close, beside the words that it shows."""

    def around(before: str, after: str):
        return inner.map(lambda pair: (before + pair[0] + after, pair[1]))

    def silent(before: str, after: str):
        return inner.map(lambda pair: (before + pair[0] + after, []))

    return st.one_of(
        st.lists(inner, max_size=4).map(
            lambda some: (" ".join(one for one, _ in some), [w for _, ws in some for w in ws])
        ),
        around("[[target|", "]]"),
        around("{{nowrap|1=", "}}"),
        around("{{lang|fr|", "}}"),
        around("<b>", "</b>"),
        around("(", ")"),
        silent("<ref>", "</ref>"),
        silent("<!--", "-->"),
        silent("{{unknown|a=", "}}"),
        silent("[[File:x.jpg|thumb|", "]]"),
        silent("\n{|\n|-\n| ", "\n|}\n"),
    )


PLAIN = WORDS.map(lambda word: (word, [word])) | WORDS.map(lambda word: (f"''{word}''", [word]))
BALANCED = st.recursive(PLAIN, _wrap, max_leaves=12)


def _nests_elements(text: str) -> bool:
    """References and comments end at the first closing mark, so those in each other are not balanced."""
    depth = 0
    for mark in ("<ref>", "<!--"):
        closer = {"<ref>": "</ref>", "<!--": "-->"}[mark]
        depth = max(depth, *(part.count(mark) for part in text.split(closer))) if mark in text else depth
    return depth > 1 or ("<ref>" in text and "<!--" in text)


@settings(max_examples=200, deadline=None)
@given(BALANCED.filter(lambda pair: not _nests_elements(pair[0])))
def test_the_words_of_balanced_markup_are_kept_in_order(pair):
    markup, words = pair
    found = wikipedia.article(page("Begin " + markup + " end"))
    assert isinstance(found, Article)
    shown = found.text.replace("(", " ").replace(")", " ").split()
    # A link whose label shows nothing shows its target.
    assert [word for word in shown if word != "target"] == ["Begin", *words, "end"]


# --- The same everywhere ----------------------------------------------------------------------------------------------

ELSEWHERE = """
import pickle, sys
from realm_jax.corpora.wikipedia import article
print([article(page) for page in pickle.load(sys.stdin.buffer)])
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_another_process_with_other_hashes_finds_the_same(seed):
    pages = [page("A {{nowrap|b}} {{zh|p=x|c=y}} [[c|d]]<ref>e</ref> {{convert|1|to|2|km}} {{columns|col1=a|col2=b}}")]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        input=pickle.dumps(pages),
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
    )
    assert done.stdout.decode().strip() == str([wikipedia.article(one) for one in pages]), done.stderr.decode()


@pytest.fixture(scope="module")
def real(shared_data):
    """The pages of a real piece of a dump, and what became of them."""
    pages = [one for part in parts(shared_data / "wiki_dump") for one in read_pages(part)]
    return [(one, wikipedia.article(one)) for one in pages if isinstance(one, Page)]


def test_of_a_real_piece_every_page_is_an_article_or_has_its_reason(real):
    assert Counter(found.reason if isinstance(found, FilteredRecord) else "article" for _, found in real) == {
        "article": 96,
        "redirect": 99,
        "disambiguation page": 8,
        "list, index or outline": 2,
        "not in the namespace of articles": 1,
    }
    dropped = [(found.reason, found.sample) for _, found in real if isinstance(found, FilteredRecord)]
    assert sorted(sample for reason, sample in dropped if reason == wikipedia.DISAMBIGUATION) == [
        "Aa River",
        "Aberdeen (disambiguation)",
        "Ada",
        "Alien",
        "Animal (disambiguation)",
        "Argument (disambiguation)",
        "Asia Minor (disambiguation)",
        "Austin (disambiguation)",
    ]
    assert [sample for reason, sample in dropped if reason == wikipedia.LIST] == [
        "List of Atlas Shrugged characters",
        "List of anthropologists",
    ]
    assert [sample for reason, sample in dropped if reason == wikipedia.OTHER_NAMESPACE] == [
        "Wikipedia:Adding Wikipedia articles to Nupedia"
    ]
    assert all(
        one.redirect for one, found in real if isinstance(found, FilteredRecord) and found.reason == wikipedia.REDIRECT
    )


def test_no_markup_is_left_in_real_articles(real):
    for _, found in real:
        if isinstance(found, Article):
            for mark in ("{{", "}}", "[[", "]]", "''", "<ref", "<!--", "  ", "( ;", "\n|", wikipedia.GAP):
                assert mark not in found.text, (found.title, mark)


def test_real_articles_begin_as_their_readers_know_them(real):
    texts = {found.title: found.text for _, found in real if isinstance(found, Article)}
    assert texts["Achilles"].startswith(
        "In Greek mythology, Achilles (Ancient Greek: Ἀχιλλεύς, Akhilleus) was a Greek hero of the Trojan War"
    )
    assert texts["Aikido"].startswith(
        "Aikido (合気道, Aikidō) is a modern Japanese martial art developed by Morihei Ueshiba"
    )
    assert texts["Animalia (book)"].endswith("named Animalia the 1988 Picture Book Winner.")
    assert "is 13.5 in (34.3 cm) tall, weighs 8.5 lb" in texts["Academy Awards"]
