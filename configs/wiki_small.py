"""The quickstart's recipe on real text: passages of at most 288 word pieces, queries from their own salient spans.

    realm prepare --passages passages.jsonl.gz --questions questions.jsonl.gz --vocabulary-size 12000 \
        --max-answer-words 5 --output data
    realm train --config=configs/wiki_small.py --config.data.path=data --workdir=runs/wiki_small
    realm ask --workdir=runs/wiki_small "who wrote the music of the film?"

Any JSONL of that form will do. Hardware: two CPU cores. What to expect, and the cost: `benchmarks/README.md`.
"""

from ml_collections import ConfigDict

from realm_jax.recipes import wiki_small


def get_config() -> ConfigDict:
    return wiki_small()
