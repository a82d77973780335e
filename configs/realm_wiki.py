"""REALM over Wikipedia: X and Z are the same text (paper, section 4.3).

    realm train --config=configs/realm_wiki.py --config.data.path=data/wiki --config.init_from=gs-mount/runs/ict \
        --workdir=gs-mount/runs/realm --processes=auto
    realm build-index --workdir=gs-mount/runs/realm                       beside it, on a smaller slice

200,000 steps of 512 sentences at 3e-5, eight candidates each with the null document; 64 chips train and 16 embed, as in
the paper. Memory, time and cost for a topology: `realm plan --config=configs/realm_wiki.py --topology=v5e:8x8`.
"""

from ml_collections import ConfigDict

from realm_jax.recipes import paper


def get_config() -> ConfigDict:
    config = paper("realm")
    config.refresh.mode = "async"
    return config
