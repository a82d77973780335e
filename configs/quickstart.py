"""The recipe of `realm quickstart`. Change it and run it with `realm train`.

    realm quickstart --workdir=runs/quickstart
    realm train --config=quickstart --config.data.path=runs/quickstart/data --workdir=runs/other

It takes four to six minutes on two CPU cores. Results: `docs/tutorials/quickstart.md`. On one CPU device `realm
quickstart` also sets optimizer.microbatches=8, which sums gradients in another order.
"""

from ml_collections import ConfigDict

from realm_jax.config import default


def get_config() -> ConfigDict:
    config = default()
    config.model.update(layers=2, width=64, heads=2, feed_forward=128, dropout=0.0)
    config.encoder.norm_scale = 0.35
    config.qa.beam = 64
    config.ict.null_weight = 0.3
    config.checkpoint.update(every=100, keep=2)
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
