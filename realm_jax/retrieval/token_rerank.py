"""Token rerank: put the first passages of a search into a new order by their token vectors, without training.

Late interaction (Khattab & Zaharia 2020) with the token states that the retriever's encoders have anyway. MaxSim of a
query and a passage is the mean over the query's words of the largest cosine with a token of the passage. Passages are
ordered by z(v) + w z(MaxSim). v is the value by which the search ordered them, and z is the z-score over the first
passages of the question. The retriever's scores, and so p(z|x), stay as they are (`docs/results/search.md`).

The token vectors of passages come from the encoder at query time (`max_sims`), or from the index (`stored_max_sims`),
which has them in fewer dimensions, of 8 bits each, and at most STORED_BYTES of a passage. The functions
here are equations over arrays. Read next: `forward.py: retrieve_and_rerank`, which calls them;
`indexing/token_file.py`, which stores the vectors.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.models.inputs import PassageBatch, document_sequences, query_sequences
from realm_jax.models.layers import Params
from realm_jax.models.retriever import Retriever, TokenVectors, unit_vectors

Array = jax.Array
WEIGHT = 2.0  # w, chosen on MedQuAD's and SQuAD's training questions
STORED_BYTES = 8192  # at most, for the token vectors of one passage
MOST_DIMENSIONS, FEWEST_DIMENSIONS = 64, 24  # of a stored token vector: more gain little, and fewer lose much
LARGEST = 127  # of int8, so that x and −x are stored alike
FLAT = 1e-5  # values that differ by a smaller share of the largest one do not differ: rounding in float32


def max_sim(query_vectors: Array, query_mask: Array, passage_vectors: Array, passage_mask: Array) -> Array:
    """Return the mean over query tokens of the largest inner product with a passage token.

    Args:
        query_vectors: query vectors of length 1, [batch, q, width].
        query_mask: True on tokens that take part, [batch, q] bool.
        passage_vectors: passage vectors of length 1, [batch, d, width].
        passage_mask: like `query_mask`, [batch, d] bool.

    Returns:
        float32 [batch]; 0 for a query without tokens, −1 for a passage without tokens.
    """
    cosines = jnp.einsum("bqw,bdw->bqd", query_vectors, passage_vectors, preferred_element_type=jnp.float32)
    largest = jnp.where(passage_mask[:, None], cosines, -1.0).max(axis=2)  # [batch, q]
    total = jnp.where(query_mask, largest, 0.0).sum(axis=1)  # [batch]
    return total / jnp.maximum(query_mask.sum(axis=1), 1)


def z_scores(values: Array, is_passage: Array) -> Array:
    """Return (value − mean) / standard deviation over the passages of each question.

    Args:
        values: [batch, k].
        is_passage: False for a missing passage, [batch, k] bool.

    Returns:
        float32 [batch, k]; 0 for missing passages, and for all passages of a question if their values do not differ.
    """
    count = jnp.maximum(is_passage.sum(axis=1, keepdims=True), 1)  # [batch, 1]
    known = jnp.where(is_passage, values, 0.0)
    mean = known.sum(axis=1, keepdims=True) / count  # [batch, 1]
    differences = jnp.where(is_passage, values - mean, 0.0)  # [batch, k]
    deviation = jnp.sqrt(jnp.square(differences).sum(axis=1, keepdims=True) / count)  # [batch, 1]
    is_flat = deviation <= FLAT * jnp.abs(known).max(axis=1, keepdims=True)
    return jnp.where(is_flat, 0.0, differences / jnp.where(is_flat, 1.0, deviation))


def combined_values(values: Array, similarities: Array, is_passage: Array) -> Array:
    """Return z(value) + WEIGHT · z(MaxSim), by which passages are ordered.

    Args:
        values: values by which the search ordered the passages, [batch, k].
        similarities: MaxSim, [batch, k].
        is_passage: False for a missing passage, [batch, k] bool.

    Returns:
        float32 [batch, k]; −inf for missing passages.
    """
    total = z_scores(values, is_passage) + WEIGHT * z_scores(similarities, is_passage)
    return jnp.where(is_passage, total, -jnp.inf)


# --- Token vectors by the encoder, at query time ----------------------------------------------------------------------


def query_words(model: Retriever, params: Params, query: Array, query_lengths: Array, is_word: Array) -> TokenVectors:
    """Return the token vectors of queries, with a mask of the tokens that are compared.

    They are the words. [CLS], [SEP] and punctuation resemble those of every passage.

    Args:
        model: both encoders.
        params: with the query encoder.
        query: tokens of `[CLS] text [SEP]`, [batch, q] int.
        query_lengths: lengths of the queries, [batch].
        is_word: True for words, bool [vocabulary].

    Returns:
        Arrays [batch, q + the template's tokens, …]; all tokens of a query without words are compared.
    """
    vectors, mask = model.query_tokens(params, query, query_lengths)
    words = mask & is_word[query_sequences(query, query_lengths, model.query_template).ids]
    return TokenVectors(vectors, jnp.where(words.any(axis=1, keepdims=True), words, mask))


def max_sims(model: Retriever, params: Params, queries: TokenVectors, passages: PassageBatch) -> Array:
    """Return MaxSim of each query with each of its passages.

    The encoder reads the passages of one rank at a time, so memory does not depend on k.

    Args:
        model: both encoders.
        params: with the passage encoder.
        queries: from `query_words`.
        passages: ids [batch, k, d].

    Returns:
        float32 [batch, k].
    """

    def compare(ranked: PassageBatch) -> Array:  # ids [batch, d] → [batch]
        return max_sim(*queries, *model.document_tokens(params, ranked))

    return jax.lax.map(compare, PassageBatch(*(part.swapaxes(0, 1) for part in passages))).T


# --- Token vectors in the index ---------------------------------------------------------------------------------------


class Compression(NamedTuple):
    """Compression of stored token vectors. It is fitted to a corpus, and stays when the corpus is edited.

    Attributes:
        projection: its columns are the principal axes of token vectors, [width, dimensions] float32.
        frequencies: number of passages that have a token, [vocabulary] int32.
    """

    projection: NDArray[np.float32]
    frequencies: NDArray[np.int32]


class StoredTokens(NamedTuple):
    """The stored token vectors of a corpus.

    Attributes:
        vectors: a zero vector for no token, [rows, tokens, dimensions] int8.
        projection: see `Compression`.
    """

    vectors: Array
    projection: Array


def stored_dimensions(tokens: int) -> int:
    """Return the dimensions of stored token vectors: so few that all tokens of a passage fit into STORED_BYTES.

    If they are below FEWEST_DIMENSIONS, some tokens are dropped.

    Args:
        tokens: tokens of the longest passage.
    """
    return min(max(STORED_BYTES // tokens, FEWEST_DIMENSIONS), MOST_DIMENSIONS)


def principal_axes(second_moment: NDArray[np.float64], dimensions: int) -> NDArray[np.float32]:
    """Return the directions in which vectors are longest: the first eigenvectors of their second moment.

    Args:
        second_moment: Σ v vᵀ, [width, width].
        dimensions: number of directions.

    Returns:
        Orthonormal columns, the longest direction first, [width, dimensions].
    """
    return np.linalg.eigh(second_moment)[1][:, ::-1][:, :dimensions].astype(np.float32)


def kept_tokens(ids: Array, mask: Array, frequencies: Array, count: int) -> Array:
    """Return the tokens of each passage that are stored: first occurrences before repetitions, then the rarest.

    Args:
        ids: tokens, [batch, length] int.
        mask: True on tokens that may be stored, [batch, length] bool.
        frequencies: number of passages that have a token, [vocabulary] int.
        count: tokens of a passage at most.

    Returns:
        Positions in rising order, then `length` for no token, [batch, min(count, length)] int32.
    """
    length = ids.shape[1]
    position = jnp.arange(length, dtype=jnp.int32)
    is_repeated = (ids[:, :, None] == ids[:, None]) & (position[:, None] > position) & mask[:, None]
    repetitions = is_repeated.sum(axis=2)  # earlier occurrences of the same id, [batch, length]
    positions = jnp.broadcast_to(position, ids.shape)
    order = jnp.lexsort((positions, frequencies[ids], repetitions, ~mask))[:, :count]  # [batch, count]
    is_token = jnp.take_along_axis(mask, order, axis=1)
    return jnp.sort(jnp.where(is_token, order, length), axis=1)


def quantized(vectors: Array) -> Array:
    """Return vectors [..., dimensions] as int8, each multiplied so that its largest absolute entry is LARGEST.

    The factor is not stored, because vectors get length 1 when they are compared.
    """
    largest = jnp.abs(vectors).max(axis=-1, keepdims=True)  # [..., 1]
    return jnp.round(vectors * (LARGEST / jnp.where(largest > 0, largest, 1.0))).astype(jnp.int8)


def compressed_tokens(model: Retriever, params: Params, passages: PassageBatch, compression: Compression) -> Array:
    """Return the token vectors of passages as they are stored.

    Args:
        model: both encoders.
        params: parameters of the encoders.
        passages: ids [batch, d].
        compression: compression of the corpus.

    Returns:
        int8 [batch, min(STORED_BYTES / dimensions, length), dimensions]; zero vectors after the last token.
    """
    tokens = model.document_tokens(params, passages)  # vectors [batch, length, width]
    ids = document_sequences(passages, model.passage_template).ids  # [batch, length]
    count = STORED_BYTES // compression.projection.shape[1]
    kept = kept_tokens(ids, tokens.mask, jnp.asarray(compression.frequencies), count)
    vectors = jnp.take_along_axis(tokens.vectors, kept[..., None], axis=1, mode="fill", fill_value=0.0)
    return quantized(vectors @ compression.projection)


def stored_max_sims(queries: TokenVectors, stored: StoredTokens, rows: Array) -> Array:
    """Return MaxSim of each query with each of its passages, by their stored token vectors.

    Args:
        queries: from `query_words`.
        stored: stored token vectors of the corpus.
        rows: rows of the passages, [batch, k]; a missing one (below 0) gets any value.

    Returns:
        float32 [batch, k].
    """
    projected = unit_vectors(queries.vectors @ stored.projection)  # [batch, q, dimensions]

    def compare(ranked: Array) -> Array:  # rows [batch] → [batch]
        tokens = stored.vectors[jnp.maximum(ranked, 0)].astype(jnp.float32)  # [batch, tokens, dimensions]
        return max_sim(projected, queries.mask, unit_vectors(tokens), tokens.any(axis=-1))

    return jax.lax.map(compare, rows.T).T
