"""PDF files become paragraphs, and no line is lost but page numbers and the copies of running heads and feet."""

import re
from collections import Counter

import pytest
from test_documents import PROSE, pdf_file

from realm_jax.corpora.pdf import paragraphs, pdf_document


def pdf_text(pages: list[list[str]]) -> str:
    return pdf_document(pdf_file(pages), Counter()).text


def roman(number: int) -> str:
    return "x" * (number // 10) + ["", "i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix"][number % 10]


def test_pages_of_a_pdf_become_paragraphs_without_heads_and_numbers():
    long = "It lived in the woods of the island and nested on the ground there"
    ends = "Fruit was what it ate, and seeds, roots and more of"
    text = pdf_text([["Birds of Mauritius", long, "and was eaten by sailors.", ends, f"- {n} -"] for n in (1, 2, 3)])
    first, *others = text.split("\n\n")
    assert first == "Birds of Mauritius"
    assert text.count("Birds of Mauritius") == 1 and "- 2 -" not in text
    assert f"{long} and was eaten by sailors." in others


def test_the_title_of_a_pdf_is_that_of_its_properties_if_its_pages_show_it():
    assert pdf_document(pdf_file([["Birds of Mauritius", PROSE]], title="Birds of Mauritius"), Counter()).title
    assert not pdf_document(pdf_file([["Birds of Mauritius", PROSE]], title="untitled.doc"), Counter()).title


@pytest.mark.parametrize(
    "pages",
    [
        [
            ["Catch", *(f"{1900 + 6 * n + row} {37 * (6 * n + row)} tons" for row in range(6)), str(n + 1)]
            for n in range(4)
        ],
        [["Valve check", f"Turn valve {n} by {10 * n - 5} degrees", "Wait for the lamp"] for n in range(1, 6)],
        [[f"Turn valve {n}", PROSE, f"Step {n} / 5"] for n in range(1, 6)],
        [[f"{n} valves are open", PROSE, f"Slide {roman(n)}"] for n in range(1, 6)],
        [[f"Item {n}", PROSE] for n in range(1, 6)] + [[f"Part {n}", PROSE] for n in range(1, 6)],
        [[f"{1984 + n}", PROSE, f"{90 - n}"] for n in range(4)],
        [[f"Room {n}", PROSE, f"{count} %"] for n, count in enumerate((4, 4, 2, 7, 5))],
        [["Civil", "A word for the town side of the port.", "1984"]],
        [[top, PROSE, end] for top, end in zip("mix vivid mild i v".split(), "livid XIV MIX c x".split(), strict=True)],
        [["Letter", PROSE, "1"], ["Letter", PROSE, "2"]],
        [["Prices", "Adults ........ 12", "Dogs . . . . . free", "Herring ........ 12.50", "Cod.....7"]],
    ],
    ids="table slides steps counts items years percents glossary words two_pages prices".split(),
)
def test_lines_that_may_be_text_stay_at_the_edges_of_pages(pages):
    text = pdf_text(pages)
    page_numbers = {"1", "2", "3", "4"} if "Catch" in text else set()
    for line in {line for page in pages for line in page} - page_numbers:
        copies = len(re.findall(rf"(?<!\S){re.escape(line)}(?!\S)", text))
        assert copies >= (sum(page.count(line) for page in pages) if len(pages[0]) < 5 else 1), line


def test_lines_that_repeat_on_few_pages_stay():
    states = ["yes", "no", "no", "rare", "yes", "yes", "rare", "rare", "no"]
    text = " ".join(paragraphs([[f"Bird {n}", PROSE, f"Seen: {state}"] for n, state in enumerate(states)], Counter()))
    assert re.findall(r"Seen: (\w+)", text) == states


@pytest.mark.parametrize(
    ("heads", "heads_left"),
    [
        ([str(n) for n in range(1, 9)], []),
        ([f"Page {n} of 8" for n in range(1, 9)], []),
        (["Title", *(f"[{n}]" for n in range(2, 9))], ["Title"]),
        ([*map(roman, range(1, 5)), *map(str, range(1, 13))], []),
        (list(map(roman, range(1, 20))), []),
        ([f"{n} Birds" if n % 2 == 0 else f"Extinct birds {n}" for n in range(1, 13)], ["Extinct birds 1", "2 Birds"]),
        ([*(f"Birds {roman(n)}" for n in range(1, 5)), *(f"Birds {n} / 9" for n in range(1, 10))], ["Birds i"]),
        (["1", "A 2", "A 3", "A 4", "5", "B 6", "B 7", "8", "C 9", "C 10"], ["A 2", "B 6", "C 9"]),
        (["Dodo", "The dodo", *(["Birds", "Dodos"] * 5)], ["Dodo", "The dodo", "Birds", "Dodos"]),
    ],
)
@pytest.mark.parametrize("is_top", [True, False])
def test_page_numbers_and_copies_of_heads_go_if_they_run_with_the_pages(heads, heads_left, is_top):
    bodies = [[f"{PROSE} #{n}.{line}#" for line in range(4)] for n in range(len(heads))]
    pages = [[head, *body] if is_top else [*body, head] for head, body in zip(heads, bodies, strict=True)]
    text = " ".join(paragraphs(pages, Counter()))
    body = re.escape(PROSE) + r" #\d+\.\d#"
    assert len(re.findall(body, text)) == 4 * len(pages)
    assert re.sub(body, "", text).split() == " ".join(heads_left).split()


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["It is a well-", "known bird."], "It is a well-known bird."),
        (["A man-", "ual of birds. The manual is long."], "A manual of birds. The manual is long."),
        (["An on-", "line manual, on-line or online."], "An on-line manual, on-line or online."),
        (
            ["State-of-the-", "art birds of the Anglo-", "Saxon islands."],
            "State-of-the-art birds of the Anglo-Saxon islands.",
        ),
        (["Wars from 1914-", "1918, and B-", "12 birds."], "Wars from 1914-1918, and B-12 birds."),
        (["The price of a bird -", "if any - was low."], "The price of a bird - if any - was low."),
    ],
)
def test_a_hyphen_at_a_line_end_goes_only_if_the_document_has_the_word_without_it(lines, text):
    assert pdf_text([lines]) == text
    assert " ".join(paragraphs([[line] for line in lines], Counter())) == text  # across pages


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["渔港每年的渔获量由港务局", "登记，", "冬季多。"], "渔港每年的渔获量由港务局登记，冬季多。"),
        (["港の漁獲量は毎年記録されてい", "る。タラ", "ー"], "港の漁獲量は毎年記録されている。タラー"),
        (["항구의 어획량은 항만청이", "매년 기록한다."], "항구의 어획량은 항만청이 매년 기록한다."),
        (["使用 Debian", "系统的中文", "Linux 内核"], "使用 Debian 系统的中文 Linux 内核"),
        (
            ["The recommended commands", "このコマンドは全部で十二あ", "ります。"],
            "The recommended commands このコマンドは全部で十二あります。",
        ),
    ],
)
def test_lines_are_joined_without_a_space_only_between_chinese_or_japanese_letters(lines, text):
    assert "".join(paragraphs([lines], Counter())).replace("\n", "") == text
