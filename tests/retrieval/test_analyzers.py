"""The terms of BM25 by language: a passage that another form of its words finds, and what happens without a library."""

import importlib
import unicodedata
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realm_jax.data.languages import BIGRAMS, CHOICES, LANGUAGES, PLAIN, most_common_language
from realm_jax.errors import UserError
from realm_jax.retrieval import analyzers
from realm_jax.retrieval.analyzers import available, check_available, library_versions, terms
from realm_jax.retrieval.bm25 import ABOUT, FOLDER, Bm25, language_of, load_or_build, save_index
from realm_jax.storage import read_json

MODULES = {"ja": "sudachipy", "ko": "lindera", "th": "pythainlp", "zh": "rjieba"}
# A passage, another one in the same language, and a question that shares no whole word with the first.
TEXTS = {
    "ar": ("المكتبة مغلقة في الشتاء.", "يسكن أخي في بيت كبير.", "مكتبة"),
    "ca": ("Els ports estan tancats a l'hivern.", "La muntanya és molt alta.", "port tancat"),
    "cs": ("Přístavy jsou v zimě zavřené.", "Hora je velmi vysoká.", "přístav"),
    "da": ("Havnene er lukkede om vinteren.", "Bjerget er meget højt.", "havn"),
    "de": ("Die Häfen sind im Winter geschlossen.", "Der Berg ist sehr hoch.", "Hafen"),
    "el": ("Τα λιμάνια είναι κλειστά τον χειμώνα.", "Το βουνό είναι πολύ ψηλό.", "λιμάνι"),
    "en": ("The harbors are closed in winter.", "The mountain is very high.", "closing harbor"),
    "eo": ("La havenoj estas fermitaj vintre.", "La monto estas tre alta.", "haveno"),
    "es": ("Los puertos están cerrados en invierno.", "La montaña es muy alta.", "puerto cerrado"),
    "et": ("Sadamad on talvel suletud.", "Mägi on väga kõrge.", "sadam"),
    "eu": ("Portuak itxita daude neguan.", "Mendia oso altua da.", "portu"),
    "fa": ("بندرها در زمستان بسته هستند.", "کوه بسیار بلند است.", "بندر"),
    "fi": ("Satamat ovat talvella kiinni.", "Vuori on hyvin korkea.", "satama"),
    "fr": ("Les ports sont fermés en hiver.", "La montagne est très haute.", "port fermé"),
    "hi": ("बंदरगाहों में जहाज़ रुके हुए हैं।", "पहाड़ बहुत ऊँचा है।", "बंदरगाह"),
    "hu": ("A kikötők télen zárva vannak.", "A hegy nagyon magas.", "kikötő"),
    "hy": ("Նավահանգիստները փակ են ձմռանը։", "Լեռը շատ բարձր է։", "նավահանգիստ"),
    "id": ("Pelabuhan itu ditutup pada musim dingin.", "Gunung itu sangat tinggi.", "berlabuh"),
    "it": ("I porti sono chiusi d'inverno.", "La montagna è molto alta.", "porto chiuso"),
    "ja": ("港は冬に閉じられています。", "山はとても高いです。", "港を閉じる"),
    "ko": ("항구는 겨울에 닫힌다.", "산이 아주 높다.", "항구가 겨울이다"),
    "lt": ("Uostai žiemą uždaryti.", "Kalnas labai aukštas.", "uostas"),
    "ne": ("बन्दरगाहहरू जाडोमा बन्द हुन्छन्।", "पहाड धेरै अग्लो छ।", "बन्दरगाह"),
    "nl": ("De boten liggen in de haven.", "De berg is erg hoog.", "boot"),
    "no": ("Havnene er stengt om vinteren.", "Fjellet er veldig høyt.", "havn"),
    "pl": ("Porty są zamknięte zimą.", "Góra jest bardzo wysoka.", "port"),
    "pt": ("Os portos estão fechados no inverno.", "A montanha é muito alta.", "porto fechado"),
    "ro": ("Pescarii sunt în port.", "Muntele este foarte înalt.", "pescari"),
    "ru": ("Порты закрыты зимой.", "Гора очень высокая.", "порт закрыт"),
    "sr": ("Луке су затворене зими.", "Планина је веома висока.", "лука"),
    "sv": ("Hamnarna är stängda på vintern.", "Berget är mycket högt.", "hamn"),
    "ta": ("துறைமுகங்கள் குளிர்காலத்தில் மூடப்படுகின்றன.", "மலை மிகவும் உயரமானது.", "துறைமுகம்"),
    "th": ("ท่าเรือปิดในฤดูหนาว", "ภูเขาสูงมาก", "ฤดูหนาว"),
    "tr": ("Limanda gemiler var.", "Dağ çok yüksek.", "limanın"),
    "zh": ("北京大学图书馆冬天不开门。", "这座山很高。", "大学图书馆"),
}  # fmt: skip


def needs_library(language: str) -> None:
    if language in MODULES and find_spec(MODULES[language]) is None:
        pytest.skip(f"{MODULES[language]} is not installed")


@pytest.mark.parametrize("language", TEXTS)
def test_a_passage_is_found_by_other_forms_of_its_words_and_not_by_plain_words(language):
    needs_library(language)
    passage, other, question = TEXTS[language]
    assert Bm25([other, passage], language).search([question], 1).tolist() == [[1]]
    assert Bm25([other, passage], PLAIN).search([question], 1).tolist() == [[-1]]


@pytest.mark.parametrize("language", ["ja", "ko", "th", "zh"])
def test_pairs_of_characters_find_a_passage_without_a_library(language):
    passage, other, question = TEXTS[language]
    assert Bm25([other, passage], BIGRAMS).search([question], 1).tolist() == [[1]]


def test_every_language_has_terms_and_is_in_a_test():
    for language in LANGUAGES:
        needs_library(language)
        assert terms("Python 3 ship", language) == terms("python 3 SHIP", language) != []
    assert {*LANGUAGES} - {*TEXTS} == {"ga", "yi"}  # two stemmers that change few of their words


@pytest.mark.parametrize(
    "language, text, expected",
    [
        (BIGRAMS, "使用Python的港口", ["使用", "使", "用", "python", "的港", "港口", "的", "港", "口"]),
        (BIGRAMS, "ｶﾞ, ガギグ", ["ガ", "ガギ", "ギグ"]),  # half-width forms are the same letters
        (BIGRAMS, "เรือ on 3", ["เรื", "รือ", "on", "3"]),  # marks belong to their letter
        ("ja", "彼は港へ行った。", ["彼", "港", "行く"]),
        ("ko", "항구에서 배웠다", ["항구", "배우"]),
        ("th", "ท่าเรือปิดในฤดูหนาว", ["ท่าเรือ", "ปิด", "ใน", "ฤดูหนาว"]),
        ("zh", "港口冬天关闭。", ["港口", "冬天", "关闭"]),
    ],
)
def test_terms_are_these(language, text, expected):
    needs_library(language)
    assert terms(text, language) == expected


scripts = st.sampled_from(["港口", "フネ", "배는", "ท่าเรือ", "ship", "Порт", " ", "。", "3", "é"])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the first draw reads a table of Unicode
@given(st.lists(scripts | st.text(max_size=3), max_size=12).map("".join))
def test_pairs_of_characters_lose_no_letter(text):
    letters = {one for one in unicodedata.normalize("NFKC", text).lower() if one.isalnum()}
    assert letters <= {*unicodedata.normalize("NFKC", "".join(terms(text, BIGRAMS)))} | {"\u0307"}


@pytest.mark.parametrize("language", ["th", "zh"])
@settings(deadline=None)  # the first text loads the library
@given(st.lists(scripts, max_size=12).map("".join))
def test_words_of_a_library_lose_no_letter(language, text):
    needs_library(language)
    letters = {one for one in unicodedata.normalize("NFKC", text).lower() if one.isalnum()}
    assert letters <= {*"".join(terms(text, language))}


def test_a_text_longer_than_the_japanese_library_takes_is_read():
    needs_library("ja")
    assert terms("港は閉じた。" * 10_000, "ja").count("港") >= 9_990


class Shelf:
    """A passage store of texts."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.fingerprint = texts, str(hash(texts))

    def __len__(self):
        return len(self.texts)

    def title(self, row):
        return ""

    def text(self, row):
        return self.texts[row]


JAPANESE = Shelf(*(TEXTS["ja"][number] for number in (1, 0)))


@pytest.fixture
def no_library(monkeypatch):
    """A machine without the libraries of languages."""
    monkeypatch.setattr(analyzers, "_version", lambda package: None)
    for cached in (analyzers._analyzer, analyzers._warn_of_missing, load_or_build):
        cached.cache_clear()
    yield
    for cached in (analyzers._analyzer, analyzers._warn_of_missing, load_or_build):
        cached.cache_clear()


def test_a_detected_language_without_its_library_is_matched_by_pairs_with_a_warning(no_library, caplog):
    assert language_of(JAPANESE) == BIGRAMS and available("ja") == BIGRAMS and available("de") == "de"
    assert caplog.text.count("texts without sudachipy and sudachidict-small") == 1
    assert "pip install -e '.[languages]'" in caplog.text


def test_a_language_of_the_config_without_its_library_raises_an_error(no_library):
    message = (
        r"^config\.retrieval\.language=ja: needs sudachipy and sudachidict-small; run `pip install "
        r"-e '.\[languages\]'` in your clone of realm_jax, or set config\.retrieval\.language=bigrams$"
    )
    with pytest.raises(UserError, match=message):
        check_available("ja")
    with pytest.raises(UserError, match=message):
        terms("港", "ja")
    check_available("en")
    check_available("")


def test_an_index_of_another_analyzer_is_rebuilt(tmp_path, monkeypatch, caplog):
    needs_library("ja")
    save_index(JAPANESE, "", tmp_path)
    (folder,) = (tmp_path / FOLDER).iterdir()
    assert read_json(folder / ABOUT)["libraries"] == library_versions("ja") != ""
    load_or_build.cache_clear()
    assert load_or_build(JAPANESE, "", tmp_path).search(["港を閉じる"], 1).tolist() == [[1]] and not caplog.text
    monkeypatch.setattr(analyzers, "_version", lambda package: "0.0")
    load_or_build.cache_clear()
    load_or_build(JAPANESE, "", tmp_path)
    assert "rebuilding the index" in caplog.text
    save_index(JAPANESE, "", tmp_path)
    assert "sudachipy 0.0" in read_json(folder / ABOUT)["libraries"]
    load_or_build.cache_clear()


def test_an_index_of_pairs_is_rebuilt_once_the_library_is_there(tmp_path, no_library, monkeypatch, caplog):
    save_index(JAPANESE, "", tmp_path)
    (folder,) = (tmp_path / FOLDER).iterdir()
    assert read_json(folder / ABOUT)["language"] == BIGRAMS
    monkeypatch.undo()
    needs_library("ja")
    load_or_build.cache_clear()
    assert load_or_build(JAPANESE, "", tmp_path).language == "ja"
    assert "was built from pairs of characters; rebuilding" in caplog.text


def test_the_record_of_an_english_index_has_the_same_keys_as_ever(tmp_path):
    save_index(Shelf("The harbors are closed."), "en", tmp_path)
    (folder,) = (tmp_path / FOLDER).iterdir()
    assert [*read_json(folder / ABOUT)] == ["digest", "size", "language", "empty", "files"]


@pytest.mark.parametrize("texts, found", [([], (PLAIN, "")), (["Cảng đóng cửa vào mùa đông."] * 3, (PLAIN, "vi"))])
def test_a_language_without_rules_has_plain_words(texts, found):
    assert most_common_language(texts) == found


@pytest.mark.parametrize("language", sorted({*TEXTS} - {"no", "sr"}))
def test_a_language_is_detected_by_its_passages(language):
    passage, other, _ = TEXTS[language]
    assert most_common_language([f"{passage} {other}"])[0] == language


def test_khmer_and_lao_are_matched_by_pairs():
    assert most_common_language(["កំពង់ផែបិទនៅរដូវរងា។ កប៉ាល់នៅឯណា?"]) == (BIGRAMS, "km")
    assert most_common_language(["ທ່າເຮືອປິດໃນລະດູໜາວ"]) == (BIGRAMS, "lo")
    assert {BIGRAMS, PLAIN, *LANGUAGES} == {*CHOICES}


def test_the_modules_of_the_libraries_are_those_that_are_imported():
    for language, module in MODULES.items():
        needs_library(language)
        assert importlib.import_module(module) and "None" not in library_versions(language)
