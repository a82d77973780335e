"""RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2020): BERTs with one segment and another word head.

Position embeddings begin at row 2, after the row of padding, whose id is 1. transformers joins two texts as
`<s> a </s></s> b </s>`. Our encoders read a passage as one text.
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
    head=WordHead(
        transform="lm_head.dense", norm="lm_head.layer_norm", bias="lm_head.bias", tied="lm_head.decoder.weight"
    ),
    masked_lm_class="RobertaForMaskedLM",
    base_class="RobertaModel",
    required=BERT.required | {"pad_token_id": (PADDING,)},
    first_position=FIRST_POSITION,
    segment_types=1,
)
XLM_ROBERTA = dataclasses.replace(
    ROBERTA,
    model_type="xlm-roberta",
    masked_lm_class="XLMRobertaForMaskedLM",
    base_class="XLMRobertaModel",
)
