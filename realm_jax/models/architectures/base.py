"""Describe an architecture of encoders: its network, and the names of its tensors and sizes in Hugging Face's files.

Each architecture has a file in this package, which ends with an `Architecture`. `table.py` lists them and has the
functions that other modules call. Read next: `bert.py`, the plainest one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flax.linen as nn

from realm_jax.models.layers import BertConfig

Settings = dict[str, Any]  # the content of a config.json


class Tensor(NamedTuple):
    """A parameter of a network, and its tensor in a file.

    Attributes:
        path: in the network's parameter tree.
        name: name of the tensor in Hugging Face's files, without the prefix.
        shape: shape of the parameter.
        first_row: row of the file's table that is row 0 of the parameter. We write zeros before it.
        is_table: the file may have more rows than the parameter. We do not read these.
        is_optional: the file may lack the tensor. The parameter is then 0.
    """

    path: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    first_row: int = 0
    is_table: bool = False
    is_optional: bool = False

    @property
    def is_transposed(self) -> bool:
        """Return True for a kernel [input, output], which files store as [output, input]."""
        return self.path[-1] == "kernel"


def linear(path: tuple[str, ...], name: str, shape: tuple[int, int], has_bias: bool = True) -> tuple[Tensor, ...]:
    """Return the tensors of a linear layer.

    Args:
        path: path of the layer in the parameter tree.
        name: name of the layer in Hugging Face's files.
        shape: inputs and outputs.
        has_bias: the layer has a bias.
    """
    kernel = Tensor((*path, "kernel"), f"{name}.weight", shape)
    return (kernel, Tensor((*path, "bias"), f"{name}.bias", shape[1:])) if has_bias else (kernel,)


def norm(path: tuple[str, ...], name: str, width: int, has_bias: bool = True) -> tuple[Tensor, ...]:
    """Return the tensors of a LayerNorm.

    Args:
        path: path of the layer in the parameter tree.
        name: name of the layer in Hugging Face's files.
        width: features.
        has_bias: the layer has a bias.
    """
    scale = Tensor((*path, "scale"), f"{name}.weight", (width,))
    return (scale, Tensor((*path, "bias"), f"{name}.bias", (width,))) if has_bias else (scale,)


class WordHead(NamedTuple):
    """Names of the tensors that predict masked words in a file of a masked language model.

    Attributes:
        transform: the linear layer.
        norm: the LayerNorm.
        bias: bias of the vocabulary.
        tied: the output layer, which some files store. It has to equal the word embeddings.
        has_biases: the linear layer and the LayerNorm have biases.
    """

    transform: str
    norm: str
    bias: str
    tied: str
    has_biases: bool = True


@dataclass(frozen=True)
class Architecture:
    """An architecture of encoders.

    Attributes:
        model_type: name in config.json and in `config.model.architecture`.
        network: class of the network, a module with the fields and methods of `models.bert.Bert`.
        tensors: function from sizes to parameters, which are at `bert` in the tree of a network.
        words: tensor of the word embeddings.
        positions: tensor of the position embeddings; '' if there are none.
        layers: beginning of the names of layers, up to their number.
        prefix: prefix of the encoder's tensors in a file that has a head too.
        head: tensors of word prediction.
        masked_lm_class: transformers' class for masked language models.
        base_class: transformers' class without a head.
        settings: field of BertConfig → key of config.json. Most fields are keys of `config.model` as well.
        defaults: field of BertConfig → value if config.json lacks its key.
        required: key of config.json → supported values; a missing key has the first one.
        first_position: row of the first token's position embedding.
        segment_types: rows of the table of segment embeddings; 0 if there is none.
        has_pooler: the base class has BERT's tanh layer unless `add_pooling_layer=False`.
        fill: function that adds the keys of `settings` to a config.json that has them in another form.
        extra: function from sizes to further keys of a config.json that we write.
    """

    model_type: str
    network: type[nn.Module]
    tensors: Callable[[BertConfig], tuple[Tensor, ...]]
    words: str
    positions: str
    layers: str
    prefix: str
    head: WordHead
    masked_lm_class: str
    base_class: str
    settings: dict[str, str]
    defaults: dict[str, Any] = field(default_factory=dict)
    required: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    first_position: int = 0
    segment_types: int = 2
    has_pooler: bool = True
    fill: Callable[[Settings], Settings] = lambda settings: settings
    extra: Callable[[BertConfig], Settings] = lambda config: {}
