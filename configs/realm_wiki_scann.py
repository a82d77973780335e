"""REALM over Wikipedia as in `realm_wiki`, searched on the hosts by ScaNN instead of exactly inside the step.

    realm launch --target=jobset --spec=launch/v5e.py --spec.image=IMAGE --config=realm_wiki_scann \
        --config.data.path=gs://BUCKET/data --config.init_from=/realm/BUCKET/runs/ict --workdir=gs://BUCKET/runs/realm

The search for a step starts one step before it, with the parameters of then, so candidates are one step older; recall
of eight is .98 to .99 (`benchmarks/README.md`), and no vectors lie on the devices. At this size of the corpus exact
search costs 1.6 ms of a v5e's step: what this is for is larger corpora, wider vectors, and hosts with many cores. A
builder takes centroids and codebooks of the generation before where its recall holds. `realm launch plan` says what
it needs (`docs/results/plans.json`).
"""

from ml_collections import ConfigDict

from realm_jax.config import load_config


def get_config() -> ConfigDict:
    config = load_config("realm_wiki")
    config.retrieval.backend = "scann"
    return config
