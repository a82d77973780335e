"""The inverse cloze task over Wikipedia, before REALM (paper, section 3.4; Lee et al. 2019).

    realm prepare --passages wikipedia.jsonl.gz --vocab vocab.txt --output data/wiki
    realm train --config=ict_wiki --config.data.path=data/wiki --workdir=gs-mount/runs/ict --processes=auto

`gs-mount` is a mounted bucket; `realm launch` mounts it for you and takes `--workdir=gs://BUCKET/runs/ict`
(`docs/launch.md`).

With BERT's weights, as in the paper, and its vocabulary: --config.init_from=hf:google-bert/bert-base-uncased
--config.model.hidden_act=gelu (`'.[huggingface]'`), or a folder with model.safetensors.

100,000 steps of 4,096 sentences at 1e-4. On v5e 8×8, by the compiler's estimate: 6.0 GiB a chip, 129 to 142 ms a step,
3.6 to 4.0 hours for all (`realm launch plan --config=ict_wiki`). With --config.optimizer.microbatches=8 a batch goes
through the towers in parts, in a quarter of the memory and more time, for fewer chips.
"""

from ml_collections import ConfigDict

from realm_jax.config import default


def get_config() -> ConfigDict:
    config = default()
    config.tasks = "ict"
    config.model.update(dtype="bfloat16", remat="dots")  # the arithmetic of accelerators
    config.mesh.fsdp = 8  # parameters and moments over eight devices, or a step does not fit 16 GB
    return config
