"""BERT (Devlin et al. 2019): names of its tensors and sizes. The network is in `models/bert.py`."""

from collections.abc import Mapping

from realm_jax.models.architectures.base import Architecture, Tensor, WordHead, linear, norm
from realm_jax.models.bert import Bert
from realm_jax.models.layers import LAYER_NORM_EPSILON, BertConfig

LAYER = {  # our name → Hugging Face's
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
SEGMENTS = "embeddings.token_type_embeddings.weight"
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
        c: sizes of the network.
        layers: beginning of the names of layers, up to their number.
        layer: our name of a part of a layer → Hugging Face's.
        first_position: row of the first token's position embedding.
    """
    tables = [
        ("words", WORDS, c.vocabulary_size, 0),
        ("positions", POSITIONS, c.max_length, first_position),
        ("segments", SEGMENTS, c.segment_types, 0),
    ]
    tensors = [
        Tensor(("bert", table, "embedding"), name, (rows, c.width), first_row=first_row, is_table=True)
        for table, name, rows, first_row in tables
        if rows
    ]
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
    model_type="bert",
    network=Bert,
    tensors=bert_tensors,
    words=WORDS,
    positions=POSITIONS,
    layers="encoder.layer.",
    prefix="bert.",
    head=WordHead(
        transform="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        bias="cls.predictions.bias",
        tied="cls.predictions.decoder.weight",
    ),
    masked_lm_class="BertForMaskedLM",
    base_class="BertModel",
    settings=BERT_SETTINGS,
    defaults={"norm_epsilon": LAYER_NORM_EPSILON},
    required={"position_embedding_type": ("absolute",), "is_decoder": (False,)},
    extra=lambda c: {"attention_probs_dropout_prob": c.dropout, "type_vocab_size": c.segment_types},
)
