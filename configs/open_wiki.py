"""REALM and three baselines on real questions: ORQA, BM25 with a reader, and a reader without passages.

    realm ablate --config=configs/open_wiki.py --config.base.init_from=MINILM --config.base.data.path=data \
        --workdir=runs/open_wiki

The data are those of `configs/wiki_minilm.py`. Every row is a run, `runs/open_wiki/seed-0/<row>`; `realm predict` and
`realm evaluate` give its measures with intervals over questions. The commands, and what came of them on two CPU cores:
`docs/results/open_wiki.md`.
"""

from ml_collections import ConfigDict

from realm_jax import recipes


def get_config() -> ConfigDict:
    row = {"tasks": "qa", "start": "start", "reader": "", "changes": (), "paper": ()}
    rows = {
        "start": row | {"title": "", "tasks": "ict,mlm", "start": ""},
        "pretrained": row | {"title": "", "tasks": "realm"},
        "realm": row | {"title": "REALM", "start": "pretrained"},
        "orqa": row | {"title": "ORQA: the same without REALM's steps"},
        "bm25": row | {"title": "BM25 and a reader", "changes": ("retrieval.qa_search=bm25",)},
        "closed_book": row | {"title": "A reader without passages", "tasks": "closed_book"},
    }
    table = ("realm", "orqa", "bm25", "closed_book")
    return ConfigDict({"seeds": (0,), "encyclopedia": {}, "base": recipes.wiki_minilm(), "table": table, "rows": rows})
