"""REALM over Wikipedia: X and Z are the same text (paper, section 4.3).

    realm train --config=realm_wiki --config.data.path=data/wiki --config.init_from=gs://BUCKET/runs/ict \
        --workdir=gs://BUCKET/runs/realm --processes=auto
    realm build-index --workdir=gs://BUCKET/runs/realm                    at the same time, on a smaller slice

`realm launch` starts both jobs for you (`docs/launch.md`). `runs/ict` is a finished run of `configs/ict_wiki.py`.

It takes 200,000 steps of 512 sentences with learning rate 3e-5. Each sentence has eight candidates, one of which is the
null document. As in the paper, 64 chips train and 16 embed. The paper refreshed the index about every 500 steps. A
faster trainer takes more steps per refresh, so give its builder more chips.

`realm launch plan --config=realm_wiki --price-per-chip-hour=…` prints memory, times, steps per refresh and cost. Memory
is the TPU compiler's, and times are estimates of its cost model, not measured on a TPU (`docs/results/plans.json`).
"""

from ml_collections import ConfigDict

from realm_jax.config import REQUIRED, load_config


def get_config() -> ConfigDict:
    config = load_config("ict_wiki")
    config.init_from = REQUIRED
    config.tasks = "realm"
    config.refresh.mode = "async"
    return config
