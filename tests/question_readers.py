"""Small readers with a question-answering head, as Hugging Face stores them: random, over word pieces of letters."""

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
from made_tokenizers import letters
from weight_folders import save_tensors

from realm_jax.data.wordpiece import SPECIAL_PIECES
from realm_jax.models.layers import BertConfig
from realm_jax.models.weights import encoder, encoder_settings, question_head

LETTERS = string.ascii_letters + string.digits + ".,'?-éøñ東京都"


def save_question_reader(folder: Path, positions: int = 64, seed: int = 1, **settings: Any) -> Path:
    """A BERT of two layers whose words are letters, with capitals. settings: of config.json; None removes one."""
    pieces = [*SPECIAL_PIECES, *letters(LETTERS), "born", "in", "was", "the"]
    config = BertConfig(len(pieces), 16, 2, 2, 32, positions, hidden_act="gelu")
    rng, tensors = np.random.default_rng(seed), {}
    for tensor in (*encoder(config).tensors, *question_head(config).tensors):
        name = tensor.name if tensor.name.startswith("qa_outputs.") else f"bert.{tensor.name}"
        shape = tensor.shape[::-1] if tensor.is_transposed else tensor.shape
        tensors[name] = rng.normal(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.4, shape).astype(np.float32)
    stored = encoder_settings(config) | {"model_type": "bert", "architectures": ["BertForQuestionAnswering"]} | settings
    save_tensors(folder, tensors, {key: value for key, value in stored.items() if value is not None})
    (folder / "vocab.txt").write_text("\n".join(pieces))
    tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder
