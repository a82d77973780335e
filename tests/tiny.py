"""Tiny networks, corpora and batches that several tests share: two layers, width 16, fifty tokens."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from realm_jax.config import as_config, default
from realm_jax.data import layouts
from realm_jax.forward import Index, StaticContext
from realm_jax.mesh import AXES, make_mesh
from realm_jax.models.inputs import PassageBatch
from realm_jax.models.layers import BertConfig, Compute, Params
from realm_jax.models.networks import Realm
from realm_jax.models.reader import Reader
from realm_jax.retrieval.exact import padded_rows
from realm_jax.run import abstract_params
from realm_jax.tasks import make_task
from realm_jax.tasks.base import Task

Texts = list[tuple[list[int], list[int]]]  # titles and bodies, as tokens
VOCABULARY = 50
SPECIAL = layouts.SpecialTokens(pad=0, cls=1, sep=2, mask=3)
FIRST_WORD = 4  # the first piece that is none of the special ones
QUERY, DOCUMENT, PREDICTIONS = 10, 16, 3


def tiny_bert(**changes) -> BertConfig:
    """changes: fields of `BertConfig` or of `Compute`."""
    sizes = {"vocabulary_size": VOCABULARY, "width": 16, "layers": 2, "heads": 2, "feed_forward": 32}
    compute = {name: changes.pop(name) for name in [*changes] if name in Compute.__dataclass_fields__}
    return BertConfig(**sizes | {"max_length": QUERY + DOCUMENT, "dropout": 0.0} | changes).with_compute(**compute)


def tiny_realm(shared_tower: bool = False, **changes) -> Realm:
    bert = tiny_bert(**changes)
    return Realm(bert, projection=8, shared_tower=shared_tower, reader=Reader(bert, span_hidden=8, span_width=3))


def tiny_context(mesh: Mesh, rows: int, model: Realm | None = None) -> StaticContext:
    return StaticContext(model or tiny_realm(), mesh, SPECIAL.cls, SPECIAL.sep, rows)


def random_words(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(FIRST_WORD, VOCABULARY, size=count).tolist()


def document_rows(texts: Texts, length: int = DOCUMENT, rows: int | None = None) -> PassageBatch:
    """Titles and bodies in the document layout; empty rows after them up to `rows`."""
    placed = [layouts.document(title, body, length, SPECIAL) for title, body in texts]
    missing = (rows or len(texts)) - len(texts)
    ids = np.array([layout.ids for layout in placed], np.uint16)
    used = np.array([layout.used for layout in placed], np.int32)
    titles = np.array([min(len(title), length - 3) for title, _ in texts], np.int32)
    return PassageBatch(*(np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for x in (ids, used, titles)))


def query_rows(queries: list[list[int]], length: int = QUERY) -> dict[str, np.ndarray]:
    placed = [layouts.query(query, length, SPECIAL) for query in queries]
    ids = np.array([layout.ids for layout in placed], np.uint16)
    return {"query": ids, "query_length": np.array([layout.used for layout in placed], np.int32)}


def random_corpus(rng: np.random.Generator, rows: int) -> Texts:
    """Titles of one or two pieces and bodies of six to ten."""
    return [(random_words(rng, rng.integers(1, 3)), random_words(rng, rng.integers(6, 11))) for _ in range(rows)]


def task_of(name: str, context: StaticContext, changes: Mapping[str, Any] | None = None) -> Task:
    """A task with its losses, of a run that has nothing else; of REALM with four candidates. changes: dotted keys."""
    config = default()
    config.update_from_flattened_dict({"realm.candidates": 4, **(changes or {})})
    return make_task(name, SimpleNamespace(context=context, config=as_config(config), sources=None))


def masked_batch(rng: np.random.Generator, corpus: Texts, size: int) -> dict[str, np.ndarray]:
    """REALM queries: the first six pieces of a body, up to three of them masked; `source_row` is that passage."""
    own = rng.integers(len(corpus), size=size)
    sentences = [corpus[row][1][:6] for row in own]
    queries, positions, targets, weights = [], np.zeros((size, PREDICTIONS), np.int32), [], []
    for place, sentence in enumerate(sentences):
        count = int(rng.integers(1, PREDICTIONS + 1))
        start = int(rng.integers(0, 6 - count))
        queries.append(sentence[:start] + [SPECIAL.mask] * count + sentence[start + count :])
        positions[place, :count] = np.arange(start, start + count) + 1
        targets.append(sentence[start : start + count] + [0] * (PREDICTIONS - count))
        weights.append([1.0] * count + [0.0] * (PREDICTIONS - count))
    unmasked = np.zeros((size, QUERY), np.uint16)
    unmasked[:, :6] = sentences
    return query_rows(queries) | {
        "positions": positions,
        "targets": np.array(targets, np.int32),
        "weights": np.array(weights, np.float32),
        "sentence": unmasked,
        "sentence_length": np.full(size, 6, np.int32),
        "own_row": own.astype(np.int32),
    }


def embed_corpus(model: Realm, params: dict, corpus: Texts, devices: int) -> Index:
    """The corpus as a step takes it: vectors and document rows, padded for `devices`."""
    documents = document_rows(corpus, rows=padded_rows(len(corpus), devices))
    return Index(model.embed_documents(params, PassageBatch(*map(jnp.asarray, documents))), documents)


def loud_params(model: Realm, seed: int) -> Params:
    """Parameters louder than fresh ones, so that passages, words and spans differ and no two score nearly alike."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return rng.normal(float(path[-1].key == "scale"), 0.3, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(model))


def one_device_mesh() -> Mesh:
    return make_mesh(1, 1, 1, jax.devices()[:1])


def mesh_of_slices(*sizes: int) -> Mesh:
    """A mesh of all devices with these sizes of (slices, data, fsdp, model), as if they were of several TPU slices."""
    return Mesh(np.array(jax.devices()).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))
