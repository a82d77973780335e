"""Near-duplicates: what stays follows from the set of articles alone, and copies are found as the curve says."""

import json
import lzma
import math
import re
import tempfile
from collections import Counter
from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_news import made_texts, without_copies

from realm_jax.corpora import near_duplicates
from realm_jax.corpora.near_duplicates import (
    BANDS,
    FINGERPRINT,
    HASHES,
    REASONS,
    ROWS,
    SHINGLE,
    find_near_duplicates,
    fingerprint,
    signature,
)
from realm_jax.corpora.outcomes import Article
from realm_jax.errors import UserError


def shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1))}


def jaccard(one: str, other: str) -> float:
    return len(shingles(one) & shingles(other)) / len(shingles(one) | shingles(other))


def edited(text: str, rate: float, rng: Random) -> str:
    return " ".join(rng.choice(["bread", "salt", "wine"]) if rng.random() < rate else word for word in text.split())


def staying(articles: list[Article]) -> list[Article]:
    return without_copies(articles)[0]


def made(key: bytes, identity: bytes, text: bytes, bands: bytes, sketch: bytes) -> np.ndarray:
    return np.frombuffer(key + identity + text + bands + sketch, FINGERPRINT)


def key_of(one: np.ndarray) -> bytes:
    return one["key"].tobytes()


def bands_of(one: np.ndarray) -> list[int]:
    return one["bands"][0].tolist()


def agree_often(one: np.ndarray, other: np.ndarray) -> bool:
    return (one["sketch"] == other["sketch"]).sum() >= math.ceil(HASHES * (0.8 + 0.2 / 256))


# --- The rules --------------------------------------------------------------------------------------------------------


def by_definition(fingerprints: list[np.ndarray], leaders: int) -> set[bytes]:
    """The keys that stay, by comparing everything with everything."""
    alone = [
        one
        for one in fingerprints
        if not any(
            key_of(other) < key_of(one) and (other["id"] == one["id"] or other["text"] == one["text"])
            for other in fingerprints
        )
    ]
    staying = set()
    for one in alone:
        for place, band in enumerate(bands_of(one)):
            group = sorted(key_of(other) for other in alone if bands_of(other)[place] == band)[:leaders]
            if any(key_of(o) in group and key_of(o) < key_of(one) and agree_often(one, o) for o in alone):
                break
        else:
            staying.add(key_of(one))
    return staying


def made_fingerprints(rng: Random, count: int) -> list[np.ndarray]:
    """Few values of everything, so that all rules meet in most sets; sketches around the threshold of likeness."""
    bases = [bytes(rng.randrange(256) for _ in range(HASHES)) for _ in range(2)]
    found = {}
    for _ in range(count):
        sketch = bytearray(rng.choice(bases))
        for place in rng.sample(range(HASHES), rng.choice([0, 8, 12, 13, 25, 26])):
            sketch[place] ^= 1
        bands = b"".join(bytes([band, rng.randrange(3)]) + bytes(6) for band in range(BANDS))
        key, identity, text = (bytes([rng.randrange(most)] * size) for most, size in ((256, 16), (30, 8), (30, 8)))
        found[key] = made(key, identity, text, bands, bytes(sketch))
    return list(found.values())


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), count=st.integers(0, 24), leaders=st.sampled_from([1, 2, 64]))
def test_what_stays_follows_from_the_set_alone(seed, count, leaders):
    rng = Random(seed)
    fingerprints = made_fingerprints(rng, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_duplicates, "LEADERS", leaders)
        patch.setattr(near_duplicates, "_COMPARED", rng.choice([1, 3, 1 << 16]))
        expected = by_definition(fingerprints, leaders)
        for _ in range(3):
            shuffled = rng.sample(fingerprints, len(fingerprints))
            found = find_near_duplicates(shuffled)
            assert {key_of(one) for one, reason in zip(shuffled, found, strict=True) if not reason} == expected


def test_a_set_of_made_fingerprints_uses_every_rule():
    """The test above would say little if it did not."""
    found: Counter[int] = Counter()
    for seed in range(20):
        found.update(find_near_duplicates(made_fingerprints(Random(seed), 24)).tolist())
    assert set(found) == set(range(len(REASONS))) and min(found.values()) > 10


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_what_stays_of_edited_texts_does_not_depend_on_their_order(seed):
    rng = Random(seed)
    texts = made_texts(3, seed)
    texts += [edited(rng.choice(texts), rate, rng) for rate in (0, 0.003, 0.01, 0.01, 0.02, 0.02)]
    articles = [Article(f"{rng.randrange(12)}", "", text) for text in texts]
    first = staying(articles)
    assert {(article.id, article.text) for article in first} == {
        (article.id, article.text) for article in staying(rng.sample(articles, len(articles)))
    }
    assert len({article.id for article in first}) == len({article.text for article in first}) == len(first)


def test_what_stays_keeps_its_order_and_reasons_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, two, three, four = made_texts(4)
    articles = [
        Article("1", "", one),
        Article("2", "", two),
        Article("3", "", one),
        Article("4", "", f"{two} Agencies contributed."),
        Article("5", "", three),
        Article("5", "", f"{three} {four}"),
        Article("6", "", four),
    ]
    stayers, counts = without_copies(articles)
    kept = [articles.index(article) for article in stayers]
    assert kept == sorted(kept)
    assert [len({0, 2} & {*kept}), len({1, 3} & {*kept}), len({4, 5} & {*kept}), len({6} & {*kept})] == [1, 1, 1, 1]
    assert counts == {REASONS[1]: 1, REASONS[2]: 1, REASONS[3]: 1}
    assert list(tmp_path.iterdir()) == []


def test_the_same_article_twice_is_one():
    article = Article("a", "T", made_texts(1)[0])
    stayers, counts = without_copies([article] * 3)
    assert stayers == [article]
    assert counts == {REASONS[1]: 2}  # its id is the same too, but its text says more


def test_nothing_and_one_article_are_no_copies():
    assert staying([]) == []
    assert staying([Article("a", "", "")]) == [Article("a", "", "")]


def test_in_a_chain_of_edits_every_neighbour_of_a_smaller_key_goes():
    """One that is left out leaves out others: the price of deciding every group by itself."""

    def one(key: int, changed: range) -> np.ndarray:
        sketch = bytearray(HASHES)
        for place in changed:
            sketch[place] = 1
        return made(bytes([key]) * 16, bytes([key]) * 8, bytes([key]) * 8, bytes(BANDS * 8), bytes(sketch))

    first, second, third = one(1, range(0)), one(2, range(20)), one(3, range(40))
    assert not agree_often(first, third)
    assert find_near_duplicates([first, second, third]).tolist() == [0, 3, 3]
    assert find_near_duplicates([first, third]).tolist() == [0, 0]


def test_a_folder_that_cannot_be_written_to_is_the_users_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(UserError, match="cannot keep 288 bytes per article in .*absent"):
        find_near_duplicates([])


# --- Hashing ----------------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_the_same_for_ever():
    """Machines of one run, and runs of one corpus, must agree; a change of these bytes is a change of what stays."""
    one = fingerprint(
        Article("https://news.example/1", "Größe", "It was the best of times, it was the worst of times.")
    )
    assert [one[name].nbytes for name in FINGERPRINT.names] == [16, 8, 8, 8 * BANDS, HASHES]
    assert tuple(one[name].tobytes().hex() for name in ("key", "id", "text")) == (
        "b38b975312236155e4666038219d6b0a",
        "efb2c5087402aa01",
        "557be86720da5215",
    )
    bands, sketch = one["bands"].tobytes(), one["sketch"].tobytes()
    assert (bands[:8].hex(), bands[-8:].hex(), sketch[:8].hex()) == (
        "f1cda032f8979e59",
        "4be76fe59c4a2258",
        "b67918f346ade61d",
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("The Court, it said, will not rule.", "the court it SAID: will “not” rule"),
        ("a b c", "A, b; c!"),
        ("", " ... "),
    ],
)
def test_case_and_punctuation_do_not_count(one, other):
    np.testing.assert_array_equal(signature(one), signature(other))


def test_texts_of_other_words_have_other_signatures():
    texts = ["", "a", "b", "a b", "b a", "a b c d e", "b a c d e", "a b c d e f"]
    assert len({signature(text).tobytes() for text in texts}) == len(texts)


def test_bands_are_told_apart_by_their_number():
    keys = bands_of(fingerprint(Article("a", "", "")))  # all minima are the same
    assert len(set(keys)) == BANDS


@given(st.text() | st.text(st.sampled_from("ab \ud800é")))
def test_any_text_has_a_fingerprint(text):
    assert fingerprint(Article(text, text, text)).nbytes == 288


def test_equal_minima_estimate_the_share_of_common_shingles():
    rng = Random(0)
    errors = []
    for text in made_texts(300):
        other = edited(text, rng.choice([0.005, 0.02, 0.05, 0.1]), rng)
        errors.append((signature(text) == signature(other)).mean() - jaccard(text, other))
    assert abs(np.mean(errors)) < 0.01
    assert np.std(errors) < 0.045  # at most sqrt(0.25 / HASHES)


def test_the_curve_that_is_written_down_is_the_one_in_use():
    def row(name: str) -> list[float]:
        return [float(number) for number in re.search(rf"{name} +([\d. ]+)\n", near_duplicates.__doc__)[1].split()]

    likeness = np.array(row("J"))
    np.testing.assert_allclose(1 - (1 - likeness**ROWS) ** BANDS, row("share a band"), atol=6e-4)
    drawn = np.random.default_rng(0).random((40_000, HASHES))
    for share, chance in zip(likeness, row("and left out"), strict=True):
        equal = drawn < share
        banded = equal.reshape(-1, BANDS, ROWS).all(axis=2).any(axis=1)
        alike = (equal | (drawn > 1 - (1 - share) / 256)).sum(axis=1) >= near_duplicates._AGREE
        assert (banded & alike).mean() == pytest.approx(chance, abs=0.008)


# --- Real text --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sections(shared_data) -> list[str]:
    with lzma.open(shared_data / "wiki_articles" / "articles.jsonl.xz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, 250)]
    return [section for text in texts for section in text.split("\n\n") if 150 < len(section.split()) < 1500]


def test_no_section_of_an_encyclopedia_is_a_copy(sections):
    assert len(sections) > 1500
    articles = [Article(str(number), "", text) for number, text in enumerate(sections)]
    assert len(staying(articles)) == len(sections)


def test_edited_copies_are_found_and_others_are_not(sections):
    rng = Random(0)
    pairs = [(text, edited(text, rng.choice([0.002, 0.01, 0.02, 0.04, 0.08]), rng)) for text in sections[:600]]
    articles = [
        Article(f"{number} {side}", "", text) for number, pair in enumerate(pairs) for side, text in enumerate(pair)
    ]
    found = find_near_duplicates(map(fingerprint, articles)).reshape(-1, 2) > 0
    assert not found.all(axis=1).any()  # one of two always stays
    left_out = found.any(axis=1)
    likeness = np.array([jaccard(*pair) for pair in pairs])
    alike, unlike = likeness >= 0.9, likeness < 0.7
    assert alike.sum() > 150 and unlike.sum() > 100
    assert left_out[alike].mean() > 0.99
    assert left_out[unlike].mean() < 0.02
