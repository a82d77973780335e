"""Floating-point operations of steps and of embedding, by arithmetic: what MFU and `realm launch plan` count.

Only matrix products count, two operations a multiply-add, and the backward pass twice the forward one. What is computed
again to save memory does not count, nor do lookups, softmax or LayerNorm; sequences count at their padded length, since
that is what is computed. MFU (model FLOPs utilisation) is these operations a second, over devices × their peak.
"""

import dataclasses

from ml_collections import ConfigDict

from realm_jax.config import joint_length
from realm_jax.models.encoder import vector_size

# Dense bfloat16 operations a second of one JAX device, by `device_kind` (vendors' data sheets).
PEAKS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v5e": 197e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


# Bytes of memory that a program can have on one of them, as the TPU compiler says.
MEMORY = {
    "TPU v4": 31.75 * 2**30,
    "TPU v5 lite": 15.75 * 2**30,
    "TPU v5": 95.74 * 2**30,
    "TPU v5p": 95.74 * 2**30,
    "TPU v5e": 15.75 * 2**30,
    "TPU v6 lite": 31.25 * 2**30,
    "TPU v6e": 31.25 * 2**30,
}


def memory(device_kind: str) -> float | None:
    """Bytes of a device's memory; None where it is not known."""
    return _by_name(MEMORY, device_kind)


def peak(device_kind: str) -> float | None:
    """Peak bfloat16 operations a second of a device; None where it is not known."""
    return _by_name(PEAKS, device_kind)


def _by_name(table: dict[str, float], device_kind: str) -> float | None:
    names = [name for name in table if device_kind.startswith(name)]
    return table[max(names, key=len)] if names else None


@dataclasses.dataclass(frozen=True)
class Tower:
    """Sizes of one BERT."""

    layers: int
    width: int
    feed_forward: int

    def forward(self, length: int, positions: int | None = None) -> float:
        """One sequence through all layers; `positions`: the last one computes these alone (None: all)."""
        asked = length if positions is None else positions
        return (self.layers - 1) * self._layer(length, length) + self._layer(asked, length)

    def _layer(self, queries: int, keys: int) -> float:
        projections = 2 * (2 * queries + 2 * keys) * self.width**2  # query and output; key and value
        attention = 2 * 2 * queries * keys * self.width
        return projections + attention + 2 * 2 * queries * self.width * self.feed_forward


def tower_of(config: ConfigDict) -> Tower:
    """The one size that embedders and reader share."""
    model = config.model
    return Tower(model.layers, model.width, model.feed_forward)


def embedding_flops(config: ConfigDict, length: int) -> float:
    """One sequence to its vector, forward; the literal pieces of prompts are left out."""
    width, encoder = config.model.width, config.encoder
    head = 2 * width * ((width if encoder.pooling == "pooler" else 0) + encoder.projection)
    return tower_of(config).forward(length, None if encoder.pooling == "mean" else 1) + head


def step_flops(config: ConfigDict, task: str, vocabulary: int, predictions: int, rows: int) -> dict[str, float]:
    """One step of a task: {part: operations}. predictions: masked pieces that are predicted; rows: passages.

    A question beside its positive passage counts as long as the longest can be; the length of batches is up to data.
    """
    data, retrieval, batch = config.data, config.retrieval, config[task].batch_size
    tower, width, joint = tower_of(config), config.model.width, joint_length(config)
    query, document = embedding_flops(config, data.query_length), embedding_flops(config, data.document_length)
    features = vector_size(config.encoder.projection, width)
    words = 2 * predictions * width * (width + vocabulary)
    search = 2.0 * rows * features
    parts: dict[str, float] = {}
    if task in ("mlm", "closed_book"):
        parts["reader"] = 3 * (tower.forward(joint, predictions) + words)
    if task == "ict" and config.objective.ict == "index":  # stored vectors have no gradient: a product each way
        scores = 2 * 2.0 * (1 + retrieval.qa_beam) * features
        parts |= {"search": search, "queries": 3 * query, "scores": scores}
    elif task == "ict":
        scores = 3 * 2.0 * batch * features
        parts |= {"queries": 3 * query, "documents": 3 * document, "scores": scores}
    if task == "realm":
        candidates = retrieval.candidates - 1
        reading = candidates * tower.forward(joint, predictions) + tower.forward(data.query_length + 1, predictions)
        parts |= {
            "search": query + (search if retrieval.backend == "device" and retrieval.search != "bm25" else 0.0),
            "queries": 3 * query,
            "documents": 3 * candidates * document,
            "reader": 3 * (reading + retrieval.candidates * words),
        }
    if task == "qa":
        spans = 2 * joint * width * 2 * config.model.span_hidden
        read = 1 if config.objective.qa == "positive" else retrieval.qa_passages
        parts["reader"] = 3 * read * (tower.forward(joint) + spans)
        if retrieval.qa_search != "bm25":
            parts |= {"search": search, "queries": 3 * query}
        if config.refresh.qa_every:
            parts["documents"] = 3 * retrieval.qa_passages * document
    return {name: batch * value for name, value in parts.items()}
