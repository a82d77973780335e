"""Table 2 of the paper on the synthetic encyclopedia, with further rows, each under three seeds.

    realm ablate --config=ablations --workdir=runs/ablations

`table` lists the rows that are shown, in order. Other rows are only trained because rows of the table start from them.
A row has these keys:

    title     shown in the table
    tasks     that it trains
    start     the row that it takes its parameters from; "" for the initial parameters of the base
    reader    the row that it takes its reader from instead
    changes   of the base, as on the command line
    paper     exact match and recall@5 in the paper, or ()

Add a row of your own:

    config = ablations()  # from realm_jax.configs.ablations import get_config as ablations
    config.rows.wider = dict(
        title="32 candidates", tasks="realm,qa", start="start", reader="", paper=(),
        changes=("realm.candidates=32",),
    )
    config.table = (*config.table, "wider")

`encyclopedia` has settings of `realm_jax/data/encyclopedia.py`. Leave it empty if `base.data.path` names a dataset
directory. `seeds` are seeds of training; the encyclopedia is the same for all. Hardware: two CPU cores. Results and
time: `docs/results/ablations.md`.
"""

from typing import Any

from ml_collections import ConfigDict

from realm_jax.config import load_config


def get_config() -> ConfigDict:
    # Training questions contain no synonyms. Otherwise fine-tuning would teach what pre-training did not.
    harder = {"entities": 3200, "synonym_share": 0.6, "plain_questions": True}
    base = load_config("quickstart")
    base.realm.steps, base.qa.steps = 500, 300
    base.retrieval.query_params = "generation"  # as in the released code: queries are as old as the index
    base.refresh.every = 10
    stale, often = (f"refresh.every={every}" for every in (30 * base.refresh.every, base.refresh.every // 2))
    own = "data.text=passages"
    rows = {
        "start": row("", "mlm,ict"),
        "pretrained": row("", "realm", "start"),
        "realm": row("REALM", "qa", "pretrained", paper=(38.2, 38.5)),
        "realm_retriever": row("REALM retriever, baseline encoder", "qa", "pretrained", "start", paper=(37.4, 38.5)),
        "realm_encoder": row("Baseline retriever, REALM encoder", "qa", "start", "pretrained", paper=(35.3, 13.9)),
        "baseline": row("Baseline (ORQA)", "qa", "start", paper=(31.3, 13.9)),
        "uniform": row(
            "Random uniform masks", "realm,qa", "start", changes=("realm.masking=uniform",), paper=(32.3, 24.2)
        ),
        "spans": row(
            "Random span masks", "realm,qa", "start", changes=("realm.masking=random_span",), paper=(35.3, 26.1)
        ),
        "stale": row("30 × stale index", "realm,qa", "start", changes=(stale,), paper=(28.7, 15.1)),
        "often": row("Twice as many refreshes", "realm,qa", "start", changes=(often,)),
        "no_null": row("No null document", "realm,qa", "start", changes=("realm.null_document=False",)),
        "token": row("Marginal a token", "realm,qa", "start", changes=("realm.marginal=token",)),
        "own_text": row("X = Z", "realm,qa", "start", changes=(own,)),
        "trivial": row(
            "X = Z, trivial retrievals allowed", "realm,qa", "start", changes=(own, "realm.exclude_own=False")
        ),
        "no_ict": row("No inverse cloze task", "mlm,realm,qa"),
        # Controls: tasks that replace REALM take as many steps, and the frozen retriever learns nothing.
        "no_retriever_gradient": row(
            "REALM, the retriever's gradient stopped",
            "realm,qa",
            "start",
            changes=(f"realm.retriever_start={base.realm.steps}",),
        ),
        "more_ict": row(
            "More of the inverse cloze task", "ict,qa", "start", changes=(f"ict.steps={base.realm.steps}",)
        ),
        "closed_book": row("No passages", "closed_book", "start"),
        "shared": row(
            "One encoder, trained to the end",
            "mlm,ict,realm,qa",
            changes=("model.shared_tower=True", "qa.refresh_every=100"),
        ),
    }
    table = tuple(name for name, row in rows.items() if row["title"])
    return ConfigDict({"seeds": (0, 1, 2), "encyclopedia": harder, "base": base, "table": table, "rows": rows})


def row(
    title: str, tasks: str, start: str = "", reader: str = "", changes: tuple[str, ...] = (),
    paper: tuple[float, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    return {"title": title, "tasks": tasks, "start": start, "reader": reader, "changes": changes, "paper": paper}
