"""Real passages and search queries, warm-started from a small BERT that is made for retrieval: minutes, not days.

    realm prepare --passages passages.jsonl.gz --questions questions.jsonl.gz \
        --vocab MINILM/vocab.txt --max-answer-words 5 --limit 128 --output data
    realm train --config=configs/wiki_minilm.py --config.init_from=MINILM --config.data.path=data --workdir=runs/realm

MINILM is a folder of sentence-transformers/all-MiniLM-L6-v2, or `hf:sentence-transformers/all-MiniLM-L6-v2`. It was
trained to retrieve, on Natural Questions too, so its numbers are not those of a model that learnt from masked words
alone. `configs/open_wiki.py` trains the baselines beside it. Hardware: two CPU cores; what one accelerator should be
given, and what came of it: `docs/results/open_wiki.md`.
"""

from ml_collections import ConfigDict

from realm_jax.recipes import wiki_minilm


def get_config() -> ConfigDict:
    return wiki_minilm()
