"""The fixed parts of a tagger's run: config, folder, mesh, network, vocabulary, kinds of names, annotated text.

`run.py` is the same for REALM. Read next: `training/tagging.py` for how it is trained, `evaluation/tagging.py` for how
it tags.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from realm_jax import tagger_config
from realm_jax.data.conll import Document
from realm_jax.mesh import logical_sharding, put_whole
from realm_jax.models.attention import select_attention
from realm_jax.models.tagger import Params, Tagger
from realm_jax.models.weights import load_bert
from realm_jax.run import BaseRun, make_bert, mesh_for
from realm_jax.storage import digest
from realm_jax.text.wordpiece import WordPiece

# Keys of config.model without which parameters mean nothing, or something else.
NETWORK = ("layers", "width", "heads", "feed_forward", "max_length", "dtype", "hidden_act", "shapes")


@dataclasses.dataclass(frozen=True)
class TaggerRun(BaseRun):
    """splits: annotated documents by split; empty where a trained tagger is used and no more."""

    tagger: Tagger
    wordpiece: WordPiece
    splits: dict[str, list[Document]]

    @property
    def model(self) -> Tagger:
        return self.tagger

    def default_config(self) -> ConfigDict:
        return tagger_config.default()

    def fingerprints(self) -> dict[str, str]:
        network = {key: self.config.model[key] for key in NETWORK} | {"length": self.config.data.length}
        parts: dict[str, Any] = {"kinds": self.tagger.kinds, "network": network} | self.splits
        hashes = {name: digest(json.dumps(part).encode()) for name, part in parts.items()}
        return {"tokenizer": self.wordpiece.fingerprint} | hashes

    def with_weights(self, params: Params, folder: Path) -> Params:
        """Parameters with the encoder of a folder in place of their own. Raises UserError where it does not fit."""
        encoder = load_bert(folder, self.tagger.bert)
        placed = jax.tree.map(put_whole, encoder, self.param_shardings["tagger"]["bert"])
        return {"tagger": params["tagger"] | {"bert": placed}}


def make_tagger_run(
    config: ConfigDict, workdir: Path, wordpiece: WordPiece, kinds: tuple[str, ...], splits: dict[str, list[Document]],
    devices: list[jax.Device] | None = None,
) -> TaggerRun:  # fmt: skip
    """Everything that a validated config decides. Raises UserError where the mesh does not fit."""
    mesh = mesh_for(config, devices)
    hidden = logical_sharding(mesh, "batch", None, None)
    bert = make_bert(config.model, wordpiece.size, config.data.length, hidden)
    bert = dataclasses.replace(bert, attention=select_attention(mesh, bert.dtype))
    tagger = Tagger(bert, kinds, config.model.shapes)
    return TaggerRun(config, workdir, mesh, tagger, wordpiece, splits)
