"""The fixed parts of a run: config, directory, data, mesh, networks, and the corpus on the devices. All jobs share it.

Read next: `tasks/base.py` for the tasks of a run, `train/loop.py` for training, `eval/prediction.py` for answering.
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
    put_with_sharding,
    replicated,
    row_major,
)
from realm_jax.models.architectures.table import ARCHITECTURES
from realm_jax.models.attention import select_attention
from realm_jax.models.inputs import PassageBatch
from realm_jax.models.layers import BertConfig, Compute, Params, Rotary
from realm_jax.models.networks import Realm
from realm_jax.retrieval.analyzers import available
from realm_jax.retrieval.bm25 import Bm25, check_has_terms, load_or_build
from realm_jax.retrieval.embed import EMBED_BATCH, GROUPS, CorpusRows, EmbedBatch, embed_corpus, in_groups, pad_rows
from realm_jax.retrieval.exact import padded_rows
from realm_jax.retrieval.fusion import FUSION_DEPTH
from realm_jax.retrieval.scann import BUDGET, ScannConfig
from realm_jax.retrieval.token_rerank import Compression, StoredTokens


def cpu_of_gpu_mesh(mesh: Mesh) -> jax.Device | None:
    """Return the CPU of the machine whose GPUs are in a mesh; None for other meshes.

    None also for several processes, whose CPUs may differ in the last bit, and if JAX_PLATFORMS excludes CPUs.
    """
    if mesh.devices.flat[0].platform != "gpu" or jax.process_count() > 1:
        return None
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def abstract_params(model: Any) -> Any:
    """Return the shape and dtype of each parameter of a model."""
    return nn.unbox(_abstract_boxed(model))


# Tracing takes a second, and every task of a recipe needs these several times.
@lru_cache(maxsize=8)
def _abstract_boxed(model: Any) -> Any:
    return jax.eval_shape(model.init_boxed, jax.random.key(0))


@lru_cache(maxsize=8)
def _shardings(model: Any, mesh: Mesh) -> Any:
    return parameter_shardings(mesh, _abstract_boxed(model))


@lru_cache(maxsize=8)
def _init_program(model: Any, mesh: Mesh | None) -> Callable[[jax.Array], Params]:
    """Return the jitted initialization: key → parameters, sharded over the mesh if there is one."""
    return jax.jit(model.init, out_shardings=None if mesh is None else _shardings(model, mesh))


@dataclasses.dataclass(frozen=True)
class Run:
    """A run over a corpus of passages, which is on the devices in document layout.

    Attributes:
        config: validated.
        workdir: the run directory.
        mesh: the devices.
        model: the networks.
        sources: the data.
        context: static arguments of the compiled steps.
        lengths: sizes of the arrays of examples.
    """

    config: Config
    workdir: Path
    mesh: Mesh
    model: Realm
    sources: Sources
    context: StaticContext
    lengths: Lengths

    def initial_params(self) -> Params:
        """Return newly initialized parameters, sharded as `param_shardings`.

        For the GPUs of one process, its CPU makes them, because the program compiles faster for it.
        """
        cpu = cpu_of_gpu_mesh(self.mesh)
        if cpu is None:
            return _init_program(self.model, self.mesh)(jax.random.key(self.config.seed))
        with jax.default_device(cpu):
            params = _init_program(self.model, None)(jax.random.key(self.config.seed))
        return jax.device_put(params, self.param_shardings)

    @property
    def abstract_params(self) -> Any:
        """Return the shape and dtype of each parameter, in a tree like the parameters'."""
        return abstract_params(self.model)

    @property
    def param_shardings(self) -> Any:
        """Return the sharding of each parameter, in a tree like the parameters'."""
        return _shardings(self.model, self.mesh)

    @cached_property
    def corpus(self) -> CorpusRows:
        """Return the corpus on the host, in document layout."""
        length, special = self.config.data.document_length, self.sources.tokenizer.special
        return CorpusRows(*self.sources.passages.document_matrix(length, special))

    @cached_property
    def documents(self) -> PassageBatch:
        """Return the corpus on the devices, sharded by rows."""
        length, special = self.config.data.document_length, self.sources.tokenizer.special
        matrix = self.sources.passages.document_matrix
        parts = (matrix(length, special, rows) for rows in self.local_corpus_slices)
        return PassageBatch(*self._shard_corpus_arrays(parts))

    def index(self, vectors: NDArray) -> Index:
        """Return an index of host vectors [rows, projection], stored as `model.dtype` and sharded by rows."""
        return self.index_of_parts(vectors[rows] for rows in self.local_corpus_slices)

    def index_of_parts(self, parts: Iterable[NDArray]) -> Index:
        """Return an index of the vectors of `local_corpus_slices`, [rows of the slice, projection] each."""
        dtype = self.config.model.dtype
        (stored,) = self._shard_corpus_arrays([part.astype(dtype, copy=False)] for part in parts)
        return self.index_without_vectors._replace(vectors=stored)

    def stored_tokens(self, vectors: NDArray[np.int8], compression: Compression) -> StoredTokens:
        """Return token vectors on the devices, sharded by rows.

        Args:
            vectors: vectors of all passages, [rows, tokens, dimensions].
            compression: compression of these vectors.
        """
        (stored,) = self._shard_corpus_arrays([vectors[rows]] for rows in self.local_corpus_slices)
        return StoredTokens(stored, put_with_sharding(compression.projection, replicated(self.mesh)))

    @property
    def bm25_language(self) -> str:
        """Return the language whose terms BM25 matches: of the config, or of the prepared folder; '' to detect it."""
        return self.config.retrieval.language or available(self.sources.language)

    def bm25(self) -> Bm25:
        """Return BM25 over the corpus, from the run directory or built in memory.

        Raises UserError if the corpus has no terms.
        """
        bm25 = load_or_build(self.sources.passages, self.bm25_language, self.workdir)
        check_has_terms(bm25, f"search by words in {self.config.data.path}")
        return bm25

    def bm25_search(self, texts: Sequence[str], depth: int) -> Bm25Hits:
        """Search passages for texts by BM25.

        Args:
            texts: queries.
            depth: passages for each; at least FUSION_DEPTH are returned, which hybrid search needs.
        """
        return Bm25Hits(*self.bm25().scored(texts, max(depth, FUSION_DEPTH)))

    @property
    def bm25_for_masked_sentence(self) -> Bm25Lookup | None:
        """Return a function that searches REALM's candidates by BM25 with the unmasked words of a sentence.

        With `realm.exclude_own` it excludes the sentence's passage. None if candidates come only from vectors.
        """
        realm = self.config.realm
        if realm.search == "vectors":
            return None
        bm25 = self.bm25()
        depth = bm25_list_length(realm.search, search_depth(realm, self.context.rows), self.context.rows)

        def search_candidates(text: str, own_row: int) -> Example:
            rows, scores = (batch[0] for batch in bm25.scored([text], depth + 1))  # [depth + 1] both
            valid = (rows >= 0) & (rows != own_row) if realm.exclude_own else rows >= 0
            ranks = np.flatnonzero(valid)[:depth]
            padding = 0, depth - len(ranks)
            rows = np.pad(rows[ranks], padding, constant_values=-1)  # [depth]
            return Bm25Hits(rows[None], np.pad(scores[ranks], padding)[None]).arrays(0)

        return search_candidates

    @property
    def index_without_vectors(self) -> Index:
        """Return an index of passages without vectors, for tasks that do not search by vectors."""
        return Index(None, self.documents, held_out=self._held_out, words=self._words)

    @cached_property
    def _words(self) -> jax.Array:
        """Return which tokens are words, bool [vocabulary], on every device."""
        return put_with_sharding(self.sources.tokenizer.is_word, replicated(self.mesh))

    @cached_property
    def _held_out(self) -> jax.Array | None:
        """Return which passages are of held-out documents, bool [rows], sharded as `documents`; None for none."""
        train_mask = self.training_rows(self.sources.passages)  # [rows]
        if train_mask is None:
            return None
        return self._shard_corpus_arrays([~train_mask[rows]] for rows in self.local_corpus_slices)[0]

    def training_rows(self, store: PassageStore) -> NDArray[np.bool_] | None:
        """Return which rows of a store are trained on, bool [rows], because they are not held out; None for all."""
        return trained_rows(store, held_out_share(self.config.evaluation.held_out, self.sources.questions))

    @property
    def answering_qa(self) -> QaConfig:
        """Return the settings for answering: evaluation and inference may read more passages than training does."""
        qa = self.config.qa
        passages = min(self.config.answering.read or qa.passages, self.context.rows)
        return dataclasses.replace(qa, passages=passages)

    @property
    def scann_config(self) -> ScannConfig | None:
        """Return the settings of host search; None if `retrieval.backend` is not 'scann'."""
        config = self.config
        budget = max(BUDGET, config.realm.candidates)
        return ScannConfig(budget, config.scann.leaves_searched) if config.retrieval.backend == "scann" else None

    @property
    def local_corpus_slices(self) -> list[slice]:
        """Return the range of passages that each device of this process holds, with start and stop."""
        rows = self.context.rows
        parts = addressable_parts(self.mesh, "rows", padded_rows(rows, corpus_devices(self.mesh)))
        return [slice(min(part.start, rows), min(part.stop, rows)) for _, part in parts]

    def _shard_corpus_arrays(self, local_parts: Iterable[Sequence[NDArray]]) -> list[jax.Array]:
        """Put arrays over all passages on the devices of a slice, sharded by rows.

        Args:
            local_parts: for each of `local_corpus_slices` the parts of the arrays. They are taken one by one, so that
                not all of them need to be on the host at once.

        Returns:
            The arrays, padded with zeros: [padded_rows, …] each.
        """
        size = padded_rows(self.context.rows, corpus_devices(self.mesh))
        shards_by_device: list[list[jax.Array]] = []
        for (device, part), arrays in zip(addressable_parts(self.mesh, "rows", size), local_parts, strict=True):
            padded = [pad_rows(array, part.stop - part.start) for array in arrays]  # [rows of the device, …]
            sharding = SingleDeviceSharding(device)
            shards_by_device.append([jax.device_put(array, row_major(sharding, array.ndim)) for array in padded])
        arrays_on_mesh: list[jax.Array] = []
        for shards in zip(*shards_by_device, strict=True):
            shape = (size, *shards[0].shape[1:])
            mesh_sharding = logical_sharding(self.mesh, "rows", *[None] * (len(shape) - 1))
            arrays_on_mesh.append(jax.make_array_from_single_device_arrays(shape, mesh_sharding, list(shards)))
        return arrays_on_mesh

    def embed(
        self, params: Params, progress: Callable[[int], None] | None = None, rows: CorpusRows | None = None
    ) -> NDArray[np.float32]:
        """Embed passages by the passage encoder, on this run's devices.

        Every device embeds the same number at a time, so vectors do not depend on the number of devices.

        Args:
            params: parameters of the model.
            progress: called with the number of embedded passages.
            rows: passages; None for the corpus.

        Returns:
            [rows, projection].
        """
        encoders = {name: params[name] for name in self.model.embedder_names}
        rows = self.corpus if rows is None else rows
        return embed_corpus(self.embedder(encoders), rows, EMBED_BATCH * self.mesh.size, progress)

    def embedder(self, inputs: Any, embed: "EmbedPassages | None" = None) -> EmbedBatch:
        """Return a function that embeds a batch of passages on this run's devices.

        Args:
            inputs: inputs of `embed`, on the devices or on the host.
            embed: see `embed_program`; None for the vectors of passages, whose input is the parameters of the encoders.
        """
        function = embed or embed_passages
        return lambda batch: embed_program(
            self.model, self.mesh, inputs, PassageBatch(*put_batch(self.mesh, batch)), function
        )

    def read_stored(self, first: int, last: int) -> CorpusRows:
        """Read stored rows of the corpus in document layout, including those that its version excludes.

        Args:
            first: first row.
            last: row after the last one.
        """
        length, special = self.config.data.document_length, self.sources.tokenizer.special
        return CorpusRows(*self.sources.passages.stored_matrix(length, special, first, last))


EmbedPassages = Callable[[Realm, Any, PassageBatch], Any]  # (networks, inputs, passages [n, length]) → arrays [n, …]


def embed_passages(model: Realm, params: Params, passages: PassageBatch) -> jax.Array:
    """Return the vectors of passages, float32 [n, projection].

    Args:
        model: whose passage encoder embeds.
        params: parameters of the encoders.
        passages: ids [n, length].
    """
    return model.embed_documents(params, passages)


@partial(jax.jit, static_argnums=(0, 1, 4))
def embed_program(
    model: Realm, mesh: Mesh, inputs: Any, documents: PassageBatch, embed: EmbedPassages = embed_passages
) -> Any:
    """Embed a batch of passages, sharded over the mesh.

    Args:
        model: whose passage encoder embeds.
        mesh: mesh of the run.
        inputs: inputs of `embed`, such as the parameters of the encoders.
        documents: [batch, length].
        embed: a function of a module, because a lambda would be compiled again at each call.

    Returns:
        Arrays [batch, …].
    """
    platform = mesh.devices.flat[0].platform
    if platform not in GROUPS:
        return embed(model, inputs, documents)
    model = model.with_compute(hidden_sharding=None, **{"attention": "cpu"} if platform == "cpu" else {})
    rows = logical_sharding(mesh, "batch").spec  # every device embeds its rows, group by group

    def embed_rows(inputs: Any, documents: PassageBatch) -> Any:
        return in_groups(
            lambda group: embed(model, inputs, group),
            documents,
            GROUPS[platform],
            skip_empty=platform == "cpu",
        )

    # Unchecked: each device may skip other groups, and devices share nothing that the checker would have to follow.
    embed_shards = jax.shard_map(
        embed_rows, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows, check_vma=False
    )
    return embed_shards(inputs, documents)


def mesh_for(config: Config, devices: list[jax.Device] | None = None) -> Mesh:
    """Make the mesh of a config.

    Args:
        config: config of the run.
        devices: devices of the mesh; None for all.

    Raises:
        UserError: the mesh does not fit the devices, or a task's batch cannot be sharded on it.
    """
    mesh = make_mesh(-1, config.mesh.fsdp, config.mesh.model, devices)
    check_batches(config, batch_parts(mesh))
    return mesh


def check_batches(config: Config, devices: int) -> None:
    """Check that every task's batch can be sharded.

    Args:
        config: config of the run.
        devices: over which a batch is sharded.

    Raises:
        UserError: the devices and microbatches do not divide a batch.
    """
    microbatches = config.optimizer.microbatches
    for name in task_names(config):
        size = config[name].batch_size
        if size % (devices * microbatches):
            raise UserError(
                f"config.{name}.batch_size: is {size}, but {devices} devices share a batch in {microbatches} part(s); "
                f"set a multiple of {devices * microbatches}"
            )


def device_options(mesh: Mesh, dtype: Any) -> dict[str, Any]:
    """Return the fields of a `Compute` that depend on the devices.

    One CPU needs no sharding of hidden states, and CPUs compute everything but products in float32 (measured:
    `benchmarks/README.md`).

    Args:
        mesh: mesh of the run.
        dtype: dtype of the model.
    """
    attention = select_attention(mesh, dtype)
    state_dtype = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else None
    fields = {"attention": attention, "state_dtype": state_dtype}
    return fields | ({"hidden_sharding": None} if attention == "cpu" else {})


def make_bert(model: Model, vocabulary_size: int, length: int, hidden: NamedSharding | None) -> BertConfig:
    """Return the sizes of an encoder, of a config's section `model`.

    Args:
        model: the section.
        vocabulary_size: size of the tokenizer.
        length: length of the longest sequence, in tokens.
        hidden: sharding of hidden states.
    """
    return BertConfig(
        vocabulary_size,
        width=model.width,
        layers=model.layers,
        heads=model.heads,
        feed_forward=model.feed_forward,
        max_length=length,
        dropout=model.dropout,
        hidden_act=model.hidden_act,
        architecture=model.architecture,
        norm_epsilon=model.norm_epsilon,
        segment_types=ARCHITECTURES[model.architecture].segment_types,
        rotary=Rotary(**model.rotary.to_dict()),
        compute=Compute(
            dtype=jnp.dtype(model.dtype),
            remat=model.remat,
            scan=model.remat != "none",  # unless it is unrolled, the compiler cannot undo what saves memory
            hidden_sharding=hidden,
        ),
    )


def put_batch(mesh: Mesh, batch: Any) -> Any:
    """Put host arrays on the mesh, sharded by their first dimension; every process has all rows.

    Args:
        mesh: mesh of the run.
        batch: a tree of arrays [batch, …].
    """
    size = len(jax.tree.leaves(batch)[0])
    return make_global_batch(mesh, batch, np.arange(size), size)


def local_rows(mesh: Mesh, batch_size: int) -> NDArray[np.int64]:
    """Return the rows of a global batch that devices of this process hold, in order.

    Args:
        mesh: mesh of the run.
        batch_size: size of the global batch.
    """
    parts = [np.arange(batch_size)[part] for _, part in addressable_parts(mesh, "batch", batch_size)]
    return np.unique(np.concatenate(parts))


def make_global_batch(mesh: Mesh, batch: Any, rows: NDArray[np.int64], batch_size: int) -> Any:
    """Put host arrays on the mesh as a global batch of which every process has only its own rows.

    Args:
        mesh: mesh of the run.
        batch: a tree of arrays [local batch, …].
        rows: rows of the global batch that they hold, in order (`local_rows`).
        batch_size: size of the global batch.
    """

    def put(array: NDArray) -> jax.Array:
        array = np.asarray(array)
        sharding = logical_sharding(mesh, "batch", *[None] * (array.ndim - 1))

        def part(index: tuple[slice, ...] | None) -> NDArray:
            assert index is not None
            return array[np.searchsorted(rows, np.arange(batch_size)[index[0]])]

        return jax.make_array_from_callback((batch_size, *array.shape[1:]), sharding, part)

    return jax.tree.map(put, batch)
