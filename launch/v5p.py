"""64 chips of TPU v5p for the trainer, and 4 machines of their own for the index builder.

    realm launch --target=jobset --spec=launch/v5p.py --spec.image=IMAGE --config=realm_wiki \\
        --config.data.path=gs://BUCKET/data --config.init_from=gs://BUCKET/runs/ict \\
        --config.model.hidden_act=gelu --workdir=gs://BUCKET/runs/realm --dry-run

`realm launch plan --spec=launch/v5p.py --config=realm_wiki` says what it costs. From an empty project to this
command: `docs/launch.md`.
"""

from ml_collections import ConfigDict

from realm_jax.launch.spec import default


def get_spec() -> ConfigDict:
    spec = default()
    spec.name = "realm-v5p"
    spec.trainer.update(slice="v5p:4x4x4", slices=1)
    spec.builder.update(slice="v5p:2x2x1", slices=4)
    return spec
