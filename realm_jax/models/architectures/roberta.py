"""RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2020): BERTs with one segment, and with other names.

Position embeddings begin at row 2, behind the one of padding, whose id is 1. Two texts are `<s> a </s></s> b </s>` in
the library; our encoders read a passage as one text.
"""

import dataclasses
from functools import partial

from realm_jax.models.architectures.base import WordHead
from realm_jax.models.architectures.bert import BERT, bert_tensors

PADDING = 1  # id of <pad>
FIRST_POSITION = PADDING + 1

ROBERTA = dataclasses.replace(
    BERT,
    model_type="roberta",
    tensors=partial(bert_tensors, first_position=FIRST_POSITION),
    prefix="roberta.",
    head=WordHead("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder.weight"),
    classes=("RobertaForMaskedLM", "RobertaModel"),
    required=BERT.required | {"pad_token_id": (PADDING,)},
    first_position=FIRST_POSITION,
    segment_types=1,
)
XLM_ROBERTA = dataclasses.replace(
    ROBERTA, model_type="xlm-roberta", classes=("XLMRobertaForMaskedLM", "XLMRobertaModel")
)
