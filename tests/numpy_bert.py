"""A transformer in NumPy, float64, written from the papers, for one sequence without padding.

Weights are a dictionary by the names of Hugging Face's BERT.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Weights = Mapping[str, NDArray]


def gelu_tanh(x: NDArray) -> NDArray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: NDArray) -> NDArray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def linear(x: NDArray, w: Weights, name: str) -> NDArray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(x: NDArray, w: Weights, name: str, epsilon: float = 1e-12) -> NDArray:
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(x: NDArray, w: Weights, layer: str, heads: int) -> NDArray:
    projected = (linear(x, w, f"{layer}.self.{part}") for part in ("query", "key", "value"))
    parts = []
    for query, key, value in zip(*(np.split(one, heads, axis=-1) for one in projected), strict=True):
        weights = np.exp(query @ key.T / np.sqrt(query.shape[-1]))
        parts.append(weights / weights.sum(axis=-1, keepdims=True) @ value)
    return linear(np.concatenate(parts, axis=-1), w, f"{layer}.output.dense")


def hidden_states(
    w: Weights, ids: NDArray, segments: NDArray, gelu: Callable[[NDArray], NDArray] = gelu_tanh, heads: int = 2
) -> NDArray:
    """Of the last of two layers: [n, width] for the n pieces of one sequence."""
    words, places, kinds = (w[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type"))
    x = norm(words[ids] + places[: len(ids)] + kinds[segments], w, "embeddings.LayerNorm")
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        x = norm(x + attention(x, w, f"{layer}.attention", heads), w, f"{layer}.attention.output.LayerNorm")
        inner = gelu(linear(x, w, f"{layer}.intermediate.dense"))
        x = norm(x + linear(inner, w, f"{layer}.output.dense"), w, f"{layer}.output.LayerNorm")
    return x
