"""The fixed parts of a run: config, folder, data, mesh, networks, and the corpus on the devices. Shared by every job.

Read next: `tasks/base.py` for what is learned in a run, `train/loop.py` for how, `eval/prediction.py` for how it
answers.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

from realm_jax.config import Config, Model, QaConfig, task_names
from realm_jax.data.examples import Bm25Hits, Bm25Lookup, Example, Lengths
from realm_jax.data.held_out import held_out_share, trained_rows
from realm_jax.data.sources import Sources
from realm_jax.data.store import PassageStore
from realm_jax.errors import UserError
from realm_jax.forward import Index, StaticContext, bm25_list_length, search_depth
from realm_jax.mesh import (
    addressable_parts,
    batch_parts,
    corpus_devices,
    logical_sharding,
    make_mesh,
    parameter_shardings,
    row_major,
)
from realm_jax.models.attention import select_attention
from realm_jax.models.inputs import PassageBatch
from realm_jax.models.layers import BertConfig, Compute, Params
from realm_jax.models.networks import Realm
from realm_jax.retrieval.bm25 import Bm25, check_has_terms, load_or_build
from realm_jax.retrieval.embed import EMBED_BATCH, GROUPS, CorpusRows, embed_corpus, in_groups, pad_rows
from realm_jax.retrieval.exact import padded_rows
from realm_jax.retrieval.fusion import FUSION_DEPTH
from realm_jax.retrieval.scann import BUDGET, ScannConfig


def host_of_gpus(mesh: Mesh) -> jax.Device | None:
    """The CPU beside a mesh of GPUs; None for other meshes, for those of several processes, whose CPUs may differ in
    the last bit, and where JAX_PLATFORMS leaves no CPU."""
    if mesh.devices.flat[0].platform != "gpu" or jax.process_count() > 1:
        return None
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def abstract_params(model: Any) -> Any:
    """Shape and dtype of each parameter of a model."""
    return nn.unbox(_abstract_boxed(model))


# A second to trace; every task of a recipe needs these several times.
@lru_cache(maxsize=8)
def _abstract_boxed(model: Any) -> Any:
    return jax.eval_shape(model.init_boxed, jax.random.key(0))


@lru_cache(maxsize=8)
def _shardings(model: Any, mesh: Mesh) -> Any:
    return parameter_shardings(mesh, _abstract_boxed(model))


@lru_cache(maxsize=8)
def _init_program(model: Any, mesh: Mesh | None) -> Callable[[jax.Array], Params]:
    return jax.jit(model.init, out_shardings=None if mesh is None else _shardings(model, mesh))


@dataclasses.dataclass(frozen=True)
class Run:
    """A run over a corpus of passages, which is on the devices in document layout."""

    config: Config
    workdir: Path
    mesh: Mesh
    model: Realm
    sources: Sources
    context: StaticContext
    lengths: Lengths

    def initial_params(self) -> Params:
        """Fresh parameters, initialised sharded; for the GPUs of one process on its CPU, which compiles this sooner."""
        host = host_of_gpus(self.mesh)
        if host is None:
            return _init_program(self.model, self.mesh)(jax.random.key(self.config.seed))
        with jax.default_device(host):
            made = _init_program(self.model, None)(jax.random.key(self.config.seed))
        return jax.device_put(made, self.param_shardings)

    @property
    def abstract_params(self) -> Any:
        """Shape and dtype of each parameter: a tree like the parameters'."""
        return abstract_params(self.model)

    @property
    def param_shardings(self) -> Any:
        """Where each parameter lives: a tree like the parameters'."""
        return _shardings(self.model, self.mesh)

    @cached_property
    def corpus(self) -> CorpusRows:
        """The corpus on the host, in document layout."""
        length, special = self.config.data.document_length, self.sources.tokenizer.special
        return CorpusRows(*self.sources.passages.document_matrix(length, special))

    @cached_property
    def documents(self) -> PassageBatch:
        """The corpus on the devices, sharded by rows."""
        length, special = self.config.data.document_length, self.sources.tokenizer.special
        matrix = self.sources.passages.document_matrix
        return PassageBatch(*self._by_rows(matrix(length, special, rows) for rows in self.own_rows))

    def index(self, vectors: NDArray) -> Index:
        """An index of host vectors [rows, projection], stored as `model.dtype` and sharded by rows."""
        return self.index_of_parts(vectors[rows] for rows in self.own_rows)

    def index_of_parts(self, parts: Iterable[NDArray]) -> Index:
        """`index` of the vectors of `own_rows` alone, part by part."""
        dtype = self.config.model.dtype
        (stored,) = self._by_rows([part.astype(dtype, copy=False)] for part in parts)
        return self.index_without_vectors._replace(vectors=stored)

    def words(self) -> Bm25:
        """BM25 over the corpus, kept in the run folder or made in memory. Raises UserError if it has no words."""
        words = load_or_build(self.sources.passages, self.config.retrieval.language, self.workdir)
        check_has_terms(words, f"search by words in {self.config.data.path}")
        return words

    def bm25_search(self, texts: Sequence[str], depth: int) -> Bm25Hits:
        """The `depth` best passages of texts by BM25, or as many as a list of hybrid search has."""
        return Bm25Hits(*self.words().scored(texts, max(depth, FUSION_DEPTH)))

    @property
    def find_sentence(self) -> Bm25Lookup | None:
        """What gives BM25's list for the words that are left of a masked sentence, without its own passage: for
        REALM's candidates, where they do not come from vectors alone."""
        realm = self.config.realm
        if realm.search == "vectors":
            return None
        words, own = self.words(), realm.exclude_own
        depth = bm25_list_length(realm.search, search_depth(realm, self.context.rows), self.context.rows)

        def find(text: str, own_row: int) -> Example:
            rows, scores = (found[0] for found in words.scored([text], depth + 1))
            kept = np.flatnonzero((rows >= 0) & (rows != own_row) if own else rows >= 0)[:depth]
            missing = 0, depth - len(kept)
            rows = np.pad(rows[kept], missing, constant_values=-1)
            return Bm25Hits(rows[None], np.pad(scores[kept], missing)[None]).arrays(0)

        return find

    @property
    def index_without_vectors(self) -> Index:
        """An index of passages without vectors, for when nothing searches by vectors."""
        return Index(None, self.documents, held_out=self._held_out)

    @cached_property
    def _held_out(self) -> jax.Array | None:
        """Which passages are of documents that are held out, spread over the devices as `documents` are; None: none."""
        kept = self.learned_rows(self.sources.passages)
        return None if kept is None else self._by_rows([~kept[rows]] for rows in self.own_rows)[0]

    def learned_rows(self, store: PassageStore) -> NDArray[np.bool_] | None:
        """The rows of a store whose sentences may be learned from, bool [rows]; None for all."""
        return trained_rows(store, held_out_share(self.config.evaluation.held_out, self.sources.questions))

    @property
    def answering_qa(self) -> QaConfig:
        """How questions are answered: evaluation and inference may read more passages than training does."""
        qa = self.config.qa
        return dataclasses.replace(qa, passages=self.config.answering.read or qa.passages)

    @property
    def scann_config(self) -> ScannConfig | None:
        """How hosts search, where `retrieval.backend` says that they do."""
        c = self.config
        budget = max(BUDGET, c.realm.candidates)
        return ScannConfig(budget, c.scann.leaves_searched) if c.retrieval.backend == "scann" else None

    @property
    def own_rows(self) -> list[slice]:
        """The passages that each device of this process holds, adjacent ones: start and stop."""
        rows = self.context.rows
        parts = addressable_parts(self.mesh, "rows", padded_rows(rows, corpus_devices(self.mesh)))
        return [slice(min(part.start, rows), min(part.stop, rows)) for _, part in parts]

    def _by_rows(self, own: Iterable[Sequence[NDArray]]) -> list[jax.Array]:
        """Arrays over all passages, spread over the devices of a slice and filled up with zeros: [padded_rows, …] each.

        own: what the arrays have for each of `own_rows`. It is taken one by one, so what is made on the way need not be
        on the host all at once.
        """
        size = padded_rows(self.context.rows, corpus_devices(self.mesh))
        found: list[list[jax.Array]] = []
        for (device, part), values in zip(addressable_parts(self.mesh, "rows", size), own, strict=True):
            filled = [pad_rows(array, part.stop - part.start) for array in values]
            place = SingleDeviceSharding(device)
            found.append([jax.device_put(array, row_major(place, array.ndim)) for array in filled])

        def whole(shards: Sequence[jax.Array]) -> jax.Array:
            shape = (size, *shards[0].shape[1:])
            places = logical_sharding(self.mesh, "rows", *[None] * (len(shape) - 1))
            return jax.make_array_from_single_device_arrays(shape, places, list(shards))

        return [whole(shards) for shards in zip(*found, strict=True)]

    def embed(
        self, params: Params, progress: Callable[[int], None] | None = None, rows: CorpusRows | None = None
    ) -> NDArray[np.float32]:
        """The corpus, or some rows of it, through the document embedder, on this run's devices.

        Every device embeds the same number at a time, whatever their number, so vectors do not depend on it.
        """
        tower = {name: params[name] for name in self.model.embedder_names}

        def embed_batch(batch: CorpusRows) -> jax.Array:
            return embed_program(self.model, self.mesh, tower, PassageBatch(*put_batch(self.mesh, batch)))

        size = EMBED_BATCH * self.mesh.size
        return embed_corpus(embed_batch, self.corpus if rows is None else rows, size, progress)

    def read_stored(self, first: int, last: int) -> CorpusRows:
        """Stored rows first … last − 1 of the corpus in document layout: those that its version leaves out as well."""
        length, special = self.config.data.document_length, self.sources.tokenizer.special
        return CorpusRows(*self.sources.passages.stored_matrix(length, special, first, last))


@partial(jax.jit, static_argnums=(0, 1))
def embed_program(model: Realm, mesh: Mesh, params: Params, documents: PassageBatch) -> jax.Array:
    """A batch of passages, spread over the mesh, to their vectors: [batch, projection] float32."""
    platform = mesh.devices.flat[0].platform
    if platform not in GROUPS:
        return model.embed_documents(params, documents)
    model = model.with_compute(hidden_sharding=None, **{"attention": "cpu"} if platform == "cpu" else {})
    rows = logical_sharding(mesh, "batch").spec  # every device takes its own in turn

    def embed(params: Params, documents: PassageBatch) -> jax.Array:
        return in_groups(
            lambda group: model.embed_documents(params, group),
            documents,
            GROUPS[platform],
            skip_empty=platform == "cpu",
        )

    # Unchecked: each device may skip other groups, and nothing is shared that the checker would have to follow.
    spread = jax.shard_map(embed, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows, check_vma=False)
    return spread(params, documents)


def mesh_for(config: Config, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of a config. Raises UserError if a task's batch cannot be shared out on it."""
    mesh = make_mesh(-1, config.mesh.fsdp, config.mesh.model, devices)
    check_batches(config, batch_parts(mesh))
    return mesh


def check_batches(config: Config, spread: int) -> None:
    """Raise UserError if a task's batch cannot be shared out over so many devices."""
    parts = config.optimizer.microbatches
    for name in task_names(config):
        size = config[name].batch_size
        if size % (spread * parts):
            raise UserError(
                f"config.{name}.batch_size: is {size}, but {spread} devices share a batch in {parts} part(s); set a "
                f"multiple of {spread * parts}"
            )


def device_options(mesh: Mesh, dtype: Any) -> dict[str, Any]:
    """Return fields of a `Compute` that suit the devices.

    One CPU needs no sharding of hidden states, and CPUs compute in float32 what is no product (measured:
    `benchmarks/README.md`).
    """
    attention = select_attention(mesh, dtype)
    state_dtype = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else None
    fields = {"attention": attention, "state_dtype": state_dtype}
    return fields | ({"hidden_sharding": None} if attention == "cpu" else {})


def make_bert(model: Model, vocabulary_size: int, length: int, hidden: NamedSharding | None) -> BertConfig:
    """One BERT of a config's section `model`, with positions for `length` pieces."""
    return BertConfig(
        vocabulary_size,
        width=model.width,
        layers=model.layers,
        heads=model.heads,
        feed_forward=model.feed_forward,
        max_length=length,
        dropout=model.dropout,
        hidden_act=model.hidden_act,
        compute=Compute(
            dtype=jnp.dtype(model.dtype),
            remat=model.remat,
            scan=model.remat != "none",  # unless it is unrolled, the compiler cannot undo what saves memory
            hidden_sharding=hidden,
        ),
    )


def put_batch(mesh: Mesh, batch: Any) -> Any:
    """Host arrays [batch, …] on the mesh, the first dimension spread over the data axes. Every process has all rows."""
    size = len(jax.tree.leaves(batch)[0])
    return make_global_batch(mesh, batch, np.arange(size), size)


def local_rows(mesh: Mesh, batch_size: int) -> NDArray[np.int64]:
    """Rows of a global batch that devices of this process hold, in order."""
    return np.unique(
        np.concatenate([np.arange(batch_size)[part] for _, part in addressable_parts(mesh, "batch", batch_size)])
    )


def make_global_batch(mesh: Mesh, batch: Any, rows: NDArray[np.int64], batch_size: int) -> Any:
    """`put_batch` of arrays that hold these rows of the global batch alone, in order (see `local_rows`)."""

    def put(array: NDArray) -> jax.Array:
        array = np.asarray(array)
        sharding = logical_sharding(mesh, "batch", *[None] * (array.ndim - 1))

        def part(index: tuple[slice, ...] | None) -> NDArray:
            assert index is not None
            return array[np.searchsorted(rows, np.arange(batch_size)[index[0]])]

        return jax.make_array_from_callback((batch_size, *array.shape[1:]), sharding, part)

    return jax.tree.map(put, batch)
