"""Fine-tuning for open-domain questions over Wikipedia, with the index frozen (paper, section 4.3, as ORQA).

    realm train --config=qa_wiki --config.data.path=data/wiki --config.init_from=gs://BUCKET/runs/realm \
        --workdir=gs://BUCKET/runs/qa --processes=auto

`runs/realm` is a finished run of `configs/realm_wiki.py`.

It takes 160,000 steps of 16 questions with learning rate 1e-5, which is about 32 passes over the 79,000 questions of
NaturalQuestions-Open, and reads five passages. `realm launch plan --config=qa_wiki --spec.trainer.slice=v5e:4x4` prints
memory, times and cost (`docs/results/plans.json`). Use few chips, because a step has little work: 16 questions.
"""

from ml_collections import ConfigDict

from realm_jax.config import REQUIRED, load_config


def get_config() -> ConfigDict:
    config = load_config("ict_wiki")
    config.init_from = REQUIRED
    config.tasks = "qa"
    return config
