"""DistilBERT (Sanh et al. 2019): a BERT without segments and pooler, whose tensors have other names."""

import dataclasses
from functools import partial

from realm_jax.models.architectures.base import WordHead
from realm_jax.models.architectures.bert import BERT, bert_tensors
from realm_jax.models.layers import LAYER_NORM_EPSILON

LAYER = {  # our name → Hugging Face's
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "attention_output": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "intermediate": "ffn.lin1",
    "output": "ffn.lin2",
    "output_norm": "output_layer_norm",
}
LAYERS = "transformer.layer."

DISTILBERT = dataclasses.replace(
    BERT,
    model_type="distilbert",
    tensors=partial(bert_tensors, layers=LAYERS, layer=LAYER),
    layers=LAYERS,
    prefix="distilbert.",
    head=WordHead(
        transform="vocab_transform",
        norm="vocab_layer_norm",
        bias="vocab_projector.bias",
        tied="vocab_projector.weight",
    ),
    masked_lm_class="DistilBertForMaskedLM",
    base_class="DistilBertModel",
    settings={
        "vocabulary_size": "vocab_size",
        "width": "dim",
        "layers": "n_layers",
        "heads": "n_heads",
        "feed_forward": "hidden_dim",
        "hidden_act": "activation",
        "dropout": "dropout",
        "max_length": "max_position_embeddings",
    },
    defaults={"norm_epsilon": LAYER_NORM_EPSILON},  # fixed in the library
    required={},
    segment_types=0,
    has_pooler=False,
    extra=lambda c: {"attention_dropout": c.dropout},
)
