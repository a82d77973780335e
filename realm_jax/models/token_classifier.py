"""An encoder with a linear layer that scores every token, opened from a folder of Hugging Face with its tokenizer.

`tagger.py` scores labels of names with it, and `question_reader.py` the start and the end of an answer.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.tokenizer_files import TokenizerFile, tokenizer_file
from realm_jax.errors import UserError
from realm_jax.models.architectures.table import encoder_network
from realm_jax.models.layers import ACTIVATIONS, BertConfig, Params, layer_norm
from realm_jax.models.weights import (
    SETTINGS,
    TRANSFORM_ACTIVATION,
    WEIGHTS,
    Part,
    encoder,
    encoder_config,
    find,
    read,
)

Array = jax.Array


class TokenClassifier(nn.Module):
    """An encoder with a linear layer that scores the labels of every token.

    Attributes:
        config: sizes of the encoder.
        labels: number of labels.
        has_transform: a linear layer without bias, an activation and a LayerNorm come first, as in ModernBERT.
    """

    config: BertConfig
    labels: int
    has_transform: bool = False

    @nn.compact
    def __call__(self, ids: Array, mask: Array, segments: Array | None = None) -> Array:
        """Score the labels of every token.

        Args:
            ids: tokens, [batch, length] int.
            mask: false on padding, [batch, length] bool.
            segments: 0 or 1 for each token, [batch, length] int; None for 0.

        Returns:
            Logits [batch, length, labels] float32.
        """
        segments = jnp.zeros_like(ids) if segments is None else segments
        hidden = encoder_network(self.config, "bert")(ids, segments, mask)  # [batch, length, width]
        hidden = hidden.astype(jnp.float32)
        if self.has_transform:
            hidden = nn.Dense(self.config.width, use_bias=False, name="transform")(hidden)
            transform_norm = layer_norm("transform_norm", self.config.norm_epsilon, has_bias=False)
            hidden = transform_norm(ACTIVATIONS[TRANSFORM_ACTIVATION](hidden))
        return nn.Dense(self.labels, name="classifier")(hidden)


class LoadedClassifier(NamedTuple):
    """A network with its parameters.

    Attributes:
        network: without parameters.
        params: parameters of the network.
        tokenizer: tokenizer of the model.
    """

    network: TokenClassifier
    params: Params
    tokenizer: Tokenizer


def load_token_classifier(
    folder: Path, labels: int, head_of: Callable[[BertConfig], Part], purpose: str
) -> LoadedClassifier:
    """Load an encoder with a linear layer over its tokens.

    Args:
        folder: folder of the model, with `config.json`, `model.safetensors` and a tokenizer.
        labels: outputs of the linear layer.
        head_of: sizes of the encoder → the part of the file that holds the layer.
        purpose: purpose of the model, in the words of Hugging Face, for messages.

    Raises:
        UserError: something is missing or does not fit; the message names the file.
    """
    config = encoder_config(folder)
    head = head_of(config)
    files = find(folder, config, (encoder(config), head))
    if head.title in files.missing:
        raise UserError(f"{folder / WEIGHTS}: has no {head.title}; choose a model for {purpose}")
    vocabulary = tokenizer_file(folder)
    if vocabulary is None:
        raise UserError(f"{folder}: has no vocab.txt and no tokenizer.json; put the model's tokenizer there")
    tokenizer = TokenizerFile.of(vocabulary).read()
    if tokenizer.size > config.vocabulary_size:  # JAX would read the last row in place of one that is not there
        raise UserError(
            f"{vocabulary}: has {tokenizer.size} tokens, but the model {config.vocabulary_size}; put the model's own "
            "tokenizer there"
        )
    has_transform = any(tensor.path[0] == "transform" for tensor in head.tensors)
    return LoadedClassifier(TokenClassifier(config, labels, has_transform), read(files), tokenizer)


def digest_of(folder: Path, tokenizer: Tokenizer) -> str:
    """Return digits that change with any weight, setting or token of a model.

    Args:
        folder: folder of the model.
        tokenizer: tokenizer of the model.
    """
    digest = hashlib.sha256()
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))  # if there is no single file
    for file in (*((WEIGHTS,) if (folder / WEIGHTS).is_file() else shards), SETTINGS):
        with open(folder / file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"{digest.hexdigest()[:16]}-{tokenizer.fingerprint}"
