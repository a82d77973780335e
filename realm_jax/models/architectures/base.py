"""What an architecture is: its network, and how Hugging Face's files name its tensors and sizes.

Each architecture has a file here, which ends in an `Architecture`. `table.py` lists them, and has the functions that
other modules call. Read next: `bert.py` for the plainest one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flax.linen as nn

from realm_jax.models.layers import BertConfig

Settings = dict[str, Any]  # the content of a config.json


class Tensor(NamedTuple):
    """A parameter.

    Attributes:
        path: in the network's tree.
        name: Hugging Face's, without the prefix.
        shape: here.
        first_row: row of the file's table that is row 0 of the network's; we write zeros before it.
        is_table: a file may have more rows than the network, which are not read.
        is_optional: a file may lack it; it is then 0.
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
        path: of the layer.
        name: Hugging Face's.
        shape: inputs and outputs.
        has_bias: the layer has a bias.
    """
    kernel = Tensor((*path, "kernel"), f"{name}.weight", shape)
    return (kernel, Tensor((*path, "bias"), f"{name}.bias", shape[1:])) if has_bias else (kernel,)


def norm(path: tuple[str, ...], name: str, width: int, has_bias: bool = True) -> tuple[Tensor, ...]:
    """Return the tensors of a LayerNorm.

    Args:
        path: of the layer.
        name: Hugging Face's.
        width: features.
        has_bias: the layer has a bias.
    """
    scale = Tensor((*path, "scale"), f"{name}.weight", (width,))
    return (scale, Tensor((*path, "bias"), f"{name}.bias", (width,))) if has_bias else (scale,)


class WordHead(NamedTuple):
    """Names of the tensors that predict words in a file for masked language models.

    Attributes:
        transform: the linear layer.
        norm: the LayerNorm.
        bias: of the vocabulary.
        tied: the output layer, which repeats the word embeddings in some files.
        has_biases: the linear layer and the LayerNorm have biases.
    """

    transform: str
    norm: str
    bias: str
    tied: str
    has_biases: bool = True


@dataclass(frozen=True)
class Architecture:
    """A kind of encoder.

    Attributes:
        model_type: its name in config.json, and in `config.model.architecture`.
        network: its class, a module with the fields and methods of `models.bert.Bert`.
        tensors: sizes → parameters, at `bert` in the tree of a network.
        words: name of the word embeddings.
        positions: name of the position embeddings; '' if it has none.
        layers: what the names of layers begin with, up to their number.
        prefix: of the names of the encoder in a file that has a head too.
        head: word prediction.
        classes: of transformers: for masked language models, and without a head.
        settings: field of BertConfig, most of them of `config.model` as well → key of config.json.
        defaults: field → value if config.json has none.
        required: key of config.json → the values that the network is made for; a missing key has the first.
        first_position: row of the first token's position embedding.
        segment_types: rows of the table of segments; 0 if it has none.
        has_pooler: the class without a head has BERT's tanh layer, unless told to leave it out.
        fill: adds the keys of `settings` to a config.json that has them in another form.
        extra: sizes → more keys of config.json.
    """

    model_type: str
    network: type[nn.Module]
    tensors: Callable[[BertConfig], tuple[Tensor, ...]]
    words: str
    positions: str
    layers: str
    prefix: str
    head: WordHead
    classes: tuple[str, str]
    settings: dict[str, str]
    defaults: dict[str, Any] = field(default_factory=dict)
    required: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    first_position: int = 0
    segment_types: int = 2
    has_pooler: bool = True
    fill: Callable[[Settings], Settings] = lambda settings: settings
    extra: Callable[[BertConfig], Settings] = lambda config: {}
