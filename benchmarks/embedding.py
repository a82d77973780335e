"""How fast passages are embedded beside PyTorch: the same weights, the same real passages, the same batches.

The passages come from a prepared folder; lengths fall into buckets of 64 word pieces. PyTorch runs
`transformers.BertModel` with scaled_dot_product_attention, as it is and through `torch.compile`, then the same
projection. Both use all cores, and both profit from the memory settings of `keep_memory`. The vectors are compared.
Every way embeds all batches once to warm up, then `--repeats` times, the ways in turn; the median counts.

    pip install torch==2.13.0 transformers
    python benchmarks/embedding.py --data=DIR [--passages 512]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BertConfig as TorchConfig
from transformers import BertModel

from realm_jax.data.sources import open_sources
from realm_jax.index.embed import CorpusRows, batches, embed_corpus, in_groups
from realm_jax.memory import keep_memory
from realm_jax.models.bert import BertConfig
from realm_jax.models.embedder import Embedder
from realm_jax.models.inputs import Documents, document_segments, token_mask

SIZES = {  # width, layers, heads, feed-forward
    "384 x 6": (384, 6, 12, 1536),
    "768 x 12": (768, 12, 12, 3072),
}
LENGTH, BATCH, PROJECTION = 288, 32, 128
Run = Callable[[], NDArray[np.float32]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--passages", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    keep_memory()
    sources = open_sources(args.data)
    rows = np.random.default_rng(0).choice(len(sources.passages), args.passages, replace=False)
    every = CorpusRows(*sources.passages.document_matrix(LENGTH, sources.wordpiece.special))
    corpus = CorpusRows(*(part[np.sort(rows)] for part in every))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print(f"{args.passages} passages, {corpus.lengths.mean():.0f} word pieces in the mean; jax {jax.__version__}, "
          f"torch {torch.__version__}, {torch.get_num_threads()} threads")  # fmt: skip
    print(f"{'model':>9} {'dtype':>9} {'way':>22} {'passages/s':>11} {'of compiled':>12} {'largest difference':>19}")
    for name in args.sizes:
        for dtype in args.dtypes:
            compare(name, dtype, corpus, sources.wordpiece.size, args.repeats)


def compare(name: str, dtype: str, corpus: CorpusRows, words: int, repeats: int) -> None:
    width, layers, heads, hidden = SIZES[name]
    config = BertConfig(words, width, layers, heads, hidden, 512, 0.0, jnp.dtype(dtype), attention="by_length")
    tower = Embedder(config, PROJECTION)
    some = jnp.zeros((1, 8), jnp.int32)
    params = nn.unbox(jax.jit(tower.init)(jax.random.key(0), some, some, some > 0))
    params = jax.tree.map(np.array, params)
    model = torch_tower(config, params["params"])
    compiled = torch.compile(model)
    ways: dict[str, Run] = {
        "realm_jax": lambda: ours(tower, params, corpus),
        "PyTorch": lambda: theirs(model, corpus, dtype),
        "PyTorch, compiled": lambda: theirs(compiled, corpus, dtype),
    }
    vectors = {way: run() for way, run in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            began = time.monotonic()
            run()
            times[way].append(time.monotonic() - began)
    speed = {way: len(corpus.ids) / statistics.median(found) for way, found in times.items()}
    for way in ways:
        apart = np.abs(vectors[way] - vectors["PyTorch"]).max()
        ratio = speed[way] / speed["PyTorch, compiled"]
        print(f"{name:>9} {dtype:>9} {way:>22} {speed[way]:11.2f} {ratio:12.2f} {apart:19.1e}", flush=True)


def ours(tower: Embedder, params: Any, corpus: CorpusRows) -> NDArray[np.float32]:
    return embed_corpus(lambda batch: _ours(tower, params, Documents(*map(jnp.asarray, batch))), corpus, BATCH)


@jax.jit(static_argnums=0)
def _ours(tower: Embedder, params: Any, documents: Documents) -> jax.Array:
    return in_groups(lambda group: tower.apply(params, *inputs(group)), documents)


def inputs(documents: Documents) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Ids, segments and mask of document rows."""
    ids = documents.ids.astype(jnp.int32)
    return ids, document_segments(documents), token_mask(documents.lengths, ids.shape[1])


class TorchTower(torch.nn.Module):
    """The same tower around `BertModel`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        sizes = TorchConfig(
            vocab_size=config.vocabulary_size, hidden_size=config.width, num_hidden_layers=config.layers,
            num_attention_heads=config.heads, intermediate_size=config.feed_forward,
            max_position_embeddings=config.max_length, hidden_act="gelu_pytorch_tanh", attn_implementation="sdpa",
        )  # fmt: skip
        self.bert = BertModel(sizes)
        self.projection = torch.nn.Linear(config.width, PROJECTION)
        self.norm = torch.nn.LayerNorm(PROJECTION, eps=1e-12)

    def forward(self, ids: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pooled = self.bert(ids, mask, segments).pooler_output
        return self.norm(self.projection(pooled)).float()


def torch_tower(config: BertConfig, params: Any) -> TorchTower:
    """The tower with these weights."""
    found = TorchTower(config).eval()
    bert = params["bert"]
    norms = {"embeddings.LayerNorm": bert["embedding_norm"]}
    linears = {"pooler.dense": params["pooler"]}
    names = {
        "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
        "attention_output": "attention.output.dense", "intermediate": "intermediate.dense", "output": "output.dense",
    }  # fmt: skip
    for number in range(config.layers):
        layer = bert[f"layer_{number}"]
        linears |= {f"encoder.layer.{number}.{theirs}": layer[ours] for ours, theirs in names.items()}
        norms |= {f"encoder.layer.{number}.attention.output.LayerNorm": layer["attention_norm"]}
        norms |= {f"encoder.layer.{number}.output.LayerNorm": layer["output_norm"]}
    weights = {
        "embeddings.word_embeddings.weight": bert["words"]["embedding"],
        "embeddings.position_embeddings.weight": bert["positions"]["embedding"],
        "embeddings.token_type_embeddings.weight": bert["segments"]["embedding"],
    }
    for name, entry in linears.items():
        weights |= {f"{name}.weight": entry["kernel"].T, f"{name}.bias": entry["bias"]}
    for name, entry in norms.items():
        weights |= {f"{name}.weight": entry["scale"], f"{name}.bias": entry["bias"]}
    found.bert.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    kernel, bias = params["projection"]["kernel"], params["projection"]["bias"]
    found.projection.load_state_dict({"weight": torch.tensor(kernel.T), "bias": torch.tensor(bias)})
    return found.to(getattr(torch, jnp.dtype(config.dtype).name))


def theirs(model: Any, corpus: CorpusRows, dtype: str) -> NDArray[np.float32]:
    vectors = np.empty((len(corpus.ids), PROJECTION), np.float32)
    with torch.inference_mode():
        for rows, width in batches(corpus, BATCH):
            full = np.resize(rows, BATCH)
            documents = Documents(corpus.ids[full, :width], corpus.lengths[full], corpus.title_lengths[full])
            ids, segments, mask = (torch.from_numpy(np.array(part)).long() for part in inputs(documents))
            vectors[rows] = model(ids, segments, mask).numpy()[: len(rows)]
    return vectors


if __name__ == "__main__":
    main()
