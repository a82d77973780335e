"""Sentences: cases judged by hand in both forms of text, and nothing lost on any text."""

import gzip
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.sentences import split

PASSAGES = Path(__file__).resolve().parents[3] / "shared" / "data" / "wiki_qa" / "passages.jsonl.gz"

# Each case is the sentences of one text, joined by a space.
PROSE = [
    ["He was born in 1843.", "He died in 1901."],
    ["Dr. Smith met Mr. Jones at 5 p.m. on Friday.", "They talked."],
    ["J. R. R. Tolkien wrote The Hobbit.", "It sold well."],
    ["The U.S. Navy sank it.", "Nobody died."],
    ["He moved to the U.S.", "In 1950 he died."],
    ['"Is it you?" he asked.', '"Yes."'],
    ['He said, "I will go."', "Then he left."],
    ["It cost $3.50 in 1990.", "Now it costs $5.25."],
    ["Wait...", "What was that?"],
    ["He paused ... and went on.", "Then he sat."],
    ["The species E. coli is common.", "It lives in the gut."],
    ["See fig. 3 for details.", "Results vary."],
    ["He lived from c. 1400 to 1450.", "He was a monk."],
    ["St. Paul's Cathedral is in London.", "It is large."],
    ["The company, Apple Inc., was founded in 1976.", "It is big."],
    ["He joined Apple Inc. in 1980.", "He left soon."],
    ["She has a Ph.D. in physics.", "She teaches."],
    ["The band (formed in 1990.) played.", "Fans came."],
    ["He likes vitamin C.", "It helps."],
    ["What a game!", "The crowd roared.", "Who won?", "Nobody knew."],
    ["Yahoo! was founded in 1994.", "It grew."],
    ["He came to No. 10 Downing Street.", "He waited."],
    ["Vol. 3 appeared in Jan. 1910.", "Vol. 4 followed."],
    ["It was 3.5 km long.", "The road ended."],
    ["Visit example.com for more.", "It is free."],
    ["He was the son of John Smith Jr. and Mary.", "He had no children."],
    ["It happened in the 5th century B.C. in Greece.", "It was a war."],
    ["He earned a B.A. from Yale.", "He then moved."],
    ["The 2nd ed. was printed.", "It sold."],
    ["They won (see below).", "However, they lost later."],
    ["George W. Bush was president.", "He was from Texas."],
    ["The plan was simple: attack at dawn.", "It failed."],
    ["The album Help! was released in 1965.", "It topped the charts."],
    ["The list: 1. apples 2. pears.", "It ended."],
    ['He said that it was "great."', "She agreed."],
    ["The temperature was -5.3 °C.", "It froze."],
    ["The war ended.[3]", "It began in 1914.[4]"],
    ["In Washington, D.C., he worked.", "He retired."],
    ["He lives in Washington, D.C.", "His wife does too."],
    ["Gen. Robert E. Lee surrendered.", "The war ended."],
    ["The case Brown v. Board of Education was decided.", "It mattered."],
    ["It measured approx. 20 ft. in length.", "It sank."],
    ["'Tis done.", "So be it."],
    ["He lived at 12 Main St. in Boston.", "He was happy."],
    ["Sen. Obama won.", "2008 was a big year."],
    ["The ship left at 10 a.m.", "It arrived at noon."],
    ["Martin Luther King Jr. led it.", "Many came."],
    ['"Stop!" he cried.', "No one did."],
    ["Was it true?!", "Yes, it was."],
]

NEWS = [
    ["LONDON (Reuters) - Britain's economy grew by 0.3 percent.", "Analysts had expected 0.4 percent."],
    ["WASHINGTON, D.C. (AP) — The Senate voted 52-48 on Tuesday.", "Sen. John Roe (R-Ariz.) left."],
    ["SALEM, Ore. (AP) — A man was shot at 3 a.m. Sunday.", "The police have no suspect."],
    ["FRANKFURT, Germany, Oct. 3 (Xinhua) -- German shares closed higher.", "The DAX added 1.2 pct."],
    ["NEW YORK -- Apple Inc. (NASDAQ: AAPL) rose 2.5% to $175.30.", "Microsoft Corp. (MSFT.O) fell."],
    ["“We will not stop,” Mr. Jones said.", "“We can’t.”", "“Why not?” she asked."],
    ['Mr. Roe tweeted: "VOTE NOW!"', "He later deleted it.", '"It was a mistake."'],
    ["• Police came on Friday.", "• Two men were held.", "• A third fled."],
    ["Former Pa. Gov. Ed Roe spoke.", "Atty. Gen. Jane Doe and Det. Sgt. Jim Poe listened."],
    ["He fell ill.", "Doctors came.", "He attended Mass.", "The priest waited."],
    ["United won 3-1 vs. Chelsea at 3:00 p.m. ET.", "No. 2 Duke beat No. 12 UNC.", "J.J. Roe had 20 points."],
    ["The case is Roe v. Doe, No. 17-1234.", "Reuters's poll was on http://example.com/abc."],
]

TOKENISED = [
    ["He was born in 1998 .", "He was tall ."],
    ["The film stars J. R. R. Tolkien .", "It is long ."],
    ["`` I am here , '' he said .", "`` So am I . ''"],
    ["He said `` go . ''", "Then he left ."],
    ["The U.S. Navy ( USN ) sank it .", "It was 1942 ."],
    ["Mr. Smith of St. Louis came .", "He saw ."],
    ["It cost 3.5 million .", "It is 20 % more ."],
    ["Did he go ?", "He did !", "Well ..."],
    ["Washington , D.C. is a city .", "It is big ."],
    ["It was released in Jan. 1990 .", "It sold ."],
    ["He ( born c. 1400 ) died .", "He was a monk ."],
    ["The song `` Help ! '' was a hit .", "It sold ."],
    ["The game was released in the U.S. on May 5 .", "It sold ."],
    ["Apple Inc. was founded in 1976 .", "It is big ."],
    ["She was born to John Smith Jr. and Mary .", "She sang ."],
    ["( He was ill . )", "He died ."],
]


def sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in split(text)]


def test_a_blank_line_always_ends_a_sentence_and_a_line_end_does_not() -> None:
    wanted = ["A heading", "The first line\ngoes on.", "The end", "last"]
    assert sentences("A heading\n\nThe first line\ngoes on. The end\r\n\r\nlast") == wanted


SCRIPTS = [
    ["बंदरगाह बंद है।", "जहाज कहाँ हैं?", '"वे रुके हैं।"', "श्लोक समाप्त॥", "अंत।[1]", "फिर।"],
    ["বন্দর বন্ধ।", "জাহাজ কোথায়?", "এখানে।"],
    ["أين السفن؟", "هنا.", "حقا؟!", "«لماذا؟»", "لا أعرف"],
    ["بندرگاہ بند ہے۔", "جہاز کہاں ہیں؟", "وہ پی۔ایچ۔ڈی ہے۔", "یہاں۔"],
    ["Նավահանգիստը փակ է։", "Ժամը 10։30 է։", "Վերջ։"],
    ["ወደቡ ይዘጋል።", "መርከቦቹ የት ናቸው፧", "እዚህ።"],
    ["ဆိပ်ကမ်း ပိတ်သည်။", "သင်္ဘော။"],
    ["កំពង់ផែបិទ។", "កប៉ាល់នៅឯណា៕", "ទីនេះ"],
    ["བཀྲ་ཤིས། །", "བདེ་ལེགས།"],
    ["וְהָאָרֶץ הָיְתָה תֹהוּ׃", "וַיֹּאמֶר׃"],
]


@pytest.mark.parametrize("expected", [*PROSE, *NEWS, *TOKENISED, *SCRIPTS], ids=lambda case: case[0][:30])
def test_sentences_are_those_judged_by_hand(expected: list[str]) -> None:
    assert sentences(" ".join(expected)) == expected


LANGUAGES = [
    ("ar", ["قابل د. أحمد الصحفيين في القاهرة.", "ثم غادر المدينة.", "هل عاد؟", "لا أحد يعلم."]),
    ("cs", ["Narodil se 3. května 1901 v Praze, např. jako MUDr. Novák.", "Zemřel roku 1950.", "Proč?"]),
    ("da", ["Han rejste ca. 3. Juli med hr. Jensen.", "Så kom han hjem.", "De boede i nr. 5."]),
    ("de", [
        "Am 3. Oktober 1990 war z. B. Dr. Müller in Berlin.", "Er blieb bis zum 5.", "Die Stadt feierte usw.",
        "Danach fuhr er nach St. Gallen.", "Das 19. Jahrhundert endete.", "Siehe Abb. 3 auf S. 12.", "Ist das klar?",
        "„Ja.“", "Und heute?",
    ]),
    ("el", ["Πού είναι τα πλοία;", "Το λιμάνι είναι κλειστό.", "Ο κ. Παππάς έφυγε στις 5 μ.μ. Δευτέρα."]),
    ("en", ["Dr. Smith met Mr. Jones at 5 p.m. on Friday.", "They talked; nobody listened."]),
    ("es", ["El Sr. García vive en EE. UU. desde 1990.", "¿Dónde está la Sra. López?", "Compró pan, leche, etc.",
            "Luego se fue."]),
    ("fi", ["Hän syntyi 3. Huhtikuuta klo 5.", "Hän asui esim. Turussa.", "Miksi?"]),
    ("fr", ["M. Dupont et Mme Curie sont arrivés.", "« Où ? »", "Ils ont vu p. ex. Paris, Lyon, etc.",
            "Ensuite ils sont partis vers l'av. Foch."]),
    ("hi", ["डॉ. शर्मा कल आए।", "वे कहाँ हैं?", "पता नहीं।"]),
    ("hu", ["A 3. Fejezet ill. Dr. Kovács könyve.", "A kikötő zárva van.", "Miért?"]),
    ("hy", ["Նավահանգիստը փակ է։", "Ո՞ւր է նավը։"]),
    ("it", ["Il sig. Rossi abita in p. Verdi, n. 5.", "La città è bella.", "Vide Roma, Pisa ecc.", "Poi partì."]),
    ("ja", ["港は冬に閉じる。", "船はどこ？", "「待つ。」", "幅は3．5メートルだ．", "終わり"]),
    ("ko", ["항구는 겨울에 닫힌다.", "배는 어디에 있습니까?", "모른다!"]),
    ("nl", ["Dhr. de Vries kocht o.a. brood, melk enz.", "Daarna ging hij naar huis.", "Waarom?"]),
    ("pl", ["Prof. Nowak mieszka przy ul. Długiej.", "Kupił chleb, mleko itd.", "Potem wrócił."]),
    ("pt", ["O Sr. Silva mora na Av. Paulista.", "Comprou pão, leite, etc.", "Depois foi embora.", "Por quê?"]),
    ("ru", ["Он жил на ул. Ленина в г. Москве.", "Там, т. е. дома, было тихо и т. д.", "Потом он уехал.", "См. рис. 3.",
            "Где он?"]),
    ("sv", ["Hr. Larsson köpte bröd, mjölk osv.", "Han bor på nr. 5.", "Varför?"]),
    ("th", ["ท่าเรือแห่งนี้ปิดให้บริการตลอดฤดูหนาวเพราะน้ำในอ่าวกลายเป็นน้ำแข็งทั้งหมด",
            "เรือประมงจึงต้องจอดรออยู่ที่ท่าจนกว่าจะถึงเดือนเมษายน ชาวบ้านรอ"]),
    ("tr", ["Sn. Yılmaz ve Prof. Demir 20. Yüzyıl tarihini yazdı.", "Bu kitap uzun.", "Ekmek, süt vb.",
            "Daha sonra gitti."]),
    ("zh", ["港口冬天关闭。", "船在哪里？", "“等一等！”", "宽3．5米．", "完"]),
]  # fmt: skip


@pytest.mark.parametrize("language, expected", LANGUAGES, ids=lambda case: case if isinstance(case, str) else "")
def test_sentences_of_a_language_end_where_its_readers_end_them(language: str, expected: list[str]) -> None:
    text = " ".join(expected)
    assert [text[start:end] for start, end in split(text, language)] == expected


def test_abbreviations_count_only_in_their_language() -> None:
    text = "Er kam z. B. Montag."
    assert len(split(text, "de")) == 1 and len(split(text)) == len(split(text, "fr")) == 2
    assert len(split("Πού είναι; Εδώ.", "el")) == 2 and len(split("Πού είναι; Εδώ.")) == 1


@pytest.mark.parametrize("expected", [["東京は首都です。", "人口は多い。"], ["वह आया।", "वह गया।।", "अंत"]])
def test_ideographic_full_stops_and_dandas_need_no_space(expected: list[str]) -> None:
    assert sentences("".join(expected)) == expected


@pytest.mark.parametrize("mark", ["\u0301", "\u093c", "\u200d", "\ufe0f"])
def test_no_sentence_begins_with_a_mark(mark: str) -> None:
    for stop in ("One. ", "है।", "है। ", "好。", "One\n\n", "One.\n \n "):
        assert sentences(f"{stop}{mark}Two. Three.") == [f"{stop}{mark}Two.", "Three."]


@given(
    st.text(st.sampled_from("Ab1 .!?…\"'()[]\n“”`。,;．ก์")) | st.text(),
    st.sampled_from(["none", "el", "ja", "de", "th"]),
)
def test_any_text_is_covered_in_order_without_outer_white_space(text: str, language: str) -> None:
    ranges = split(text, language)
    last = 0
    for start, end in ranges:
        assert last <= start < end <= len(text)
        assert text[last:start].strip() == "" and text[start:end] == text[start:end].strip()
        last = end
    assert text[last:].strip() == ""


@pytest.mark.parametrize("unit", [" ", ". ", ".", '"', "\n", "! ", "''", '. "', "[", ". A", ". ''", "ก ", "ก", "; "])
def test_no_text_takes_quadratic_time(unit: str) -> None:
    began = time.perf_counter()
    split(unit * 20_000, "th" if "ก" in unit else "el")
    assert time.perf_counter() - began < 5


@pytest.mark.skipif(not PASSAGES.exists(), reason="the Wikipedia passages are not on this machine")
def test_real_passages_give_sentences_of_usual_length() -> None:
    with gzip.open(PASSAGES, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines][::10]
    words = [len(sentence.split()) for text in texts for sentence in sentences(text)]
    assert 20 < sum(words) / len(words) < 32
    assert sum(count > 120 for count in words) < 0.005 * len(words)
    assert sum(count < 4 for count in words) < 0.01 * len(words)
