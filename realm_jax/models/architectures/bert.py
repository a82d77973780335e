"""BERT (Devlin et al. 2019): names of its tensors and sizes. The network is in `models/bert.py`."""

from collections.abc import Mapping

from realm_jax.models.architectures.base import Architecture, Tensor, WordHead, linear, norm
from realm_jax.models.bert import Bert
from realm_jax.models.layers import LAYER_NORM_EPSILON, BertConfig

LAYER = {  # ours → theirs
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}
WORDS, POSITIONS = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
BERT_SETTINGS = {
    "vocabulary_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "hidden_act": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "max_length": "max_position_embeddings",
    "norm_epsilon": "layer_norm_eps",
}


def bert_tensors(
    c: BertConfig, layers: str = "encoder.layer.", layer: Mapping[str, str] = LAYER, first_position: int = 0
) -> tuple[Tensor, ...]:
    """Return the parameters of a `Bert`.

    Args:
        c: its sizes.
        layers: what the names of layers begin with, up to their number.
        layer: our names of the parts of a layer → theirs.
        first_position: row of the first token's position embedding.
    """
    positions = Tensor(("bert", "positions", "embedding"), POSITIONS, (c.max_length, c.width), first_position, True)
    tensors = [Tensor(("bert", "words", "embedding"), WORDS, (c.vocabulary_size, c.width), is_table=True), positions]
    if c.segment_types:
        name, shape = "embeddings.token_type_embeddings.weight", (c.segment_types, c.width)
        tensors.append(Tensor(("bert", "segments", "embedding"), name, shape, is_table=True))
    tensors += norm(("bert", "embedding_norm"), "embeddings.LayerNorm", c.width)
    sizes = {"intermediate": (c.width, c.feed_forward), "output": (c.feed_forward, c.width)}
    for number in range(c.layers):
        for part, name in layer.items():
            path, theirs = ("bert", f"layer_{number}", part), f"{layers}{number}.{name}"
            if part.endswith("_norm"):
                tensors += norm(path, theirs, c.width)
            else:
                tensors += linear(path, theirs, sizes.get(part, (c.width, c.width)))
    return tuple(tensors)


BERT = Architecture(
    "bert",
    Bert,
    bert_tensors,
    WORDS,
    POSITIONS,
    "encoder.layer.",
    "bert.",
    WordHead(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        "cls.predictions.decoder.weight",
    ),
    ("BertForMaskedLM", "BertModel"),
    BERT_SETTINGS,
    {"norm_epsilon": LAYER_NORM_EPSILON},
    {"position_embedding_type": ("absolute",), "is_decoder": (False,)},
    extra=lambda c: {"attention_probs_dropout_prob": c.dropout, "type_vocab_size": c.segment_types},
)
