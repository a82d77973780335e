"""REALM over Wikipedia as in `realm_wiki`, but ScaNN searches on the hosts, instead of exact search inside the step.

    realm launch --target=jobset --spec=launch/v5e.py --spec.image=IMAGE --config=realm_wiki_scann \
        --config.data.path=gs://BUCKET/data --config.init_from=gs://BUCKET/runs/ict --workdir=gs://BUCKET/runs/realm

The search for a step starts one step earlier, with the parameters of that step, so candidates are one step older. The
devices hold no vectors. ScaNN finds almost all of the top eight (recall: `benchmarks/README.md`). With this corpus
exact search takes a small part of a step, so use ScaNN for larger corpora, wider vectors, or hosts with many cores. A
builder reuses the centroids and codebooks of the last generation if their recall is still high enough. `realm launch
plan` prints memory and times (`docs/results/plans.json`).
"""

from ml_collections import ConfigDict

from realm_jax.config import load_config


def get_config() -> ConfigDict:
    config = load_config("realm_wiki")
    config.retrieval.backend = "scann"
    return config
