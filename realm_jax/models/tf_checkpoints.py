"""The released REALM and ORQA checkpoints of TensorFlow: which variable is which tensor, by name.

    bert/…, cls/…                    the reader's BERT and MLM head (`cc_news_pretrained/bert`), or any BERT of
                                     google-research/bert
    module/…                         an encoder (`cc_news_pretrained/embedder`, or the module of inverse cloze),
                                     and the question's in a fine-tuned checkpoint, with one more `module/` before it
    reader/module/…, reader/dense…   the reader with its span head, in a fine-tuned checkpoint

transformers 4.x reads them like this (`load_tf_weights_in_realm`). Arrays in, arrays out; `realm_jax/cli/weights.py`
reads the files. Read next: `weights.py` for the names on the other side.
"""

import re
from collections.abc import Iterable, Mapping

from numpy.typing import NDArray

from realm_jax.errors import UserError
from realm_jax.models.layers import LAYER_NORM_EPSILON, BertConfig
from realm_jax.models.reader import SPAN_NORM_EPSILON

EMBEDDER, READER = "embedder", "reader"
KERAS_EPSILON = 1e-3
# Variables that no network has: the optimizer's variables and counters, the next-sentence head, an encoder's MLM head.
UNUSED = re.compile(
    r"(^|/)(adam_[mv]|AdamWeightDecayOptimizer(_\d+)?|global_step|block_emb|cls/seq_relationship)($|/)"
    r"|^(module/)+cls/predictions/"
)
HEADS = {  # of the networks, before and after
    EMBEDDER: {
        r"dense/": "cls.dense.",
        r"(LayerNorm|layer_normalization)/": "cls.LayerNorm.",  # the second if the published code made it
    },
    READER: {
        r"dense/": "qa_outputs.dense_intermediate.",
        r"dense_1/": "qa_outputs.dense_output.",
        r"layer_normalization/": "qa_outputs.layer_normalization.",
    },
}
LEAVES = {"kernel": "weight", "gamma": "weight", "beta": "bias", "output_bias": "bias"}
REQUIRED = (  # their shapes are the sizes of a network
    "bert.embeddings.word_embeddings.weight",
    "bert.embeddings.position_embeddings.weight",
    "bert.encoder.layer.0.intermediate.dense.weight",
)


def network_of(name: str) -> tuple[str, str] | None:
    """Return the network of a variable, and its name in there; None if it is not a network's parameter."""
    if UNUSED.search(name):
        return None
    if name.startswith("module/"):
        return EMBEDDER, re.sub("^(module/)+", "", name)
    if name.startswith("reader/"):
        return READER, re.sub("^reader/(module/)*", "", name)
    if name.startswith(("bert/", "cls/")):
        return READER, name
    return None


def tensor_name(network: str, name: str) -> str:
    """Return Hugging Face's name for a variable, with `bert.` before those of the encoder and its pooler.

    Args:
        network: EMBEDDER or READER.
        name: name of the variable in this network.

    Raises:
        KeyError: for an unknown variable.
    """
    if name.startswith(("bert/", "cls/")):
        *path, leaf = re.sub(r"layer_(\d+)/", r"layer/\1/", name).split("/")
        leaf = f"{leaf}.weight" if leaf.endswith("_embeddings") else LEAVES.get(leaf, leaf)
        return ".".join([*path, leaf])
    for theirs, ours in HEADS[network].items():
        if match := re.fullmatch(rf"{theirs}(\w+)", name):
            leaf = match.groups()[-1]
            return ours + LEAVES.get(leaf, leaf)
    raise KeyError(name)


def epsilons(network: str, names: Iterable[str]) -> dict[str, float]:
    """Return the epsilons of LayerNorms in a network's heads, as settings of Hugging Face.

    Args:
        network: EMBEDDER or READER.
        names: names of its variables, which tell if Keras's layer was used, with Keras's default.
    """
    if network == READER:
        return {"reader_layer_norm_eps": SPAN_NORM_EPSILON}
    is_keras = any("layer_normalization/" in name for name in names)
    return {"projection_layer_norm_eps": KERAS_EPSILON if is_keras else LAYER_NORM_EPSILON}


def map_variables(names: Iterable[str], path: str) -> dict[str, dict[str, str]]:
    """Map the variables of a checkpoint: network → Hugging Face's name → the variable's.

    Args:
        names: names of all variables.
        path: path of the checkpoint, for messages.

    Raises:
        UserError: for an unknown variable of a network, for two that are the same tensor, and for a network without a
            BERT.
    """
    variables: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        if (network_and_name := network_of(name)) is None:
            continue
        network, inner = network_and_name
        try:
            tensor = tensor_name(network, inner)
        except KeyError:
            raise UserError(
                f"{path}: has {name}, which no released checkpoint has; name one of REALM or ORQA"
            ) from None
        if tensor in variables.setdefault(network, {}):
            other = variables[network][tensor]
            raise UserError(f"{path}: {other} and {name} are both {tensor}; name one of REALM or ORQA")
        variables[network][tensor] = name
    for network in variables or {"network": {}}:
        for name in REQUIRED:
            if name not in variables.get(network, {}):
                raise UserError(f"{path}: has no {name} for its {network}; name a checkpoint of REALM, ORQA or BERT")
    return variables


def transposed(variable: str, array: NDArray) -> NDArray:
    """Return a variable as Hugging Face stores it: matrices [output, input], tables unchanged.

    Args:
        variable: its name.
        array: its value.
    """
    return array.T if variable.endswith("/kernel") else array


def bert_config(tensors: Mapping[str, NDArray]) -> BertConfig:
    """Return the sizes of a BERT by the shapes of its tensors; every released one has heads of 64 features."""
    words, positions, intermediate = (tensors[name].shape for name in REQUIRED)
    layers = {int(match[1]) for name in tensors if (match := re.match(r"bert\.encoder\.layer\.(\d+)\.", name))}
    return BertConfig(
        words[0],
        width=words[1],
        layers=len(layers),
        heads=max(words[1] // 64, 1),
        feed_forward=intermediate[0],
        max_length=positions[0],
    )
