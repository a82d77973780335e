"""A named-entity tagger for salient spans (paper, section 3.4: a BERT tagger, trained on CoNLL-2003).

    realm train --config=tagger --config.data.path=tfds:conll2003 --config.init_from=bert-base-uncased \
        --workdir=runs/tagger
    realm prepare --spans=tagger:runs/tagger --workers=1 --passages passages.jsonl.gz --vocab vocab.txt --output data

`init_from`: a folder with model.safetensors, config.json and vocab.txt. 400 steps of 32 windows at 5e-5, about five
passes over CoNLL-2003; Devlin et al. 2019 report F1 92.4 on its test set for BERT-base, cased (not repeated here).

Two smaller ones, on the 29,701 words of wikigold's training split, on two CPU cores; `small` starts from nothing,
`minilm` from the encoder of all-MiniLM-L6-v2:

    realm train --config=tagger:small --config.data.path=wikigold.conll.txt --workdir=runs/small
    realm train --config=tagger:minilm --config.data.path=wikigold.conll.txt --workdir=runs/minilm \
        --config.init_from=all-MiniLM-L6-v2

Test split, 779 names: precision, recall and F1 with kinds, the same of boundaries alone, CPU seconds of training on a
machine with other work

    small      0.364 0.365 0.364   0.658 0.660 0.659   104   (without `model.shapes`: F1 0.17 and 0.28)
    minilm     0.717 0.697 0.707   0.859 0.834 0.846   362
    the rules      –     –     –   0.813 0.837 0.825     –
"""

from ml_collections import ConfigDict

from realm_jax.errors import UserError
from realm_jax.tasks import tagger

SIZES = {
    "base": {},
    "minilm": {"layers": 6, "width": 384, "feed_forward": 1536},
    "small": {"layers": 2, "width": 128, "heads": 4, "feed_forward": 512},
}


def get_config(size: str = "base") -> ConfigDict:
    config = tagger.default()
    if size not in SIZES:
        raise UserError(f"configs/tagger.py:{size}: there is no such size; choose among {', '.join(SIZES)}")
    config.model.update(SIZES[size])
    if size == "minilm":
        config.tagger.update(steps=120, batch_size=16, learning_rate=1e-4)
        config.optimizer.warmup = 20
        config.evaluation.every = 60
    if size == "small":
        config.model.hidden_act = "gelu_new"
        config.data.hidden = 0.3
        config.tagger.update(steps=300, batch_size=16, learning_rate=5e-4)
        config.optimizer.warmup = 50
    return config
