"""Configs that code begins with. `configs/*.py` are the same by name for the command line, and for changing.

What each costs on which hardware, and what to expect of it: `benchmarks/README.md`.
"""

import os
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from realm_jax.config import default
from realm_jax.host import multiplies_bfloat16

# A row of a table of ablations: its tasks, whose parameters and whose reader it starts with, and what differs.
ROW = {"title": "", "tasks": "", "start": "", "reader": "", "changes": (), "paper": ()}
NAMED = Path(__file__).with_name("configs")  # what `--config=NAME` finds


def config_names() -> list[str]:
    """The names of the configs that travel with the package."""
    return sorted(path.stem for path in NAMED.glob("*.py"))


def is_name(name: str) -> bool:
    """Whether `--config=NAME` means a config of the package, and not the path of a file."""
    return os.sep not in name and not name.endswith(".py")


def quickstart() -> ConfigDict:
    """The whole recipe on the synthetic encyclopedia, for two CPU cores; `realm quickstart` uses it.

    Four to six minutes; recall@5 of the gold passage 0.51 before REALM and 0.98 after it: `benchmarks/README.md`.
    """
    config = _tiny()
    config.data.update(query_length=20, document_length=64, predictions=4)
    config.model.update(span_width=4)
    config.mlm.update(steps=1600, batch_size=48, learning_rate=1e-3)
    config.ict.update(steps=90, batch_size=256, learning_rate=1e-3)
    config.realm.update(steps=400, batch_size=24, learning_rate=5e-4)
    config.qa.update(steps=160, batch_size=32, learning_rate=5e-4)
    config.closed_book.update(steps=1900, batch_size=48, learning_rate=1e-3)
    config.optimizer.warmup = 50
    config.refresh.every = 40
    config.realm.retriever_start = 30
    config.realm.candidates = 16
    config.qa.answers = 1
    return config


def real_text() -> ConfigDict:
    """A pretrained encoder of `init_from` on real passages of at most 128 tokens; see `configs/real_text.py`.

    Sizes, pooling, normalisation and prompts are the encoder's. Where numbers come from: `docs/results/real_text.md`.
    """
    config = default()
    config.tasks = "ict,qa"
    config.data.update(query_length=48, document_length=128, predictions=6)
    config.model.update(layers=None, width=None, heads=None, feed_forward=None, hidden_act=None, dropout=0.0)
    config.encoder.update(
        pooling=None, projection=None, normalization=None, norm_epsilon=None, temperature=None, query_prompt=None,
        passage_prompt=None,
    )  # fmt: skip
    # Small steps of the query tower alone: the passages' vectors stay what the encoder was trained to make of them.
    config.ict.negatives, config.realm.retriever_start, config.qa.objective = "index", 20, "positive"
    config.optimizer.preset = "short"
    config.optimizer.microbatches = 2  # of fine-tuning: the same sum in two parts, for half a gigabyte less
    config.ict.update(steps=400, batch_size=32, learning_rate=2e-5)
    config.mlm.update(steps=200, batch_size=16, learning_rate=1e-4)
    config.realm.update(steps=200, batch_size=8, learning_rate=5e-5)
    config.qa.update(steps=560, batch_size=16, learning_rate=1.5e-4)
    config.closed_book.update(steps=560, batch_size=16, learning_rate=1e-4)
    config.qa.update(passages=5, titles=True, beam=50, search="hybrid", answers=4)
    config.realm.candidates = 5
    config.refresh.every = 1000
    config.evaluation.batch_size = 4  # three times as fast on two cores as 64: what is read stays in their caches
    config.evaluation.update(keep_best=True, held_out=0.02)
    config.checkpoint.update(every=100, keep=1)
    return config


def adapt() -> ConfigDict:
    """A pretrained encoder of `init_from` on documents without questions; see `configs/adapt.py`.

    Nothing is kept by what is measured on the way: `realm adapt` compares start and end, on documents held out.
    """
    config = real_text()
    config.tasks = "evidence_contrast,realm"
    config.evidence_contrast.update(steps=60, batch_size=16, learning_rate=7e-6)
    config.ict.update(steps=200, batch_size=32, learning_rate=2e-5)  # where there is no evidence
    config.realm.update(steps=200, batch_size=16, learning_rate=1e-4)  # the retriever at a fifth: 2e-5
    config.realm.update(marginal="span", masking="evidence", search="hybrid", candidates=51, exclude_own=False)
    config.refresh.every = 0  # from there on the document tower and its index stay
    config.checkpoint.every = 20  # minutes where a step takes many seconds
    config.optimizer.microbatches = 1
    config.model.dtype = "bfloat16" if multiplies_bfloat16() else "float32"
    config.evaluation.update(keep_best=False, batch_size=32)
    return config


def ablations() -> ConfigDict:
    """The paper's table 2 on the encyclopedia, and more rows of its kind; see `configs/ablations.py`.

    Searched with the query tower of the index, as the released code does: then an old index is old as a whole. Training
    questions teach no synonyms: fine-tuning would make up for what pre-training left out.
    """
    harder = {"entities": 3200, "synonym_share": 0.6, "plain_questions": True}
    base = quickstart()
    base.realm.steps, base.qa.steps = 500, 300
    base.retrieval.query_params = "generation"
    base.refresh.every = 10
    stale, often = (f"refresh.every={every}" for every in (30 * base.refresh.every, base.refresh.every // 2))
    own = "data.text=passages"
    rows = {
        "start": _row("", "mlm,ict"),
        "pretrained": _row("", "realm", "start"),
        "realm": _row("REALM", "qa", "pretrained", paper=(38.2, 38.5)),
        "realm_retriever": _row("REALM retriever, baseline encoder", "qa", "pretrained", "start", paper=(37.4, 38.5)),
        "realm_encoder": _row("Baseline retriever, REALM encoder", "qa", "start", "pretrained", paper=(35.3, 13.9)),
        "baseline": _row("Baseline (ORQA)", "qa", "start", paper=(31.3, 13.9)),
        "uniform": _row(
            "Random uniform masks", "realm,qa", "start", changes=("realm.masking=uniform",), paper=(32.3, 24.2)
        ),
        "spans": _row(
            "Random span masks", "realm,qa", "start", changes=("realm.masking=random_span",), paper=(35.3, 26.1)
        ),
        "stale": _row("30 × stale index", "realm,qa", "start", changes=(stale,), paper=(28.7, 15.1)),
        "often": _row("Twice as many refreshes", "realm,qa", "start", changes=(often,)),
        "no_null": _row("No null document", "realm,qa", "start", changes=("realm.null_document=False",)),
        "token": _row("Marginal a token", "realm,qa", "start", changes=("realm.marginal=token",)),
        "own_text": _row("X = Z", "realm,qa", "start", changes=(own,)),
        "trivial": _row(
            "X = Z, trivial retrievals allowed", "realm,qa", "start", changes=(own, "realm.exclude_own=False")
        ),
        "no_ict": _row("No inverse cloze task", "mlm,realm,qa"),
        # Controls: what takes REALM's place has as many steps, and what is held still learns nothing.
        "no_retriever_gradient": _row(
            "REALM, the retriever's gradient stopped",
            "realm,qa",
            "start",
            changes=(f"realm.retriever_start={base.realm.steps}",),
        ),
        "more_ict": _row(
            "More of the inverse cloze task", "ict,qa", "start", changes=(f"ict.steps={base.realm.steps}",)
        ),
        "closed_book": _row("No passages", "closed_book", "start"),
        "shared": _row(
            "One tower, trained to the end",
            "mlm,ict,realm,qa",
            changes=("model.shared_tower=True", "qa.refresh_every=100"),
        ),
    }
    table = tuple(name for name, row in rows.items() if row["title"])
    return ConfigDict({"seeds": (0, 1, 2), "encyclopedia": harder, "base": base, "table": table, "rows": rows})


def _row(title: str, tasks: str, start: str = "", reader: str = "", **others: tuple[Any, ...]) -> dict[str, Any]:
    return ROW | {"title": title, "tasks": tasks, "start": start, "reader": reader} | others


def paper(task: str) -> ConfigDict:
    """One task at the paper's sizes, in the arithmetic of accelerators; parameters and moments are spread over eight
    devices, without which a step does not fit 16 GB."""
    config = default()
    config.tasks = task
    config.model.update(dtype="bfloat16", remat="dots")
    config.mesh.fsdp = 8
    return config


def _tiny() -> ConfigDict:
    """Two layers of 64 without dropout: learns in minutes on a laptop's CPU."""
    config = default()
    config.model.update(layers=2, width=64, heads=2, feed_forward=128, dropout=0.0)
    config.encoder.norm_scale = 0.35
    config.qa.beam = 64
    config.ict.null_weight = 0.3
    config.checkpoint.update(every=100, keep=2)
    return config
