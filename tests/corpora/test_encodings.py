"""Texts of many encodings are decoded, and how sure that is gets counted."""

from collections import Counter

import pytest

from realm_jax.corpora.encodings import OTHER_ENCODINGS, REPLACED, decode, find_encoding
from realm_jax.data.lines import BadRecord

pytest.importorskip("chardet")

TEXTS = {
    "cp1252": "Rapport du port.\nLe port est fermé en hiver à cause de la glace, près du vieux phare.",
    "cp1250": "Zażółć gęślą jaźń. Port jest zamknięty w zimie z powodu lodu, a światło latarni świeci.",
    "cp1251": "Порт закрыт зимой из-за льда, и сторожа сидят у огня.",
    "koi8-r": "Порт закрыт зимой из-за льда, и сторожа сидят у огня.",
    "cp1253": "Το λιμάνι είναι κλειστό τον χειμώνα εξαιτίας του πάγου, και οι φύλακες κάθονται.",
    "cp1254": "Öğrenciler kütüphanede çalışıyor. Yağmur yağıyor.",
    "cp1255": "הנמל סגור בחורף בגלל הקרח, והשומרים יושבים ליד האש.",
    "cp1256": "الميناء مغلق في الشتاء بسبب الجليد، والحراس يجلسون قرب النار.",
    "cp1257": "Uostas žiemą uždarytas dėl ledo, o sargai sėdi prie ugnies. Ąžuolas žydi čia šįvakar.",
    "tis-620": "ท่าเรือปิดในฤดูหนาวเพราะน้ำแข็ง และยามนั่งข้างกองไฟ",
    "shift_jis": "これは日本語の文章です。天気について書いています。",
    "euc_jp": "これは日本語の文章です。天気について書いています。",
    "iso2022_jp": "これは日本語の文章です。天気について書いています。",
    "gb18030": "港口冬天因结冰而关闭，守夜人坐在火边。",
    "big5": "港口冬天因結冰而關閉，守夜人坐在火邊。",
    "euc_kr": "항구는 겨울에 얼음 때문에 닫히고 경비원들은 불 옆에 앉아 있다.",
    "utf-8": "Frühling 港口 ท่าเรือ",
    "utf-8-sig": "Frühling",
    "utf-16": "Frühling 港口",
    "utf-32": "Frühling 港口",
}


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("encoding", TEXTS)
def test_decode_finds_the_encoding_with_and_without_a_final_newline(encoding, end):
    text = TEXTS[encoding] + end
    assert decode(text.encode(encoding), Counter()) == text


@pytest.mark.parametrize(
    "text",
    [
        "# Hafen\n\nDer Hafen ist im Frühling für große Schiffe geöffnet.",
        "id,title,text\n1,A,plain words\n2,B,Le café à côté du quai",
        "Le café est fermé à midi.",
        "El café está cerrado.",
        *("naïve", "10 µg/mL ± 0.5", "# 25 °C", "señor Peña", "£5", "Zoë", "Þór", "À Paris", "“q”"),
        "The keeper said “the lamp is lit” and didn’t look back – it was late.",
    ],
)
def test_decode_does_not_take_a_short_latin_text_for_another_alphabet(text):
    assert decode(text.encode("cp1252"), Counter()) == text


@pytest.mark.parametrize("encoding", ["cp1251", "cp1253", "cp1255", "cp1250", "shift_jis", "tis-620"])
def test_decode_finds_a_sentence_in_another_language_within_english(encoding):
    english = "The keeper wrote in the book that all vessels had left the bay before the ice came. " * 8
    text = f"{english}{TEXTS[encoding]} {english}"
    assert decode(text.encode(encoding), Counter()) == text


def test_decode_counts_the_encoding_and_its_confidence():
    notes: Counter[tuple[str, str]] = Counter()
    decode(TEXTS["cp1255"].encode("cp1255"), notes)
    ((kind, name),) = notes
    assert kind == OTHER_ENCODINGS and name.startswith("cp1255 (confidence 0.")
    assert not [notes for notes in [Counter()] if decode(b"plain", notes) and notes]


@pytest.mark.parametrize("stray", [b"\xff", b"\xe9", b"\x80", b"\xc3", b"\0"])
@pytest.mark.parametrize("at", ["start", "middle", "end"])
def test_a_stray_byte_in_utf_8_changes_nothing_but_itself(stray, at):
    line = "It’s a café in the old harbour.\n"
    before, after = {"start": ("", line * 40), "middle": (line * 20, line * 20), "end": (line * 40, "")}[at]
    notes: Counter[tuple[str, str]] = Counter()
    assert decode(before.encode() + stray + after.encode(), notes) == f"{before}\ufffd{after}"
    assert notes == {(REPLACED, ""): 1}


@pytest.mark.parametrize(
    ("declared", "encoding", "text"),
    [
        ('<meta charset="windows-1251">', "cp1251", "Порт."),
        ('<META HTTP-EQUIV="Content-Type" CONTENT="text/html; charset=ISO-8859-1">', "cp1252", "“Café” – 5 €"),
        ("<meta charset='gb2312'>", "gb18030", "港口冬天因结冰而关闭，镕。"),
        ('<?xml version="1.0" encoding="iso-8859-2"?>', "iso8859-2", "zażółć gęślą"),
        ("<meta charset=utf-8>", "cp1252", "Le café est fermé à midi."),
        ("<meta charset=hex>", "cp1252", "Le café est fermé à midi."),
        ("<meta charset=no-such>", "cp1252", "Le café est fermé à midi."),
        ("<meta charset=iso-8859-1>", "utf-8", "Straße in 港口"),
        ("<meta charset=utf-8>", "utf-8", "日本語 \x1b$"),
    ],
)
def test_a_page_is_decoded_as_browsers_do(declared, encoding, text):
    assert decode(f"{declared}<p>{text}".encode(encoding), Counter(), is_page=True).endswith(text)


def test_the_whole_text_decides_however_it_is_cut_into_chunks():
    data = b"plain words, nothing else\n" * 500 + TEXTS["cp1256"].encode("cp1256")
    for size in (1, 7, 1000, len(data)):
        assert find_encoding(data[n : n + size] for n in range(0, len(data), size)).name == "cp1256"
    text = TEXTS["utf-8"].encode()
    assert find_encoding(text[n : n + 1] for n in range(len(text))).name == "utf-8"


@pytest.mark.parametrize("data", [b"\x7fELF\0\1\0\0", bytes(range(128, 256)) * 4])
def test_find_encoding_raises_if_the_bytes_are_no_text(data):
    with pytest.raises(BadRecord):
        find_encoding([data])
