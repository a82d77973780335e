"""News: what cleaning takes away and leaves, and which articles stay."""

import json
import lzma
import re
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_news import FOREIGN, made_texts

from realm_jax.corpora import news
from realm_jax.corpora.articles import Article, Skipped
from realm_jax.corpora.news import RULES, clean, language
from realm_jax.data import sentences

PROSE = made_texts(1)[0]
ANYTHING = {"languages": [], "characters": (0, 10**9), "words": (0, 10**9), "sentences": (0, 10**9)}


def cleaned(text: str, title: str = "") -> Article:
    result = clean(Article("a", title, text), ANYTHING)
    assert isinstance(result, Article)
    return result


def reason(text: str, rules: dict) -> str:
    result = clean(Article("a", "", text), rules)
    return result.reason if isinstance(result, Skipped) else ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One  line,\twith\u00a0spaces. ", "One line, with spaces."),
        ("It ended.\r\nIt began.\rIt stayed.\u2028It went.", "It ended.\n\nIt began.\n\nIt stayed.\n\nIt went."),
        ("\ufeffIt was\u200b soft\u00ad hyphenated\x07.\ud83d", "It was soft hyphenated."),
        ("می\u200cخواهم بروم.", "می\u200cخواهم بروم."),
        (
            "A long line of text that was\nbroken in the middle.\nThe next.",
            "A long line of text that was broken in the middle.\n\nThe next.",
        ),
        ("• The first point.\n* The second.\n- The third.", "The first point.\n\nThe second.\n\nThe third."),
        ("The court will decide.He said so.It ended.", "The court will decide. He said so. It ended."),
        ("Shares of Amazon.com rose. See Node.Js too.", "Shares of Amazon.com rose. See Node.Js too."),
        (
            "A sentence that stops on the way\nAdvertisement\nand goes on.",
            "A sentence that stops on the way and goes on.",
        ),
    ],
)
def test_lines_become_paragraphs_of_plain_prose(text, expected):
    assert cleaned(text).text == expected


def test_a_title_is_one_line():
    assert cleaned("Something.", " Two\nlines \u200b").title == "Two lines"


FURNITURE = """
Copyright 2018 The Associated Press. All rights reserved. This material may not be published, broadcast or rewritten.
© 2017 Example Media Ltd. All rights reserved
(c) 2018 Example News Service
Image copyright Getty Images Image caption The minister on his way to the talks on Monday
Media playback is unsupported on your device
Photo: John Doe / Example Press
Click here to read the full story
CLICK HERE FOR MORE NEWS FROM THE REGION AND BEYOND
Share this: Click to share on Facebook (Opens in new window) Click to share on Twitter
Share on Facebook Share on Twitter Share by email
Subscribe to our newsletter for a round-up of the day's stories.
Sign up for our daily briefing and get the stories that matter.
Follow us on Facebook, Twitter and Instagram for more updates.
Follow Jane Roe on Twitter at @janeroe.
Story continues below advertisement
Continue reading the main story
READ MORE: The five things that you need to know
Read more: Minister resigns after vote
Also read: Five teams that could win the cup this year
Related: Council to vote on the budget next week
Get the latest news delivered straight to your inbox
Your browser does not support the video tag used here.
We use cookies to give you the best experience on this site.
By continuing to use this site you agree to our use of cookies.
Leave a comment below and tell us what you think.
(Reporting by Jane Roe in Paris; Editing by John Doe)
Additional reporting by Jane Roe in Paris and John Doe in Rome.
For more information, visit www.example.com or call 555-0100.
This article originally appeared on the pages of the Example.
Thank you for reading and relying on the Example.
By JANE ROE
March 3, 2018
Home News Sport
""".strip().split("\n")


@pytest.mark.parametrize("line", FURNITURE, ids=lambda line: line[:30])
def test_lines_of_the_page_around_an_article_go(line):
    assert cleaned(f"It began with a storm.\n{line}\nIt ended well.").text == "It began with a storm.\n\nIt ended well."


ARTICLE_LINES = """
The copyright of the song had run out in 1998, the judge said.
Copyright law has changed little since then, according to lawyers.
Share prices fell by 3 percent on Monday.
Read the letter aloud, she told him, and he did.
Following the vote, ministers left without a word to reporters.
"Click," said the camera, and the moment was gone.
Subscribers to the service have doubled since 2016.
Related companies will not be affected by the ruling.
Photographs showed the two men leaving the bank at noon.
He left.
More than 200 people were hurt when the train left the rails.
By using a curved bow, she can play two strings at once.
""".strip().split("\n")


@pytest.mark.parametrize("line", ARTICLE_LINES, ids=lambda line: line[:30])
def test_lines_of_articles_that_look_a_little_like_it_stay(line):
    assert cleaned(line).text == line


def test_a_paragraph_is_no_furniture_however_it_begins():
    paragraph = "Subscribe to the theory or not, the numbers are plain: " + PROSE
    assert cleaned(paragraph).text == paragraph


def test_hardly_any_sentence_of_an_encyclopedia_is_taken_for_furniture(shared_data):
    with lzma.open(shared_data / "wiki_articles" / "articles.jsonl.xz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(150), strict=False)]
    found = total = 0
    for text in texts:
        text = re.sub(r"\s+([.,;:!?)])", r"\1", text)
        for start, end in sentences.split(text):
            total += 1
            found += news._is_boilerplate(" ".join(text[start:end].split()))
    assert total > 20_000
    assert found / total < 0.0003


@pytest.mark.parametrize(
    ("text", "rules", "expected"),
    [
        (PROSE, {}, ""),
        ("Too short. It is. Yes.", {}, "fewer than 200 characters"),
        (PROSE, {"characters": (0, 300)}, "more than 300 characters"),
        (PROSE, {"words": (1000, 2000)}, "fewer than 1,000 words"),
        (PROSE, {"words": (0, 20)}, "more than 20 words"),
        (PROSE, {"sentences": (13, 20)}, "fewer than 13 sentences"),
        (PROSE, {"sentences": (0, 11)}, "more than 11 sentences"),
        (PROSE, {"sentences": (12, 12)}, ""),
        (PROSE, {"languages": ("de", "fr")}, "in another language (en)"),
        (" ".join(FOREIGN["de"]), {}, "in another language (de)"),
        (" ".join(FOREIGN["de"]), {"languages": ("de", "fr")}, ""),
        (" ".join(FOREIGN["ru"]), {"languages": ()}, ""),
        ("", {}, "fewer than 200 characters"),
    ],
)
def test_an_article_is_left_out_for_a_reason(text, rules, expected):
    assert reason(text, rules=RULES | rules) == expected


def test_what_is_left_out_shows_a_sample_of_one_line():
    dropped = clean(Article("a", "", "No.\nNot at all.\n" + "x" * 500 + "."), RULES | {"words": (50, 60)})
    assert isinstance(dropped, Skipped)
    assert dropped.sample.startswith("No. Not at all. ") and len(dropped.sample) <= 80


@pytest.mark.parametrize("code", sorted(FOREIGN))
def test_languages_are_told_apart_by_a_few_sentences(code):
    assert language(" ".join(FOREIGN[code])) == language(FOREIGN[code][0]) == code


def test_english_articles_are_taken_for_english(shared_data):
    with lzma.open(shared_data / "wiki_articles" / "articles.jsonl.xz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(400), strict=False)]
    assert Counter(map(language, texts)) == {"en": 400}


@given(st.text(), st.text() | st.text(st.sampled_from("Ab1 .!?\"'()\n\r\t•-©\u200b\ud800\x00\u2028")), st.booleans())
def test_clean_never_raises_and_leaves_whole_characters_in_single_spaced_lines(title, text, any_text):
    result = clean(Article("a", title, text), ANYTHING if any_text else RULES)
    if isinstance(result, Skipped):
        result.sample.encode("utf-8")
        assert len(result.sample) <= 80 and "\n" not in result.sample
        return
    for paragraph in result.text.split("\n\n") if result.text else []:
        assert paragraph == " ".join(paragraph.split()) != ""
    result.text.encode("utf-8")
    result.title.encode("utf-8")
    # Nothing is added but spaces.
    left = Counter(result.text) - Counter(text)
    assert set(left) <= {" ", "\n"}


@pytest.mark.parametrize("unit", [" ", "!", "!\n", '."', "•", "• ", "Read ", "a.The ", "(", "\n", "a\n", "© "])
def test_no_text_takes_quadratic_time(unit):
    began = time.perf_counter()
    clean(Article("a", unit * 20_000, unit * 50_000), ANYTHING)
    assert time.perf_counter() - began < 5
