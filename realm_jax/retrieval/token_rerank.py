"""Token rerank: put the first passages of a search into a new order by their token vectors, without training.

Late interaction (Khattab & Zaharia 2020) with the token states that the retriever's encoders have anyway. MaxSim of a
query and a passage is the mean over the query's tokens of the largest cosine with a token of the passage. A passage is
ordered by z(v) + w z(MaxSim), in which v is the value that the search ordered it by, and z is the z-score over the
first passages of the question. MaxSim adds to the search, because it ranks worse without it on some collections
(`benchmarks/late_interaction.py` measures it). The retriever's scores, and so p(z|x), stay as they are.

The functions here are equations over JAX arrays. Read next: `forward.py: retrieve_and_rerank`, which calls them.
"""

import jax
import jax.numpy as jnp

from realm_jax.models.inputs import PassageBatch
from realm_jax.models.layers import Params
from realm_jax.models.retriever import Retriever

Array = jax.Array
WEIGHT = 1.0  # w, of the z-score of MaxSim
FLAT = 1e-5  # values that differ by a smaller share of the largest one do not differ: rounding in float32


def max_sim(query_vectors: Array, query_mask: Array, passage_vectors: Array, passage_mask: Array) -> Array:
    """Return the mean over query tokens of the largest inner product with a passage token.

    Args:
        query_vectors: of length 1, [batch, q, width].
        query_mask: True on tokens that take part, [batch, q] bool.
        passage_vectors: of length 1, [batch, d, width].
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
        values: by which the search ordered the passages, [batch, k].
        similarities: MaxSim, [batch, k].
        is_passage: False for a missing passage, [batch, k] bool.

    Returns:
        float32 [batch, k]; −inf for missing passages.
    """
    total = z_scores(values, is_passage) + WEIGHT * z_scores(similarities, is_passage)
    return jnp.where(is_passage, total, -jnp.inf)


def max_sims(model: Retriever, params: Params, query: Array, query_lengths: Array, passages: PassageBatch) -> Array:
    """Return MaxSim of each query with each of its passages.

    The encoder reads the passages of one rank at a time, so memory does not depend on k.

    Args:
        model: both encoders.
        params: all parameters.
        query: tokens of `[CLS] text [SEP]`, [batch, q] int.
        query_lengths: of the queries, [batch].
        passages: ids [batch, k, d].

    Returns:
        float32 [batch, k].
    """
    queries = model.query_tokens(params, query, query_lengths)  # vectors [batch, q, width]

    def compare(ranked: PassageBatch) -> Array:  # ids [batch, d] → [batch]
        return max_sim(*queries, *model.document_tokens(params, ranked))

    return jax.lax.map(compare, PassageBatch(*(part.swapaxes(0, 1) for part in passages))).T
