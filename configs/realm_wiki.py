"""REALM over Wikipedia: X and Z are the same text (paper, section 4.3).

    realm train --config=realm_wiki --config.data.path=data/wiki --config.init_from=gs://BUCKET/runs/ict \
        --workdir=gs://BUCKET/runs/realm --processes=auto
    realm build-index --workdir=gs://BUCKET/runs/realm                    at the same time, on a smaller slice

`realm launch` starts both jobs for you (`docs/launch.md`). `runs/ict` is a finished run of `configs/ict_wiki.py`.

It takes 200,000 steps of 512 sentences with learning rate 3e-5. Each sentence has eight candidates, one of which is the
null document. As in the paper, 64 chips train and 16 embed. The paper refreshed the index about every 500 steps. Here
the trainer exports its encoders every 1,500 steps, and switches to their index version 1,500 steps later. The steps are
fixed, so a resumed run is bitwise identical. Sixteen v5e chips embed the corpus in about the time of these steps on 64.
If the trainer is faster, it waits. For fresher indexes give the builder more chips, and make both keys smaller.

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
    # The builder must build every export, so it would fall behind if it needed more steps than these for one. `realm
    # launch plan` prints how many it needs.
    config.refresh.every = config.refresh.adopt_after = 1500
    return config
