"""Your own passages, from a pretrained encoder, with questions or without: what the README does with your documents.

    realm prepare --passages passages.jsonl.gz --questions questions.jsonl.gz --vocab ENCODER/vocab.txt --limit 128 \
        --output data
    realm train --config=real_text --config.init_from=ENCODER --config.data.path=data --workdir=runs/mine
    realm ask --workdir=runs/mine "who wrote the music of the film?"

ENCODER is a folder of sentence-transformers/all-MiniLM-L6-v2, or `hf:sentence-transformers/all-MiniLM-L6-v2`; one of
other sizes needs --config.model. It was trained to retrieve, on Natural Questions too, so its numbers are not those of
a model that learnt from masked words alone. Without training questions fine-tuning is left out, and without any nothing
is measured. Hardware: two CPU cores; one accelerator can do with larger batches.
"""

from ml_collections import ConfigDict

from realm_jax.recipes import real_text


def get_config() -> ConfigDict:
    return real_text()
