"""REALM over Wikipedia: X and Z are the same text (paper, section 4.3).

    realm train --config=realm_wiki --config.data.path=data/wiki --config.init_from=gs-mount/runs/ict \
        --workdir=gs-mount/runs/realm --processes=auto
    realm build-index --workdir=gs-mount/runs/realm                       beside it, on a smaller slice

`gs-mount` is a mounted bucket; `realm launch` mounts it for you and starts both jobs (`docs/launch.md`). `runs/ict` is
a finished run of `configs/ict_wiki.py`.

200,000 steps of 512 sentences at 3e-5, eight candidates each with the null document; 64 chips train and 16 embed, as in
the paper. What `realm launch plan` says of it: memory by the TPU compiler; times by its cost model and arithmetic, from
all collectives beside other work to none, not measured on a TPU:

    trainer        GiB a chip   a step        all steps     steps a refresh (16 × v5e embed in 5.2 minutes)
    v5e 8×8            9.5      219-248 ms    12.1-13.8 h   1,260-1,432
    2 × v5e 8×8        5.7      126-178 ms     7.0-9.9 h    1,758-2,480
    v5p 4×4×4         10.0       98-108 ms     5.4-6.0 h    2,895-3,205
    v6e 8×8           10.0      108-117 ms     6.0-6.5 h    2,673-2,908

A v6e has 4.7 times the operations of a v5e and twice its bandwidth, which these layers wait for.
The paper refreshed every 500 steps or so: the faster the trainer, the more chips the builder should have. The records
are `docs/results/plans.json`; with your prices: `realm launch plan --config=realm_wiki --price-per-chip-hour=…`.
"""

from ml_collections import ConfigDict

from realm_jax.config import load_config


def get_config() -> ConfigDict:
    config = load_config("ict_wiki")
    config.tasks = "realm"
    config.refresh.mode = "async"
    return config
