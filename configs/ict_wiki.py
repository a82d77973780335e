"""The inverse cloze task over Wikipedia, before REALM (paper, section 3.4; Lee et al. 2019).

    realm prepare --passages wikipedia.jsonl.gz --vocab vocab.txt --output data/wiki
    realm train --config=ict_wiki --config.data.path=data/wiki --workdir=gs://BUCKET/runs/ict --processes=auto

`realm launch` starts it on TPUs (`docs/launch.md`).

To start from BERT's weights and vocabulary as in the paper, add --config.init_from=hf:google-bert/bert-base-uncased
--config.model.hidden_act=gelu (needs `'.[huggingface]'`), or name a folder with model.safetensors.

It takes 100,000 steps of 4,096 sentences with learning rate 1e-4. `realm launch plan --config=ict_wiki` prints memory,
times and cost on TPUs, as the compiler and its cost model estimate them (`docs/results/plans.json`). If you have fewer
chips, --config.optimizer.microbatches=8 takes a quarter of the memory and more time.
"""

from ml_collections import ConfigDict

from realm_jax.config import default


def get_config() -> ConfigDict:
    config = default()
    config.tasks = "ict"
    config.model.update(dtype="bfloat16", remat="dots")  # accelerators multiply it fastest
    config.mesh.fsdp = 8  # parameters and moments are sharded over eight devices; otherwise a step needs over 16 GB
    return config
