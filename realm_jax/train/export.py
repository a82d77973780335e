"""A run's networks as folders that Hugging Face's library opens: of `realm weights export` and `realm adapt`.

Names are those of `realm_jax/models/weights.py`; what a tower is to sentence-transformers is written by
`realm_jax/models/sentence_transformers.py`.
"""

from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from realm_jax.assemble import tower_lengths
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.models.folders import READER, SHARED
from realm_jax.models.layers import Params
from realm_jax.models.networks import Realm
from realm_jax.models.sentence_transformers import (
    ENCODER_SECTION,
    PASSAGES,
    QUERIES,
    TRAINED_READER,
    mark_not_a_sentence_encoder,
    write_modules,
)
from realm_jax.models.weights import bert_of, networks, save, settings_of


def write_networks(
    folder: Path, config: ConfigDict, model: Realm, params: Params, tokenizer: Tokenizer, names: str = "bert",
    reads: bool = True,
) -> None:  # fmt: skip
    """Write every network of `params` into a folder of its own in `folder`. names: 'bert' or 'realm'.

    reads: whether the reader was trained with questions; recorded, so that a run that begins with it knows.
    """
    encoder = config.encoder.to_dict()
    query_length, passage_length = tower_lengths(config, model.query_template, model.passage_template)
    lengths = {QUERIES: query_length, PASSAGES: passage_length}
    for network, parts in networks(model).items():
        if network not in params:
            continue
        path, of_network = folder / network, jax.tree.map(np.asarray, params[network])
        settings = settings_of(model, network, names) | {"pad_token_id": tokenizer.pad_id}
        settings |= {TRAINED_READER: reads} if network == READER else {ENCODER_SECTION: encoder}
        save(path, of_network, parts, names, settings)
        save_tokenizer(path, tokenizer, bert_of(model, network).max_length)
        if names == "bert" and network != READER:
            inputs = {purpose: lengths[purpose] for purpose in lengths if network == SHARED or purpose in network}
            write_modules(path, model, of_network, encoder, inputs)
        else:
            mark_not_a_sentence_encoder(path)


def save_tokenizer(folder: Path, tokenizer: Tokenizer, length: int) -> None:
    """What transformers needs."""
    for name, content in tokenizer.pretrained_files(length).items():
        (folder / name).write_bytes(content)
