"""Configs that travel with the package. `configs/*.py` are the same for the command line, and for changing.

What each costs on which hardware, and what to expect of it: `benchmarks/README.md`.
"""

from ml_collections import ConfigDict

from realm_jax.config import default


def quickstart() -> ConfigDict:
    """The whole recipe on the synthetic encyclopedia, for two CPU cores; `realm quickstart` uses it.

    Seven minutes; recall@5 of the gold passage 0.54 before REALM and 0.98 after it: `benchmarks/README.md`.
    """
    config = _tiny()
    config.data.update(query_length=20, document_length=64, predictions=4, answers=1)
    config.model.update(span_width=4)
    config.mlm.update(steps=1600, batch_size=48, learning_rate=1e-3, warmup=50)
    config.ict.update(steps=90, batch_size=256, learning_rate=1e-3, warmup=50)
    config.realm.update(steps=500, batch_size=24, learning_rate=5e-4, warmup=50)
    config.qa.update(steps=300, batch_size=32, learning_rate=5e-4, warmup=50)
    config.refresh.every = 40
    config.objective.retriever_start = 30
    config.retrieval.candidates = 16
    return config


def wiki_small() -> ConfigDict:
    """The same recipe on real passages of at most 288 word pieces, X = Z; see `configs/wiki_small.py`."""
    config = _tiny()
    config.data.update(query_length=64, document_length=288, predictions=6, answers=4)
    config.mlm.update(steps=1500, batch_size=16, learning_rate=1e-3, warmup=50)
    config.ict.update(steps=500, batch_size=64, learning_rate=1e-3, warmup=50)
    config.realm.update(steps=1000, batch_size=8, learning_rate=3e-4, warmup=100)
    config.qa.update(steps=600, batch_size=8, learning_rate=3e-4, warmup=50)
    config.objective.retriever_start = 50
    config.refresh.every = 250
    config.retrieval.candidates = 5
    return config


def paper(task: str) -> ConfigDict:
    """One task at the paper's sizes, in the arithmetic of accelerators; parameters and moments are spread over eight
    devices, without which a step does not fit 16 GB."""
    config = default()
    config.tasks = task
    config.model.update(dtype="bfloat16", remat="dots", scan=True)
    config.retrieval.dtype = "bfloat16"
    config.mesh.fsdp = 8
    return config


def _tiny() -> ConfigDict:
    """Two layers of 64 without dropout: learns in minutes on a laptop's CPU."""
    config = default()
    config.model.update(layers=2, width=64, heads=2, feed_forward=128, dropout=0.0, norm_scale=0.35, span_hidden=32)
    config.retrieval.qa_beam = 64
    config.objective.ict_null_weight = 0.3
    config.checkpoint.update(every=100, keep=2)
    return config
