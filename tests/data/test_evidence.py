"""Spans with evidence, against a search of all pairs of passages one by one."""

import json
from pathlib import Path

import numpy as np
import pytest
from articles import prepared_articles

from realm_jax.cli.prepare import prepare
from realm_jax.data import evidence
from realm_jax.data.evidence import find_evidence
from realm_jax.data.examples import Lengths
from realm_jax.data.sources import Sources, open_sources
from realm_jax.data.store import PassageStore
from realm_jax.errors import UserError
from realm_jax.tasks import realm

ROOM, LONGEST = 60, 10


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Sources:
    return open_sources(prepared_articles(tmp_path_factory.mktemp("evidence")))


@pytest.fixture(autouse=True)
def forget():
    """Tests change the constants that evidence is found by."""
    find_evidence.cache_clear()
    yield
    find_evidence.cache_clear()


def one_by_one(store: PassageStore) -> dict[tuple[int, int, int, int], list[int]]:
    """What `find_evidence` should find: (row, sentence, start, end) → rows that are evidence."""
    rows = range(len(store))
    texts = [{*store.body_tokens(row).tolist(), *store.title_tokens(row).tolist()} for row in rows]
    frequency = {word: sum(word in text for text in texts) for word in set().union(*texts)}
    common = evidence.COMMON * len(store)
    weight = {w: 0.0 if n > common else np.log((len(store) + 1) / (n + 0.5)) for w, n in frequency.items()}
    spans = [
        (row, number, int(start), int(end), tuple(store.body_tokens(row)[start:end].tolist()))
        for row in rows
        for number, (first, last) in enumerate(store.sentences(row))
        for start, end, _ in store.spans(row)
        if first <= start and end <= min(last, first + ROOM) and end - start <= LONGEST
    ]
    holders: dict[tuple[int, ...], set[int]] = {}
    for row, *_, name in spans:
        holders.setdefault(name, set()).add(row)
    found = {}
    for row, number, start, end, name in spans:
        first, last = store.sentences(row)[number]
        words = {*store.body_tokens(row)[first:last].tolist()} - {*name}
        total = sum(weight[word] for word in words)
        few = len(holders[name]) <= evidence.HOLDERS and total >= evidence.LEAST_WEIGHT
        shares = {
            other: sum(weight[word] for word in words & texts[other]) / total
            for other in sorted(holders[name] - {row} if few else set())
        }
        others = [other for other, share in shares.items() if evidence.LEAST <= share < evidence.MOST]
        if others:
            found[row, number, start, end] = others
    return found


@pytest.mark.parametrize("pairs", [evidence.PAIRS, 7])
def test_evidence_is_what_a_search_one_by_one_finds(sources, monkeypatch, pairs):
    monkeypatch.setattr(evidence, "PAIRS", pairs)
    monkeypatch.setattr(evidence, "HOLDERS", 22)
    store = sources.passages
    found, wanted = find_evidence(store, ROOM, LONGEST), one_by_one(store)
    spans = zip(*(part.tolist() for part in found.spans), strict=True)
    assert {span: found.rows_of(number).tolist() for number, span in enumerate(spans)} == wanted
    assert 0 < len(wanted) < store.counts("spans").sum()
    assert (np.diff(found.spans.rows) >= 0).all()


def test_queries_hide_spans_with_evidence_and_no_others(sources):
    store, lengths = sources.passages, Lengths(ROOM + 2, 64, LONGEST, 2, LONGEST)
    examples = realm.MaskedSentences(store, sources.tokenizer, lengths, "evidence", True).examples()
    found = find_evidence(store, ROOM, LONGEST).spans
    rows = np.unique(found.rows)
    assert examples.total == len(rows)
    for index, row in enumerate(rows):
        spans = found.of_row(row)
        allowed = {tuple(store.body_tokens(row)[s:e].tolist()) for s, e in zip(spans.starts, spans.ends, strict=True)}
        for seed in range(5):
            example = examples.make(index, np.random.default_rng(seed))
            assert example["own_row"] == row
            assert tuple(example["targets"][example["weights"] > 0].tolist()) in allowed


def test_evidence_of_documents_that_are_held_out_is_none(sources):
    """What such a document alone is evidence for is not hidden, in any sentence."""
    store, lengths = sources.passages, Lengths(ROOM + 2, 64, LONGEST, 2, LONGEST)
    found = find_evidence(store, ROOM, LONGEST)
    kept = np.ones(len(store), bool)
    kept[np.unique(found.rows)[::2]] = False
    examples = realm.MaskedSentences(store, sources.tokenizer, lengths, "evidence", True, training_rows=kept).examples()
    numbers = [number for number in range(len(found.spans.rows)) if kept[found.rows_of(number)].any()]
    rows = np.unique(found.spans.rows[numbers])
    assert 0 < examples.total == kept[rows].sum() < kept[np.unique(found.spans.rows)].sum()


def test_the_retriever_is_asked_without_the_span_that_the_reader_points_at(sources):
    """Whatever span is hidden, nothing of it and no [MASK] is in the retriever's query; the reader's has [MASK]s."""
    store, mask_id = sources.passages, sources.tokenizer.mask_id
    lengths = Lengths(ROOM + 2, 64, LONGEST, 1, LONGEST)
    examples = realm.MaskedSentences(
        store, sources.tokenizer, lengths, "evidence", True, separate_reader_query=True
    ).examples()
    for number in range(20):
        example = examples.make(number, np.random.default_rng(number))
        asked, read = (example[name][1 : example[f"{name}_length"] - 1] for name in ("query", "reader_query"))
        sentence = example["sentence"][: example["sentence_length"]]
        hidden = example["positions"][example["weights"] > 0] - 1
        assert hidden.size and (read[hidden] == mask_id).all()
        np.testing.assert_array_equal(asked, np.delete(sentence, hidden))
    assert realm.without_hidden(np.array([7, 8]), np.array([0, 1]), sources.tokenizer).tolist() == [mask_id] * 2


def test_a_corpus_without_evidence_is_refused(tmp_path):
    path = Path(tmp_path / "passages.jsonl")
    path.write_text(json.dumps({"id": "1", "title": "", "text": "Ada Lovelace was born in London. It rained."}) + "\n")
    prepare(path, tmp_path / "ready", vocabulary_size=100, limit=64, workers=1)
    sources, lengths = open_sources(tmp_path / "ready"), Lengths(32, 64, 4, 2, 4)
    with pytest.raises(UserError, match="a salient span that another passage is evidence for, and there is none"):
        realm.MaskedSentences(sources.passages, sources.tokenizer, lengths, "evidence", True).examples()
