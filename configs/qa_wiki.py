"""Fine-tuning for open-domain questions over Wikipedia, with the index frozen (paper, section 4.3, as ORQA).

    realm train --config=qa_wiki --config.data.path=data/wiki --config.init_from=gs-mount/runs/realm \
        --workdir=gs-mount/runs/qa --processes=auto

`runs/realm` is a finished run of `configs/realm_wiki.py`, in a mounted bucket.

160,000 steps of 16 questions at 1e-5: about 32 passes over the 79,000 questions of NaturalQuestions-Open. Five passages
are read. On v5e 4×4, by the compiler's estimate: 2.9 GiB a chip, 22 to 25 ms a step, 1.0 to 1.1 hours for all (`realm
launch plan --config=qa_wiki --spec.trainer.slice=v5e:4x4`); one question a chip is little work for a step.
"""

from ml_collections import ConfigDict

from realm_jax.config import load_config


def get_config() -> ConfigDict:
    config = load_config("ict_wiki")
    config.tasks = "qa"
    return config
