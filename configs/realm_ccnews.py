"""REALM with X from news and Z from Wikipedia (paper, section 4.3).

    realm prepare --passages wikipedia.jsonl.gz --pretraining news.jsonl.gz --vocab vocab.txt --output data/news
    realm train --config=realm_ccnews --config.data.path=data/news --config.init_from=gs://BUCKET/runs/ict \
        --workdir=gs://BUCKET/runs/news --processes=auto

Everything else is as in `configs/realm_wiki.py`, also memory and time, because the source of X does not change a step.
"""

from ml_collections import ConfigDict

from realm_jax.config import load_config


def get_config() -> ConfigDict:
    return load_config("realm_wiki")
