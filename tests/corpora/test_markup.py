"""Web pages, Markdown, reStructuredText and Word files lose no words but those that they mark as no content."""

import io
import zipfile
from collections import Counter

import pytest
from test_documents import word_file

from realm_jax.corpora import markup
from realm_jax.corpora.markup import KEYS_LEFT_OUT, UNKNOWN_ELEMENTS, WORDS_LEFT_OUT

pytest.importorskip("lxml")

LONG = "The harbor office keeps a register of all vessels that enter the bay between March and October."
SHORT = "The sluice has three gates."
TEASER = "<article><p>Subscribe to our letter.</p></article>"


def page(html: str) -> markup.Plain:
    return markup.web_page(f"<!DOCTYPE html><html><head><title>Head</title></head>{html}</html>".encode(), Counter())


def markdown(text: str) -> markup.Plain:
    return markup.markdown(text.encode(), Counter())


def rst(text: str) -> list[str]:
    return markup.restructured_text(text.encode(), Counter()).text.split("\n\n")


# --- Web pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        f'<div id="nav"><a href="/">Home</a></div><div><h1>Lock</h1><p>{LONG}</p><p>{SHORT}</p></div>',
        f"<div id=content><h1>Lock</h1><p>{LONG}</p><p>{SHORT}</p></div><aside>{TEASER}</aside>",
        f"<main><h1>Lock</h1><p>{LONG}</p><p>{SHORT}</p><aside>{TEASER}</aside></main>",
        f"<main></main><div><h1>Lock</h1><p>{LONG}</p><p>{SHORT}</p></div>",
        f"<main><p>Loading the page …</p></main><div><h1>Lock</h1><p>{LONG}</p><p>{SHORT}</p></div>",
        f"<article><h1>Lock</h1><p>{LONG}</p></article><article><h2>Gates</h2><p>{SHORT}</p></article>",
        f"<article class=cookie><p>We use cookies.</p></article><div><h1>Lock</h1><p>{LONG}</p><p>{SHORT}</p></div>",
        f"<header><h1>Lock</h1><p>{SHORT}</p></header><main><p>{LONG}</p></main>",
        f"<div role=main><h1>Lock</h1><p>{LONG}</p></div><article><p>{SHORT}</p></article><main><p>{SHORT}</p></main>",
        f"<nav><h1>Lock</h1><p>{LONG}</p><p>{SHORT}</p></nav>",
        f"<nav><main><h1>Lock</h1><p>{LONG}</p><p>{SHORT}</p></main></nav>",
        f"<div class=page-header><h1>Lock</h1><p>{SHORT}</p></div><div><main><p>{LONG}</p></main></div>",
        f"<p>a</p></body></html><div><h1>Lock</h1><p>{LONG}</p><p>{SHORT}</p></div>",
        f"<div class=nav><h1><a>Lock</a></h1><p><a>{LONG}</a></p><p><a>{SHORT}</a></p></div>",
        "<div>" * 500 + f"<h1>Lock</h1><p>{LONG}</p>" + "</div>" * 500 + f"<p>{SHORT}</p>",
    ],
    ids=range(15),
)
def test_a_page_keeps_its_text_whatever_it_marks_as_main(body):
    title, text = page(f"<body>{body}</body>")
    assert title == "Lock" and LONG in text.split("\n\n") and SHORT in text.split("\n\n")


def test_a_page_with_more_levels_than_the_parser_takes_keeps_its_text():
    html = "<body>" + "<font>word " * 3000 + f"<p>{LONG}</p><script>x = 1</script>"
    text = page(html).text.split()
    assert text == ["Head", *["word"] * 3000, *LONG.split()]


def test_a_page_counts_the_words_that_are_left_out():
    notes: Counter[tuple[str, str]] = Counter()
    html = (
        "<body><nav>Go home now</nav><ul class='wide nav'><li><a>Ports</a><li><a>Locks</a></ul>"
        f"<div>A banner of five words</div><main><p>{LONG}</p>"
        "<article><p>Text.</p><footer>Its source.</footer></article>"
        "</main><footer>All rights reserved</footer><script>var x = 1</script></body>"
    )
    assert markup.web_page(html.encode(), notes).text.split("\n\n") == [LONG, "Text.", "Its source."]
    assert notes == {
        (WORDS_LEFT_OUT, "navigation"): 5,
        (WORDS_LEFT_OUT, "footers"): 3,
        (WORDS_LEFT_OUT, "outside of the main part"): 5,
    }


@pytest.mark.parametrize(
    ("body", "paragraphs"),
    [
        ("<figure><img src=a><figcaption>The <b>lamp</b> at noon.</figcaption></figure>", ["The lamp at noon."]),
        ("<ul><li><a href=1>First port</a></li><li><a href=2>Second</a></li></ul>", ["First port", "Second"]),
        ("<pre>a = 1\n  b = 2\n\nc</pre>\nnext\nline", ["a = 1\nb = 2", "c", "next line"]),
        ("<h2><button>What is a lock?</button></h2><div hidden>A gate.</div>", ["What is a lock?", "A gate."]),
        ("<details><summary>More</summary>Less</details>", ["More", "Less"]),
        ("E <math><mi>E</mi><annotation>E</annotation></math> <svg><title>i</title><text>x</text></svg>", ["E E x"]),
        ("a<br>b<wbr>c <!-- no -->d", ["a\nbc d"]),
        ("<img src=a alt='A diagram of flows'> <img src=b alt=icon>", ["A diagram of flows"]),
        ("<ruby>漢<rt>kan</rt></ruby> <tab-a>one</tab-a><tab-b>two</tab-b>", ["漢(kan) one two"]),
        ("<ol start=1986><li>A season</ol><ol><li>One<li>Two</ol>", ["1986. A season", "One", "Two"]),
        ("See <a>§</a> 5 <script type='math/tex'>E=mc^2</script>", ["See § 5 E=mc^2"]),
        ("<h2>Head<a>¶</a></h2><noscript>Shown.</noscript>", ["Head", "Shown."]),
        ("<![CDATA[a < b]]>", ["a < b"]),
    ],
)
def test_a_page_keeps_captions_links_and_line_ends(body, paragraphs):
    assert page(f"<body><main>{body}</main></body>").text.split("\n\n") == paragraphs


# --- Markdown ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["title", "script", "style", "iframe", "textarea", "body", "!-- comment", "pre", "xmp"]
)
@pytest.mark.parametrize("sentence", ["Put it into the <{}> of a page.", "<{}> begins it.", "- <{}> in a list"])
def test_a_tag_in_prose_swallows_nothing(name, sentence):
    plain = markdown(f"# Heads\n\n{sentence.format(name)}\n\n## Colors\n\nThe lamp is green.\n\n## Times\n\nAt nine.\n")
    assert plain.title == "Heads"
    first, *others = plain.text.split("\n\n")[1:]
    assert first == sentence.format(name).removeprefix("- ")
    assert others == ["Colors", "The lamp is green.", "Times", "At nine."]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a<b and c>d, 3 < 4 > 2", "a<b and c>d, 3 < 4 > 2"),
        ("a <placeholder> and List<String>, Map<K, V>", "a <placeholder> and List<String>, Map<K, V>"),
        ("Wrap it into <b> or <img>.", "Wrap it into <b> or <img>."),
        ("Use <kbd>Ctrl</kbd>, a<br>b, H<sub>2</sub>O <https://x.org>", "Use Ctrl, a\nb, H2O https://x.org"),
        ("x <!-- gone --> y", "x y"),
        ('<p align="center"><img src="a.png"></p>\n\nText.', "Text."),
        ("<style>\np {}\n\nq {}\n</style>\n\nText.", "Text."),
        ("<details>\n<summary>More</summary>\n\n*Less*\n\n</details>", "More\n\nLess"),
        ("<script> and </script> mark code.", "<script> and </script> mark code."),
        ("```html\n<title>x</title>\n\ny\n```", "<title>x</title>\n\ny"),
        ("~~old~~ new &lt;x&gt; &amp;", "old new <x> &"),
        ("The <p> element, <li> and <td>, <hr>; List<p>", "The <p> element, <li> and <td>, <hr>; List<p>"),
        ("| a | b |\n|---|---|\n| `x | y` | bitwise or | more |", "| a | b | |---|---| | x | y | bitwise or | more |"),
        ("| a | b |\n|---|---|\n| c | d |\n\nText.", "a, b\n\nc, d\n\nText."),
        ("![A diagram of flows](x.png) ![badge](b.svg)", "A diagram of flows"),
        ("[Author]: Bob\n\n[1]: https://x.org\n[a]\n\n[a]: b.md", "[Author]: Bob\n\na"),
        ("[Status]: done/released\n\n[Note]: <to be written>", "[Status]: done/released\n\n[Note]: <to be written>"),
        ("> " * 30 + "deep", "deep"),
        ("1986. A great season\n\n1. One\n2. Two", "1986. A great season\n\n1987. One\n\n1988. Two"),
    ],
)
def test_markdown_keeps_words_in_angle_brackets_that_are_no_tags(source, text):
    assert markdown(source).text == text


@pytest.mark.parametrize(
    ("front", "title"),
    [
        ("---\ntitle: >-\n  Rules of the port\n  of Skarv\n---\n", "Rules of the port of Skarv"),
        ("---\ntitle: |\n  Rules\n---\n", "Rules"),
        ('---\nlayout: x\nTitle: "Rules: all" # of the port\n---\n', "Rules: all"),
        ("---\r\ntitle: 1984\r\n...\r\n", "1984"),
        ('+++\ntitle = "Rules" # all\ndate = 2024-01-01\n+++\n', "Rules"),
    ],
)
def test_front_matter_names_the_title(front, title):
    assert markdown(f"{front}\nShips wait.\n") == (title, "Ships wait.")


@pytest.mark.parametrize(
    "source",
    [
        "---\n\nThe first part.\n\n---\n\nThe second part.",
        "---\nThe first part.\n---\n\nThe second part.",
        "---\nThe first: part: of it.\n---\nThe second part.",
        "---\nWarning: the first part is slow.\n---\nThe second part.",
        "+++\nThe first part.\n+++\nThe second part.",
        "---\n&a [*a]\n---\nThe first part. The second part.",
    ],
)
def test_a_rule_at_the_top_is_no_front_matter(source):
    text = markdown(source).text
    assert "first" in text and "part" in text and text.endswith("The second part.")


def test_front_matter_takes_any_characters():
    assert markdown('---\ntitle: "Hi \\uD83D\\uDE00 \\uD83D"\n---\nText.\n') == ("Hi \U0001f600 \ufffd", "Text.")


def test_front_matter_becomes_text_if_it_is_prose_and_is_counted_otherwise():
    notes: Counter[tuple[str, str]] = Counter()
    keys = "title: Port\ntags: [a, b]\ndescription: 港口的所有规则都在这里。\nsteps:\n- Open the valve."
    text = f"---\n{keys}\n---\nShips.\n"
    prose = "description: 港口的所有规则都在这里。\n\nsteps: Open the valve."
    assert markup.markdown(text.encode(), notes) == ("Port", f"{prose}\n\nShips.")
    assert notes == {(KEYS_LEFT_OUT, "tags"): 1}


# --- reStructuredText -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "paragraphs"),
    [
        (".. versionchanged:: 3.4\n   It is *closed*.", ["3.4 It is closed."]),
        (".. deprecated:: 3.8 Use the other.", ["3.8 Use the other."]),
        (".. versionadded:: 2\n\n   Long text.", ["2", "Long text."]),
        (".. seealso:: The chapter.", ["The chapter."]),
        (".. seealso::\n   - one\n   - two", ["one", "two"]),
        (".. todo:: Write this\n   part.", ["Write this part."]),
        (".. centered:: Centered", ["Centered"]),
        (".. py:function:: lower(anchor, *depth)", ["lower(anchor, *depth)"]),
        (".. py:class:: A(x)\n\n   .. py:method:: b()\n\n      Does.", ["A(x)", "b()", "Does."]),
        (".. c:func:: f(x)\n   :noindex:\n   :returns: the depth\n\n   Body.", ["f(x)", "the depth", "Body."]),
        (".. MyBox:: Box title\n   :class: wide\n   :caption: Seen\n\n   Body.", ["Box title", "Seen", "Body."]),
        (".. code-block:: python\n   :caption: a.py\n\n   x = 1\n   y = 2", ["a.py", "x = 1\ny = 2"]),
        (".. code:: one line of it", ["one line of it"]),
        (".. toctree::\n   :maxdepth: 2\n\n   intro\n   The end <end>", ["The end"]),
        (".. raw:: html\n\n   <p>Raw <b>words</b></p>", ["Raw words"]),
        (".. glossary::\n\n   term\n      Meaning.", ["term", "Meaning."]),
        (".. index:: single: gone\n.. include:: /etc/passwd\n\nText.", ["Text."]),
        ("A |missing| :ref:`role <x>` `target`_.", ["A |missing| role `target`_."]),
        (":samp:`cp {a} <b>` :cpp:any:`std::vector<int>`", ["cp {a} <b> std::vector<int>"]),
        (".. class:: Dialog(parent)\n\n   Opens.", ["Dialog(parent)", "Opens."]),
        (".. data:: PI\n   :value: 3.14", ["PI", "3.14"]),
        (".. rst-class:: lead\n\n   Body.", ["Body."]),
        (".. literalinclude:: a.py\n   :caption: The caption", ["The caption"]),
        (".. note::Words\n\n.. warning:\n   More.", ["Note", "Words", "Warning", "More."]),
        ("x : int\n    The x.", ["x : int", "The x."]),
        ("1986. A great season", ["1986. A great season"]),
        ("A. Einstein wrote.", ["A. Einstein wrote."]),
        (".. image:: x.png\n   :alt: A diagram of flows", ["A diagram of flows"]),
        ("x" * 10_001, ["x" * 10_001]),
    ],
)
def test_restructured_text_keeps_the_words_of_any_directive(source, paragraphs):
    assert rst(f"Before.\n\n{source}\n\nAfter.\n") == ["Before.", *paragraphs, "After."]


@pytest.mark.parametrize(
    "source",
    [
        "====  ====\nPort  D\n====  ====\nSkarvlongname  12\n====  ====",
        "+---+---+\n| a | b |\n+---+\n| Skarvlongname | 12 |\n+---+---+",
        ".. list-table::\n\n   * - Skarvlongname\n     - 12\n   * - three",
        '.. csv-table::\n\n   "Skarvlongname, 12',
        ".. image:: x.png\n   :nooption: Skarvlongname 12",
        ".. note::\n\n   Skarvlongname 12\n   ================\n\n   Text.",
    ],
)
def test_restructured_text_keeps_what_docutils_cannot_read(source):
    first, *middle, last = rst(f"Before.\n\n{source}\n\nAfter.\n")
    assert (first, last) == ("Before.", "After.")
    assert "Skarvlongname" in " ".join(middle) and "12" in " ".join(middle) and "System Message" not in str(middle)


# --- Word -------------------------------------------------------------------------------------------------------------


def word_document(body: str, notes: Counter[tuple[str, str]]) -> markup.Plain:
    """A Word file with this XML in place of a paragraph's runs."""
    math = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
    source, target = zipfile.ZipFile(io.BytesIO(word_file([("", "MARK")]))), io.BytesIO()
    with zipfile.ZipFile(target, "w") as packed:
        for name in source.namelist():
            content = source.read(name).decode().replace("<w:r><w:t>MARK</w:t></w:r>", body)
            packed.writestr(name, content.replace("<w:document ", f"<w:document {math} "))
    return markup.word_document(target.getvalue(), notes)


def test_a_word_file_keeps_formulas_and_fields():
    pytest.importorskip("mammoth")
    notes: Counter[tuple[str, str]] = Counter()
    body = (
        "<w:r><w:t>Energy is</w:t></w:r><m:oMathPara><m:oMath><m:r><m:t>E=</m:t></m:r>"
        "<m:f><m:num><m:r><m:t>m</m:t></m:r></m:num><m:den><m:r><m:t>c</m:t></m:r></m:den></m:f>"
        "</m:oMath></m:oMathPara><w:r><w:t>, page</w:t></w:r>"
        '<w:fldSimple w:instr="PAGE"><w:r><w:t xml:space="preserve"> 17</w:t></w:r></w:fldSimple>'
        "<w:strange><w:r><w:t>gone</w:t></w:r></w:strange>"
    )
    assert word_document(body, notes).text == "Energy is E=m/c , page 17"
    assert notes == {(UNKNOWN_ELEMENTS, "w:strange"): 1}


def run(text: str) -> str:
    return f"<m:r><m:t>{text}</m:t></m:r>"


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (f"{run('f')}<m:d><m:e>{run('x')}</m:e></m:d>", "f(x)"),
        (f'<m:d><m:dPr><m:begChr m:val="["/><m:endChr m:val="]"/></m:dPr><m:e>{run("a")}</m:e></m:d>', "[a]"),
        (f"<m:f><m:num>{run('x+1')}</m:num><m:den>{run('y+2')}</m:den></m:f>", "(x+1)/(y+2)"),
        (
            f'<m:nary><m:naryPr><m:chr m:val="∑"/></m:naryPr><m:sub>{run("i=1")}</m:sub><m:sup>{run("n")}</m:sup>'
            f"<m:e>{run('i')}</m:e></m:nary>",
            "∑_(i=1)^n i",
        ),
        (f"<m:sSup><m:e>{run('z')}</m:e><m:sup>{run('2')}</m:sup></m:sSup>", "z^2"),
        (f"<m:rad><m:deg>{run('3')}</m:deg><m:e>{run('x')}</m:e></m:rad>", "3√x"),
        (
            f"<m:m><m:mr><m:e>{run('1')}</m:e><m:e>{run('2')}</m:e></m:mr><m:mr><m:e>{run('3')}</m:e></m:mr></m:m>",
            "1 2; 3",
        ),
        ("<m:r><w:t>words</w:t></m:r>", "words"),
    ],
)
def test_a_formula_of_word_becomes_one_line(formula, text):
    pytest.importorskip("mammoth")
    assert word_document(f"<m:oMath>{formula}</m:oMath>", Counter()).text == text


def test_a_word_file_keeps_text_boxes_and_rubies():
    pytest.importorskip("mammoth")
    box = "<w:r><w:drawing><w:txbxContent><w:p><w:r><w:t>In a box</w:t></w:r></w:p></w:txbxContent></w:drawing></w:r>"
    ruby = (
        "<w:r><w:ruby><w:rt><w:r><w:t>kan</w:t></w:r></w:rt>"
        "<w:rubyBase><w:r><w:t>漢</w:t></w:r></w:rubyBase></w:ruby></w:r>"
    )
    assert word_document(f"<w:r><w:t>Before</w:t></w:r>{box}{ruby}", Counter()).text == "Before漢\n\nIn a box"
