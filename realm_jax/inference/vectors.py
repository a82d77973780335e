"""Texts as vectors, by the towers of a run: what its index holds, and what searches it."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.data.examples import document_arrays, query_arrays
from realm_jax.errors import UserError
from realm_jax.mesh import to_host
from realm_jax.models.encoder import Retriever
from realm_jax.models.realm import Params
from realm_jax.retrieval.embed import CorpusRows, filled_up
from realm_jax.run import Run, put_batch


def query_vectors(run: Run, params: Params, texts: Sequence[str], batch_size: int) -> NDArray[np.float32]:
    """Vectors of queries before the temperature, float32 [texts, vector size]: what other libraries know as such.

    Texts are cut to `data.query_length` tokens. params: the query tower's among others.
    """
    tokenizer, made = run.sources.tokenizer, []
    size = batch_size + -batch_size % run.mesh.size
    for start in range(0, len(texts), size):
        encoded = tokenizer.encode_batch(texts[start : start + size])
        rows = [query_arrays(np.asarray(one.ids, np.int32), run.lengths.query, tokenizer) for one in encoded]
        batch = {name: filled_up(np.stack([row[name] for row in rows]), size) for name in rows[0]}
        placed = put_batch(run.mesh, batch)
        made.append(to_host(_embed_queries(run.model, params, placed["query"], placed["query_length"]))[: len(rows)])
    return _all(made, run)


def document_vectors(
    run: Run, params: Params, texts: Sequence[str], titles: Sequence[str] | None = None
) -> NDArray[np.float32]:
    """Vectors of passages as the index of the run has them, float32 [texts, vector size].

    Texts are cut to `data.document_length` tokens with their titles. params: the document tower's among others.
    """
    tokenizer, length = run.sources.tokenizer, run.config.data.document_length
    headed = [""] * len(texts) if titles is None else titles
    if len(headed) != len(texts):
        raise UserError(f"{len(texts)} texts have {len(headed)} titles; give one for each text, or none")
    if not texts:
        return _all([], run)
    pieces = zip(*(tokenizer.encode_batch(some) for some in (headed, texts)), strict=True)
    rows = [document_arrays(np.asarray(t.ids), np.asarray(b.ids), length, tokenizer) for t, b in pieces]
    ids, lengths, title_lengths = (
        np.stack([row[name] for row in rows]) for name in ("document", "document_length", "document_title_length")
    )
    return run.embed(params, rows=CorpusRows(ids, lengths.astype(np.uint16), title_lengths.astype(np.uint16)))


@partial(jax.jit, static_argnums=0)
def _embed_queries(model: Retriever, params: Params, query: jax.Array, lengths: jax.Array) -> jax.Array:
    return model.query_vectors(params, query, lengths)


def _all(parts: list[NDArray[np.float32]], run: Run) -> NDArray[np.float32]:
    nothing = np.empty((0, run.model.vector_size), np.float32)
    return np.concatenate([nothing, *parts])
