"""REALM's three networks as one object of pure functions: two embedders and a reader over one parameter tree.

    params = {'query_embedder': …, 'document_embedder': …, 'reader': …}     (one 'embedder' when the tower is shared)

A task may bring further ones (`Network`), each with a key of its own.

Read next: `encoder.py` and `reader.py` for the networks, `likelihood.py` for the objective, `forward.py` for how they
go together.
"""

import abc
import dataclasses
import zlib
from typing import Any, ClassVar

import flax.linen as nn
import jax

from realm_jax.models.bert import BertConfig, Params
from realm_jax.models.encoder import Retriever
from realm_jax.models.inputs import ReaderInput
from realm_jax.models.reader import Reader

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Network(abc.ABC):
    """A network that a task brings along: its sizes, and pure functions over a tree in which its parameters have the
    key `name`."""

    bert: BertConfig
    name: ClassVar[str]

    @abc.abstractmethod
    def init_boxed(self, key: Array) -> Params:
        """Its fresh parameters, below `name`, boxed with their logical axis names."""


@dataclasses.dataclass(frozen=True)
class Realm(Retriever):
    """A retriever with a reader, and with what tasks bring along. Methods are pure functions of their arguments; `key`
    turns dropout on (None: off)."""

    reader: Reader = dataclasses.field(kw_only=True)
    networks: tuple[Network, ...] = dataclasses.field(default=(), kw_only=True)

    @property
    def span_width(self) -> int:
        """Tokens of the longest answer."""
        return self.reader.span_width

    def with_bert(self, **changes: Any) -> "Realm":
        """The same networks with fields of their BERTs changed that are no sizes, such as how they attend."""

        def changed(part: Any) -> Any:
            return dataclasses.replace(part, bert=dataclasses.replace(part.bert, **changes))

        networks = tuple(map(changed, self.networks))
        return dataclasses.replace(changed(self), reader=changed(self.reader), networks=networks)

    def init_boxed(self, key: Array) -> Params:
        """Fresh parameters, boxed with their logical axis names. Those of a network depend on the key and its name, not
        on what other networks there are."""
        params = self.init_towers(jax.random.fold_in(key, 0)) | self.reader.init_boxed(jax.random.fold_in(key, 1))
        for network in self.networks:
            own = jax.random.fold_in(key, zlib.crc32(network.name.encode()))
            params[network.name] = network.init_boxed(own)
        return params

    def init(self, key: Array) -> Params:
        """Fresh float32 parameters."""
        return nn.unbox(self.init_boxed(key))

    def read_words(self, params: Params, joint: ReaderInput, positions: Array, key: Array | None = None) -> Array:
        """As `Reader.read_words`."""
        return self.reader.read_words(params, joint, positions, key)

    def read_targets(
        self, params: Params, joint: ReaderInput, positions: Array, targets: Array, key: Array | None = None
    ) -> tuple[Array, Array]:
        """As `Reader.read_targets`."""
        return self.reader.read_targets(params, joint, positions, targets, key)

    def read_spans(self, params: Params, joint: ReaderInput, key: Array | None = None) -> Array:
        """As `Reader.read_spans`."""
        return self.reader.read_spans(params, joint, key)


def flatten_passages(joint: ReaderInput) -> ReaderInput:
    """[batch, k, …] → [batch · k, …]."""
    return ReaderInput(*(x.reshape(-1, *x.shape[2:]) for x in joint))
