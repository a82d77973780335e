"""Passages in any script, by any tokenizer: no character is lost, no cut parts a word or a letter and its marks."""

import unicodedata
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import bert, byte_level, letters, unigram
from tokenizers import normalizers

from realm_jax.corpora.articles import Article
from realm_jax.corpora.packer import PassagePacker
from realm_jax.data.store import Passage
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece

SCRIPTS = {
    "Latin, composed": "Le café à côté était fermé. L’élève a gagné!",
    "Latin, decomposed": unicodedata.normalize("NFD", "Cảng đóng cửa vào mùa đông. Où est l’été?"),
    "Cyrillic": "Порт закрыт зимой. Где корабли? Мой йод.",
    "Cyrillic, decomposed": unicodedata.normalize("NFD", "Чёрный йод. Мой край."),
    "Greek": "Το λιμάνι είναι κλειστό. Πού είναι τα πλοία;",
    "Georgian": "პორტი დახურულია. სად არის გემი?",
    "Armenian": "Նավահանգիստը փակ է։ Որտե՞ղ է նավը։",
    "Hebrew with niqqud": "הַנָּמֵל סָגוּר בַּחֹרֶף. הָאֳנִיּוֹת מְחַכּוֹת׃ שָׁלוֹם",
    "Arabic, vocalized": "المِيناءُ مُغلَقٌ في الشِّتاءِ. أَينَ السُّفُنُ؟ هُنا",
    "Urdu": "بندرگاہ بند ہے۔ جہاز کہاں ہیں؟ یہاں۔",
    "Devanagari": "बंदरगाह सर्दियों में बंद रहता है। क्षमा कीजिए॥ क्या?",
    "Bengali": "বন্দর শীতকালে বন্ধ থাকে। জাহাজগুলি কোথায়?",
    "Tamil": "துறைமுகம் குளிர்காலத்தில் மூடப்பட்டுள்ளது. கப்பல்கள் எங்கே?",
    "Telugu": "ఓడరేవు శీతాకాలంలో మూసివేయబడింది.",
    "Sinhala": "වරාය ශීත ඍතුවේ වසා ඇත෴ ශ්‍රී",
    "Thai": "ท่าเรือปิดในฤดูหนาว เรือรออยู่ที่นี่ กี่วัน",
    "Lao": "ທ່າເຮືອປິດໃນລະດູໜາວ",
    "Burmese": "ဆိပ်ကမ်းကို ဆောင်းတွင်း၌ ပိတ်သည်။ သင်္ဘော။",
    "Khmer": "កំពង់ផែបិទនៅរដូវរងា។ កប៉ាល់នៅឯណា៕",
    "Tibetan": "གྲུ་ཁ་དགུན་ཁར་སྒོ་རྒྱག། །བཀྲ་ཤིས།",
    "Ethiopic": "ወደቡ በክረምት ይዘጋል። መርከቦቹ የት ናቸው፧",
    "Han": "港口冬天关闭。船在哪里？使用Python的船！「好。」",
    "Kana": "みなとはふゆにしまる。フネはどこ？ガギグ",
    "Kana, decomposed": unicodedata.normalize("NFD", "ガギグゲゴ。パピプ"),
    "Hangul": "항구는 겨울에 닫힌다. 배는 어디에?",
    "Hangul jamo": unicodedata.normalize("NFD", "항구는 겨울에 닫힌다. 배는 어디에?"),
    "emoji": "the star ⭐️ and ❤️ 👨‍👩‍👧‍👦 👩🏽‍🚀 🇫🇷🇩🇪 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 flag.",
    "mathematics": "ﬁne x² ½ ℝ ﷺ ㍿ ｆｕｌｌ",
}
DROPPED = ["\u200b", "\u00ad", "\u2060", "\u200d", "\u200c", "\ufeff", "\u200f", "\x00", "\x07", "\ufffd", "\u0600"]
MARKS = ["\u0301", "\u0323", "\u064b", "\u093f", "\u0bbf", "\u05b8", "\u0e34", "\ufe0f", "\u20dd"]
ALL = "".join(SCRIPTS.values())


LOWER = sorted({*letters(unicodedata.normalize("NFD", ALL.lower())), *letters(ALL)})
STRIPPED = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()])
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "lower case": lambda: WordPiece([*SPECIAL_PIECES, *LOWER]),
    "cased": lambda: WordPiece([*SPECIAL_PIECES, *LOWER], lower_case=False),
    "cased, stripped": lambda: Tokenizer(bert(LOWER, lowercase=False, strip_accents=True)),
    "lower case, accents": lambda: Tokenizer(bert(LOWER, strip_accents=False)),
    "unclean": lambda: Tokenizer(bert(LOWER, clean_text=False, handle_chinese_chars=False)),
    "whole words": lambda: WordPiece([*SPECIAL_PIECES, "the"]),
    "bytes": lambda: Tokenizer(byte_level()),
    "bytes behind a space": lambda: Tokenizer(byte_level(add_prefix_space=True)),
    "Unigram": lambda: Tokenizer(unigram(unicodedata.normalize("NFKC", ALL))),
    "Unigram, stripped": lambda: Tokenizer(unigram(ALL, STRIPPED)),
}


@cache
def tokenizer(name: str) -> Tokenizer:
    return TOKENIZERS[name]()


def passages(name: str, text: str, limit: int, title: str = "", language: str = "none") -> list[Passage]:
    return PassagePacker(tokenizer(name), limit, "rules", language)([Article("a", title, text)])[0]


def without_space(text: str) -> str:
    return "".join(text.split())


def cuts(text: str, rows: list[Passage]) -> list[int]:
    """Where passages begin in a text; every character but white space is in exactly one of them."""
    assert without_space("".join(row.text for row in rows)) == without_space(text)
    places = []
    end = 0
    for row in rows:
        begin = text.index(row.text, end)
        assert not text[end:begin].strip()
        places.append(begin)
        end = begin + len(row.text)
    return places[1:]


scripts = st.sampled_from([*SCRIPTS.values()])
words = scripts.flatmap(lambda text: st.sampled_from(text.split()))
oddities = st.sampled_from([*DROPPED, *MARKS, "\n", "\n\n", " ", "\t", "\u3000", "x" * 120, "\U000e0001"])
texts = st.lists(words | scripts | oddities | st.text(max_size=5), min_size=1, max_size=25).flatmap(
    lambda parts: st.lists(st.sampled_from(["", " ", " "]), min_size=len(parts), max_size=len(parts)).map(
        lambda gaps: "".join(part + gap for part, gap in zip(parts, gaps, strict=True))
    )
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(
    text=texts,
    limit=st.integers(16, 64),
    title=st.sampled_from(["", "Порт §", "बंदरगाह §"]),
    language=st.sampled_from(["none", "de", "el", "ja", "th"]),
)
def test_passages_hold_every_character_of_any_text_once(name, text, limit, title, language):
    rows = passages(name, text, limit, title, language)
    tokens = tokenizer(name).encode(text).ids
    if not rows:
        assert not text.strip() or not tokens
        return
    characters = {match.start() for match in regex.finditer(r"\X", text)}
    for place in cuts(text, rows):
        assert place in characters and not unicodedata.combining(text[place]) or place == len(text)
    stored = np.concatenate([row.body_tokens for row in rows]).tolist()
    if name.startswith(("bytes", "Unigram")):  # a token may be white space, and a letter may be more tokens than fit
        remaining = iter(tokens)
        assert all(token in remaining for token in stored)
    else:
        assert stored == tokens
    for row in rows:
        assert row.text
        assert 3 + len(row.title_tokens) + len(row.body_tokens) <= limit
        starts, ends = row.sentences.T
        assert starts[0] == 0 and ends[-1] == len(row.body_tokens)
        assert (starts[1:] == ends[:-1]).all() and (starts < ends).all()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_long_sentences_are_cut_between_words_that_fit(name, script):
    """The text has no ends of sentences, so that every cut is one of a long sentence."""
    text = " ".join([*regex.sub(r"[^\w\s\p{M}\p{So}\p{Sk}\p{Cf}]", "", SCRIPTS[script]).split()] * 40)
    rows = passages(name, text, 64)
    room = 61
    for place in cuts(text, rows):
        begin, end = text.rfind(" ", 0, place) + 1, text.find(" ", place)
        word = text[begin : end if end >= 0 else len(text)]
        assert begin == place or len(tokenizer(name).encode(f" {word}").ids) > room
        assert not unicodedata.combining(text[place])


def test_text_without_spaces_is_not_cut_within_a_word_of_another_script():
    rows = passages("lower case", "使用python的港口" * 60, 32)
    assert len(rows) > 10 and sum(row.text.count("python") for row in rows) == 60


def test_sentences_without_a_token_stay_beside_those_that_have_some():
    text = f"\u200b\n\nthe the.\n\n\u2060\n\n{'the ' * 30}\n\n\u200b"
    rows = passages("whole words", text, 16)
    cuts(text, rows)
    assert rows[0].text == "\u200b\n\nthe the.\n\n\u2060" and rows[-1].text.endswith("the \n\n\u200b")


@pytest.mark.parametrize("text", ["\u200b", "\u0301 \u0301\n\n\u200b", " \n", ""])
def test_a_text_without_a_token_is_wordless(text):
    packer = PassagePacker(tokenizer("lower case"), 64, "rules")
    rows, summary = packer([Article("a", "T", text), Article("b", "T", "the")])
    assert [row.document_id for row in rows] == ["b"] and summary.wordless == ["a"]


def test_a_letter_with_more_tokens_than_a_passage_stays_whole_in_the_text():
    text = "the a" + "\u0301" * 60 + " the end"
    rows = passages("bytes", text, 16)
    assert all(len(row.body_tokens) <= 13 for row in rows)
    cuts(text, rows)
    assert sum("\u0301" in row.text for row in rows) == 1


@pytest.mark.parametrize("name", ["bytes", "Unigram"])
def test_white_space_at_the_end_makes_no_passage(name):
    for length in range(40, 60):
        rows = passages(name, f"{'the ' * length} \n", 16)
        assert all(row.text for row in rows)
