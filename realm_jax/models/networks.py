"""All networks of a run over one tree of parameters: the retriever, the reader, and networks of tasks.

    params = {'query_embedder': …, 'document_embedder': …, 'reader': …}     (one 'embedder' if it is shared)

The encoders of retriever and reader may differ in size. A task may add networks (`Network`), each with its key.
"""

import abc
import dataclasses
import zlib
from typing import Any, ClassVar

import flax.linen as nn
import jax

from realm_jax.models.layers import BertConfig, Params
from realm_jax.models.reader import Reader
from realm_jax.models.retriever import Retriever

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Network(abc.ABC):
    """A network of a task: its sizes, and pure functions over a tree in which it has the key `name`.

    Attributes:
        bert: sizes of its encoder.
        name: top-level key of its parameters.
    """

    bert: BertConfig
    name: ClassVar[str]

    @abc.abstractmethod
    def init_boxed(self, key: Array) -> Params:
        """Return its fresh parameters, below `name`, boxed with their logical axis names."""


@dataclasses.dataclass(frozen=True)
class Realm(Retriever):
    """A retriever with a reader, and with the networks of tasks.

    Methods are pure functions of their arguments; `key` turns dropout on (None: off).

    Attributes:
        reader: reader of passages.
        networks: networks of tasks.
    """

    reader: Reader = dataclasses.field(kw_only=True)
    networks: tuple[Network, ...] = dataclasses.field(default=(), kw_only=True)

    def with_compute(self, **changes: Any) -> "Realm":
        """Return the same networks, their encoders computed with other fields of `layers.Compute`."""

        def changed(part: Any) -> Any:
            return dataclasses.replace(part, bert=part.bert.with_compute(**changes))

        networks = tuple(map(changed, self.networks))
        return dataclasses.replace(changed(self), reader=changed(self.reader), networks=networks)

    def init_boxed(self, key: Array) -> Params:
        """Return fresh parameters, boxed with their logical axis names.

        Those of a network depend on the key and its name, not on the other networks.
        """
        params = self.init_encoders(jax.random.fold_in(key, 0)) | self.reader.init_boxed(jax.random.fold_in(key, 1))
        for network in self.networks:
            network_key = jax.random.fold_in(key, zlib.crc32(network.name.encode()))
            params[network.name] = network.init_boxed(network_key)
        return params

    def init(self, key: Array) -> Params:
        """Return fresh float32 parameters."""
        return nn.unbox(self.init_boxed(key))
