"""Near-duplicates: what stays follows from the set of articles alone, and copies are found."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.corpora.articles import Article
from realm_jax.corpora.near_duplicates import (
    REASONS,
    drop_near_duplicates,
    find_near_duplicates,
    fingerprint,
    fingerprint_shard,
)

fingerprint_of = cache(fingerprint)  # the same articles are looked at in several orders
WORDS = [f"word{number}" for number in range(500)]


def without_copies(articles: Sequence[Article]) -> tuple[list[Article], Counter[str]]:
    """Those that are no near-duplicates, in their order, and how many are, by reason."""
    codes = find_near_duplicates([fingerprint_of(article) for article in articles])
    staying = [article for article, code in zip(articles, codes, strict=True) if not code]
    return staying, Counter(REASONS[code] for code in codes if code)


def text(rng: Random, length: int = 200) -> str:
    return " ".join(rng.choices(WORDS, k=length))


def edited(original: str, changes: int, rng: Random) -> str:
    words = original.split()
    for place in rng.sample(range(len(words)), changes):
        words[place] = "bread"
    return " ".join(words)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_what_stays_does_not_depend_on_the_order(seed):
    rng = Random(seed)
    originals = [text(rng) for _ in range(4)]
    texts = [edited(rng.choice(originals), rng.choice([0, 1, 2, 8, 40]), rng) for _ in range(20)]
    articles = [Article(str(rng.randrange(15)), "", one) for one in texts]
    staying = {(article.id, article.text) for article in without_copies(articles)[0]}
    for _ in range(3):
        shuffled = rng.sample(articles, len(articles))
        assert {(article.id, article.text) for article in without_copies(shuffled)[0]} == staying
    again, copies = without_copies([article for article in articles if (article.id, article.text) in staying])
    assert not copies or len(again) == len(staying)


def test_copies_are_counted_by_their_reason():
    rng = Random(1)
    first, second = text(rng), text(rng)
    articles = [
        Article("1", "", first),
        Article("2", "", first),
        Article("1", "", second),
        Article("3", "", edited(first, 1, rng)),
        Article("4", "", text(rng)),
    ]
    staying, copies = without_copies(articles)
    assert copies.total() == len(articles) - len(staying) >= 2 and set(copies) <= set(REASONS[1:])
    assert "4" in {article.id for article in staying}
    assert len({article.id for article in staying}) == len({article.text for article in staying}) == len(staying)


@pytest.mark.parametrize(("changes", "stays"), [(0, False), (1, False), (2, False), (30, True), (100, True)])
def test_a_text_with_few_changes_is_a_copy_and_with_many_is_none(changes, stays):
    rng = Random(7)
    kept = [
        len(without_copies([Article("a", "", one), Article("b", "", edited(one, changes, rng))])[0]) == 2
        for one in (text(rng) for _ in range(20))
    ]
    assert sum(kept) >= 18 if stays else sum(kept) <= 2


@pytest.mark.parametrize("articles", [[], [Article("1", "", "")], [Article("1", "", "one"), Article("2", "", "two")]])
def test_few_articles_and_short_texts_stay(articles):
    assert not find_near_duplicates([fingerprint(article) for article in articles]).any()


@pytest.mark.parametrize("other", ["ONE two, three four five six.", "one two three four five -- six"])
def test_case_and_punctuation_do_not_count(other):
    articles = [Article("1", "", "one two three four five six"), Article("2", "", other)]
    assert find_near_duplicates([fingerprint(article) for article in articles]).sum() == 3


def test_a_fingerprint_is_the_same_with_every_version_of_the_library():
    found = fingerprint(Article("7", "Title", "The dodo was a large bird of Mauritius that could not fly."))
    assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == "8a4a03ffaa4b078f"


def test_shards_are_fingerprinted_once_and_copies_dropped(tmp_path):
    rng = Random(3)
    repeated = text(rng)
    for shard in range(2):
        lines = [[0, n, f"{shard}-{n}", "", repeated if n == 0 else text(rng), 0, ""] for n in range(3)]
        (tmp_path / f"{shard:05d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [fingerprint_shard(str(tmp_path), shard) for shard in (0, 1, 1)] == [3, 3, 0]
    expected = Counter({"the text of another article": 1})
    assert drop_near_duplicates(str(tmp_path), 2) == expected == drop_near_duplicates(str(tmp_path), 2)
    copies = b"".join((tmp_path / f"{shard:05d}.copies").read_bytes() for shard in (0, 1))
    assert sorted(copies) == [0, 0, 0, 0, 0, 1]
    assert not list(tmp_path.glob("*.fingerprints"))
