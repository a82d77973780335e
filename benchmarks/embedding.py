"""How fast passages are embedded on a CPU beside onnxruntime and PyTorch: the same weights, passages and batches.

The passages come from a prepared folder. onnxruntime runs the network that `torch.onnx` exports, in float32 and with
`quantize_dynamic`'s int8 matrices, whatever the dtype of the others; PyTorch runs `transformers.BertModel` with
scaled_dot_product_attention, as it is and through `torch.compile`. All use the cores that the process may use. Rows are
sorted by length for all; ours are padded to buckets of lengths, theirs to the longest of a
batch. All profit from the memory settings of `keep_freed_memory`. Every way embeds all batches once to warm up, then
`--repeats` times, the ways in turn; medians count. The vectors are compared with those of the first way.

    pip install torch==2.13.0 transformers onnx onnxruntime
    taskset -c 0 python benchmarks/embedding.py --data=DIR --sizes "384 x 6" --ways realm_jax onnxruntime
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import BertConfig as TorchConfig
from transformers import BertModel

from realm_jax.data.sources import open_sources
from realm_jax.host import keep_freed_memory
from realm_jax.models.bert import BertConfig
from realm_jax.models.encoder import Embedder
from realm_jax.models.inputs import Documents, document_segments, token_mask
from realm_jax.retrieval.embed import CorpusRows, embed_corpus, in_groups

SIZES = {  # width, layers, heads, feed-forward
    "384 x 6": (384, 6, 12, 1536),
    "768 x 12": (768, 12, 12, 3072),
}
BATCH, PROJECTION = 32, 128
Run = Callable[[], NDArray[np.float32]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--passages", type=int, default=512)
    parser.add_argument("--length", type=int, default=128, help="tokens of a passage at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds, where other work shares the cores")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    args = parser.parse_args()
    keep_freed_memory()
    sources = open_sources(args.data, questions=False)
    rows = np.random.default_rng(0).choice(len(sources.passages), args.passages, replace=False)
    every = CorpusRows(*sources.passages.document_matrix(args.length, sources.tokenizer.special))
    corpus = CorpusRows(*(part[np.sort(rows)] for part in every))
    torch.set_num_threads(threads())
    clock = time.process_time if args.cpu_time else time.monotonic
    print(f"{args.passages} passages, {corpus.lengths.mean():.0f} tokens in the mean; jax {jax.__version__}, "
          f"onnxruntime {onnxruntime.__version__}, torch {torch.__version__}, {threads()} threads")  # fmt: skip
    print(f"{'model':>9} {'dtype':>9} {'way':>22} {'passages/s':>11} {'to the first':>13} {'largest difference':>19}")
    for name in args.sizes:
        for dtype in args.dtypes:
            compare(name, dtype, corpus, sources.tokenizer.size, args.ways, args.repeats, clock)


def threads() -> int:
    return len(os.sched_getaffinity(0))


def compare(
    name: str, dtype: str, corpus: CorpusRows, words: int, wanted: list[str], repeats: int, clock: Callable[[], float]
) -> None:
    width, layers, heads, hidden = SIZES[name]
    sizes = (words, width, layers, heads, hidden, 512, 0.0, jnp.dtype(dtype))
    config = BertConfig(*sizes, attention="cpu", hidden_act="gelu")
    tower = Embedder(config, PROJECTION)
    some = jnp.zeros((1, 8), jnp.int32)
    params = nn.unbox(jax.jit(tower.init)(jax.random.key(0), some, some, some > 0))
    params = jax.tree.map(np.array, params)
    ways = {way: WAYS[way](tower, params, corpus) for way in wanted}
    vectors = {way: run() for way, run in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            began = clock()
            run()
            times[way].append(clock() - began)
    speed = {way: len(corpus.ids) / statistics.median(found) for way, found in times.items()}
    for way in ways:
        apart = np.abs(vectors[way] - vectors[wanted[0]]).max()
        ratio = speed[way] / speed[wanted[0]]
        print(f"{name:>9} {dtype:>9} {way:>22} {speed[way]:11.2f} {ratio:13.2f} {apart:19.1e}", flush=True)


def ours(tower: Embedder, params: Any, corpus: CorpusRows) -> Run:
    params = jax.device_put(params)
    return lambda: embed_corpus(lambda batch: _ours(tower, params, Documents(*map(jnp.asarray, batch))), corpus, BATCH)


@jax.jit(static_argnums=0)
def _ours(tower: Embedder, params: Any, documents: Documents) -> jax.Array:
    return in_groups(lambda group: tower.apply(params, *inputs(group)), documents)


def inputs(documents: Documents) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Ids, segments and mask of document rows."""
    ids = documents.ids.astype(jnp.int32)
    return ids, document_segments(documents), token_mask(documents.lengths, ids.shape[1])


class TorchTower(torch.nn.Module):
    """The same tower around `BertModel`."""

    def __init__(self, config: BertConfig, attention: str) -> None:
        super().__init__()
        sizes = TorchConfig(
            vocab_size=config.vocabulary_size, hidden_size=config.width, num_hidden_layers=config.layers,
            num_attention_heads=config.heads, intermediate_size=config.feed_forward,
            max_position_embeddings=config.max_length, hidden_act="gelu", attn_implementation=attention,
        )  # fmt: skip
        self.bert = BertModel(sizes)
        self.projection = torch.nn.Linear(config.width, PROJECTION)
        self.norm = torch.nn.LayerNorm(PROJECTION, eps=1e-12)

    def forward(self, ids: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pooled = self.bert(ids, mask, segments).pooler_output
        return self.norm(self.projection(pooled)).float()


def torch_tower(config: BertConfig, params: Any, attention: str = "sdpa") -> TorchTower:
    """The tower with these weights."""
    found = TorchTower(config, attention).eval()
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


def with_torch(tower: Embedder, params: Any, corpus: CorpusRows) -> Run:
    model = torch_tower(tower.config, params["params"])
    return lambda: theirs(lambda *batch: _infer(model, batch), corpus)


def with_compiled_torch(tower: Embedder, params: Any, corpus: CorpusRows) -> Run:
    model = torch.compile(torch_tower(tower.config, params["params"]), dynamic=True)
    return lambda: theirs(lambda *batch: _infer(model, batch), corpus)


def _infer(model: Any, batch: tuple[NDArray, ...]) -> NDArray[np.float32]:
    with torch.inference_mode():
        found: NDArray[np.float32] = model(*map(torch.from_numpy, batch)).numpy()
    return found


def with_onnx(tower: Embedder, params: Any, corpus: CorpusRows, int8: bool = False) -> Run:
    """onnxruntime over float32, or over matrices in int8."""
    exact = dataclasses.replace(tower.config, dtype=jnp.float32)
    model = torch_tower(exact, params["params"], attention="eager")
    with tempfile.TemporaryDirectory() as folder:
        path, small = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        names, example = ["ids", "segments", "mask"], [torch.ones((2, 8), dtype=torch.long) for _ in range(3)]
        axes = {name: {0: "batch", 1: "length"} for name in names} | {"vectors": {0: "batch"}}
        torch.onnx.export(model, tuple(example), path, input_names=names, output_names=["vectors"],
                          dynamic_axes=axes, dynamo=False)  # fmt: skip
        if int8:
            quantize_dynamic(path, small, weight_type=QuantType.QInt8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads(), 1
        session = onnxruntime.InferenceSession(small if int8 else path, options, providers=["CPUExecutionProvider"])
    return lambda: theirs(lambda *batch: session.run(None, dict(zip(names, batch, strict=True)))[0], corpus)


def with_int8(tower: Embedder, params: Any, corpus: CorpusRows) -> Run:
    return with_onnx(tower, params, corpus, int8=True)


def theirs(embed: Callable[..., NDArray[np.float32]], corpus: CorpusRows) -> NDArray[np.float32]:
    """All vectors, by a function of int64 ids, segments and mask [rows, length]."""
    vectors = np.empty((len(corpus.ids), PROJECTION), np.float32)
    order = np.argsort(corpus.lengths, kind="stable")
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        width = int(corpus.lengths[rows].max())
        documents = Documents(corpus.ids[rows, :width], corpus.lengths[rows], corpus.title_lengths[rows])
        vectors[rows] = embed(*(np.asarray(part, np.int64) for part in inputs(documents)))
    return vectors


WAYS: dict[str, Callable[[Embedder, Any, CorpusRows], Run]] = {
    "realm_jax": ours,
    "onnxruntime": with_onnx,
    "onnxruntime int8": with_int8,
    "PyTorch": with_torch,
    "PyTorch, compiled": with_compiled_torch,
}


if __name__ == "__main__":
    main()
