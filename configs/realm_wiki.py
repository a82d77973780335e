"""REALM over Wikipedia: X and Z are the same text (paper, section 4.3).

    realm train --config=realm_wiki --config.data.path=data/wiki --config.init_from=gs-mount/runs/ict \
        --workdir=gs-mount/runs/realm --processes=auto
    realm build-index --workdir=gs-mount/runs/realm                       beside it, on a smaller slice

`gs-mount` is a mounted bucket; `realm launch` mounts it for you and starts both jobs (`docs/launch.md`). `runs/ict` is
a finished run of `configs/ict_wiki.py`.

200,000 steps of 512 sentences at 3e-5, eight candidates each with the null document; 64 chips train and 16 embed, as in
the paper. What `realm launch plan` says of it, by the TPU compiler (memory) and by arithmetic at 40 % MFU (times):

    trainer        GiB a chip   a step    all steps   steps a refresh (16 × v5e embed in 8.5 minutes)
    v5e 8×8            9.6      255 ms     14.2 h       2,006
    2 × v5e 8×8        5.9      128 ms      7.1 h       4,013
    v5p 4×4×4         12.5      110 ms      6.1 h       4,674
    v6e 8×8           12.0       55 ms      3.0 h       9,349

The paper refreshed every 500 steps or so: the faster the trainer, the more chips the builder should have. The records
are `docs/results/plans.json`; with your prices: `realm launch plan --config=realm_wiki --price-per-chip-hour=…`.
"""

from ml_collections import ConfigDict

from realm_jax.recipes import paper


def get_config() -> ConfigDict:
    config = paper("realm")
    config.refresh.mode = "async"
    return config
