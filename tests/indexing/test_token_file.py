"""Token vectors that an index stores: what is in their files, and what a killed command leaves."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import loud_params

from realm_jax.indexing import token_file
from realm_jax.indexing.token_file import TokenFile, can_stay, document_frequencies, remove_unfinished
from realm_jax.models.inputs import PassageBatch
from realm_jax.retrieval.embed import CorpusRows
from realm_jax.retrieval.token_rerank import Compression


@pytest.fixture(scope="module")
def params(trained_run):
    return loud_params(trained_run.model, 1)


@pytest.fixture
def run(trained_run, tmp_path):
    return dataclasses.replace(trained_run, workdir=tmp_path)


def test_one_pass_gives_the_vectors_of_passages_and_of_their_tokens(run, params):
    rows, file = np.arange(run.context.rows), TokenFile(run, params, "key")
    np.testing.assert_array_equal(file.embed(rows), run.embed(params))
    stored = np.load(file.folder / "tokens.npy").astype(np.float32)  # [rows, tokens, dimensions]
    projection = np.load(file.folder / "token_projection.npy")
    corpus = PassageBatch(*(part[: run.context.rows] for part in run.documents))
    vectors, mask = map(np.asarray, jax.jit(run.model.document_tokens)(params, corpus))
    for row in rows.tolist():
        wanted = vectors[row][mask[row]] @ projection  # no passage has more tokens than are stored
        count = len(wanted)
        assert stored[row].any(axis=1).sum() == count and not stored[row, count:].any()
        cosines = (stored[row, :count] * wanted).sum(axis=1) / np.linalg.norm(stored[row, :count], axis=1)
        np.testing.assert_allclose(cosines, np.linalg.norm(wanted, axis=1), rtol=1e-3)


def test_long_passages_keep_as_many_tokens_as_are_stored(run, params, monkeypatch):
    monkeypatch.setattr(token_file, "STORED_BYTES", 5 * run.model.bert.width)
    file = TokenFile(run, params, "key")
    file.embed(np.arange(run.context.rows))
    assert np.load(file.folder / "tokens.npy").any(axis=2).sum(axis=1).tolist() == [5] * run.context.rows


def test_a_killed_command_is_continued_and_another_key_starts_again(run, params, monkeypatch):
    TokenFile(run, params, "key").embed(np.array([2, 5, 7]))
    with monkeypatch.context() as patch:
        patch.setattr(token_file, "fit_compression", None)
        file = TokenFile(run, params, "key")
    assert np.flatnonzero(file.is_stored).tolist() == [2, 5, 7]
    assert not TokenFile(run, params, "other").is_stored.any() and not file.folder.exists()
    remove_unfinished(run.workdir)
    assert not [*run.workdir.iterdir()]


def test_a_passage_of_which_half_is_written_does_not_count_as_stored(run, params, monkeypatch):
    file = TokenFile(run, params, "key")
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(np.memmap, "flush", lambda _: {}["power failure"])
        file.embed(np.arange(3))
    again = TokenFile(run, params, "key")
    assert np.load(file.folder / "tokens.npy")[:3, 1:].any() and not again.is_stored.any()


def test_document_frequencies_count_the_passages_of_a_token():
    ids = np.array([[1, 4, 4, 2, 9], [1, 4, 5, 5, 2], [1, 2, 9, 9, 9]], np.uint16)
    corpus = CorpusRows(ids, np.array([4, 5, 2], np.uint16), np.zeros(3, np.uint16))
    assert document_frequencies(corpus, 10).tolist() == [0, 3, 3, 0, 2, 1, 0, 0, 0, 0]


def test_a_compression_stays_unless_a_small_corpus_doubled_or_passages_grew():
    few, many = (Compression(np.eye(64, dtype=np.float32), np.array([0, n], np.int32)) for n in (10, 512))
    assert can_stay(few, 19, 128) and not can_stay(few, 20, 128) and can_stay(many, 10_000, 128)
    assert not can_stay(many, 10_000, 200), "64 dimensions of 200 tokens have more than 8 KB"
