"""Vectors that are kept from run to run: the bits of embedding anew, only what changed, and no trust in damage."""

import dataclasses
import logging
import os

import jax
import numpy as np
import pytest
from tiny_run import tiny_config, with_config

from realm_jax.assemble import make_run
from realm_jax.cache import cache_bytes
from realm_jax.config import with_values
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.indexing.control import ControlSignal
from realm_jax.indexing.provider import InlineIndexProvider
from realm_jax.indexing.vector_cache import (
    VectorCache,
    embed_unknown,
    embed_with_cache,
    encoder_digest,
    row_keys,
    share_to_embed,
)
from realm_jax.retrieval.embed import CorpusRows
from realm_jax.run import Run
from realm_jax.tasks import make_task
from realm_jax.train.restore import start_vectors


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache; its folder of vectors."""
    monkeypatch.setenv("REALM_CACHE", str(tmp_path))
    monkeypatch.setenv("REALM_CACHE_BYTES", "1000000")
    return tmp_path / "vectors"


@pytest.fixture
def counted(monkeypatch):
    """How many passages each call embedded."""
    counts, embed = [], Run.embed

    def embed_and_count(self, params, progress=None, rows=None):
        counts.append(len((rows or self.corpus).ids))
        return embed(self, params, progress, rows)

    monkeypatch.setattr(Run, "embed", embed_and_count)
    return counts


@pytest.fixture(scope="module")
def tiny(people, tmp_path_factory):
    """A run over sixteen passages that has not begun."""
    config = tiny_config(people)
    return make_run(config, tmp_path_factory.mktemp("run"), open_sources(config.data.path), jax.devices()[:1])


@pytest.fixture(scope="module")
def params(tiny):
    return tiny.initial_params()


def with_corpus(run, corpus):
    """The run over other passages."""
    other = dataclasses.replace(run)
    other.__dict__["corpus"] = corpus
    return other


def test_of_any_rows_those_that_are_known_are_not_embedded_again(tiny, params, cache, counted):
    """As `realm corpus` embeds a new version; what was not known is not kept."""
    whole, corpus = tiny.embed(params), tiny.corpus
    counted.clear()
    first_ten, all_rows = (CorpusRows(*(part[:count] for part in corpus)) for count in (10, 16))
    np.testing.assert_array_equal(embed_unknown(tiny, params)(all_rows), whole)
    embed_with_cache(with_corpus(tiny, first_ten), params)
    for _ in range(2):
        np.testing.assert_array_equal(embed_unknown(tiny, params)(all_rows), whole)
    np.testing.assert_array_equal(embed_unknown(tiny, params)(first_ten), whole[:10])
    assert counted == [16, 10, 6, 6]
    assert share_to_embed(tiny, params) == 6 / 16


def test_a_second_run_embeds_nothing_and_has_the_same_bits(tiny, params, cache, counted, caplog):
    first, anew = embed_with_cache(tiny, params), tiny.embed(params)
    counted.clear()
    with caplog.at_level(logging.INFO, "realm_jax"):
        second = embed_with_cache(tiny, params)
    assert counted == []
    np.testing.assert_array_equal(first, anew, strict=True)
    np.testing.assert_array_equal(second, anew, strict=True)
    assert "embedding 0 of 16 passages (16 cached in " in caplog.text


def test_of_an_edited_corpus_only_what_changed_is_embedded(tiny, params, cache, counted):
    embed_with_cache(tiny, params)
    order = np.random.default_rng(0).permutation(16)
    ids, lengths, titles = (part[order] for part in tiny.corpus)
    ids[3, 5] += 1  # another word
    titles[4] -= 1  # the same words, of which the title has one less
    edited = with_corpus(tiny, CorpusRows(ids, lengths, titles))
    counted.clear()
    vectors = embed_with_cache(edited, params)
    assert counted == [2]
    np.testing.assert_array_equal(vectors, edited.embed(params), strict=True)
    counted.clear()
    embed_with_cache(edited, params)
    assert counted == []


def test_what_is_beyond_the_end_of_a_passage_is_not_part_of_it(tiny):
    corpus = tiny.corpus
    wider = corpus._replace(ids=np.pad(corpus.ids, ((0, 0), (0, 8)), constant_values=7))
    np.testing.assert_array_equal(row_keys(wider), row_keys(corpus))
    assert len(np.unique(row_keys(corpus), axis=0)) == 16


def test_tokens_of_a_large_vocabulary_are_told_apart(tiny):
    """Token ids beyond 65,535 keep all their bytes."""
    corpus = tiny.corpus
    large = corpus._replace(ids=corpus.ids.astype(np.uint32))
    moved = large._replace(ids=np.where(large.ids == large.ids.max(), large.ids + 65_536, large.ids))
    assert (row_keys(moved) != row_keys(large)).any()
    assert (corpus.ids.dtype, moved.ids.dtype) == (np.uint16, np.uint32)


@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_damage_is_told_and_embedded_again(tiny, params, cache, counted, caplog, suffix):
    anew = embed_with_cache(tiny, params)
    (file,) = cache.glob(f"*/*{suffix}")
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    counted.clear()
    np.testing.assert_array_equal(embed_with_cache(tiny, params), anew)
    assert counted == [16]
    assert "embedding its passages again" in caplog.text
    counted.clear()
    embed_with_cache(tiny, params)
    assert counted == [], "what replaced it is whole"


def test_another_tower_or_setting_is_another_encoder(tiny, params):
    known = encoder_digest(tiny, params)
    assert known == encoder_digest(tiny, tiny.initial_params())
    query, document = tiny.model.embedder_names
    moved = jax.tree.map(lambda x: x + 1e-6, params)
    assert encoder_digest(tiny, {**params, query: moved[query]}) == known, "passages do not go through it"
    assert encoder_digest(tiny, {**params, document: moved[document]}) != known
    config = with_values(tiny.config, {"model.hidden_act": "gelu"})
    assert encoder_digest(with_config(tiny, config), params) != known


def test_a_task_begins_with_known_vectors_and_what_it_trains_is_not_kept(tiny, params, cache, counted):
    task = make_task("ict", tiny)
    inline = InlineIndexProvider(task, lambda: None, start_vectors)
    first = inline.maybe_refresh(0, params, None, ControlSignal())
    again = InlineIndexProvider(task, lambda: None, start_vectors).maybe_refresh(0, params, None, ControlSignal())
    assert counted == [16]
    np.testing.assert_array_equal(first.vectors, again.vectors, strict=True)
    files = sorted(cache.rglob("*"))
    trained = jax.tree.map(lambda x: x * 1.5, params)
    inline.final_index(2, trained, first)
    assert counted == [16, 16] and sorted(cache.rglob("*")) == files


def test_encoders_that_were_used_least_lately_make_room(cache, monkeypatch):
    monkeypatch.setenv("REALM_CACHE_BYTES", "2500")
    keys = np.arange(20, dtype=np.uint64).reshape(10, 2)
    vectors = np.ones((10, 8), np.float32)
    caches = {name: VectorCache(name) for name in "abc"}
    for name in "ab":
        caches[name].add(keys, vectors)
    os.utime(cache / "a", (2e9, 2e9))
    os.utime(cache / "b", (1e9, 1e9))
    caches["c"].add(keys, vectors)
    assert [caches[name].find(keys)[0].any() for name in "abc"] == [True, False, True]


def test_more_vectors_than_may_be_kept_are_not(cache, monkeypatch):
    monkeypatch.setenv("REALM_CACHE_BYTES", "100")
    VectorCache("a").add(np.zeros((10, 2), np.uint64), np.ones((10, 8), np.float32))
    assert not cache.exists()


def test_a_folder_that_cannot_be_written_to_is_told(cache, caplog):
    cache.write_text("a file")
    VectorCache("a").add(np.zeros((1, 2), np.uint64), np.ones((1, 8), np.float32))
    assert "could not cache the vectors for the next run" in caplog.text


def test_training_goes_on_without_a_cache_that_cannot_be_read(tiny, params, cache, counted, caplog, monkeypatch):
    monkeypatch.setattr("realm_jax.indexing.vector_cache.PIECE", 8)
    cache.write_text("a file")
    embed_with_cache(tiny, params)
    assert counted == [8, 8]
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "embedding all passages, without a cache" in warning.getMessage()


def test_a_size_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("REALM_CACHE_BYTES", "20GB")
    with pytest.raises(UserError, match="REALM_CACHE_BYTES=20GB: give a number of bytes"):
        cache_bytes()
