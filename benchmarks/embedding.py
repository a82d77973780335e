"""How fast passages are embedded beside onnxruntime and PyTorch: the same weights and passages.

Ours is `Run.embed`, as an index is built. onnxruntime, on a CPU, runs the network that `torch.onnx` exports, in float32
and with `quantize_dynamic`'s int8 matrices, whatever the dtype of the others; PyTorch runs `transformers.BertModel`
with scaled_dot_product_attention, as it is and through `torch.compile`. All use the cores that the process may use.
Rows are sorted by length for all; ours are padded to multiples of 32, and a last batch is filled up; theirs are padded
to the longest of a batch. On a CPU all profit from the memory settings of `keep_freed_memory`. Every way embeds all
batches once to warm up, then `--repeats` times, the ways in turn; medians count. The vectors are compared with those of
the first way. On a GPU whose peak is known, the share of it is that of our operations, padding not counted (the last
layer is computed for one token).

    pip install torch==2.13.0 transformers onnx onnxruntime
    taskset -c 0 python benchmarks/embedding.py --data=DIR --sizes "384 x 6" --ways realm_jax onnxruntime
    python benchmarks/embedding.py --device=cuda --passages=20000 --length=288 --dtypes bfloat16
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BertConfig as TorchConfig
from transformers import BertModel

from realm_jax.assemble import abstract_run
from realm_jax.config import default
from realm_jax.data.sources import open_sources
from realm_jax.flops import embedding_flops, peak
from realm_jax.host import keep_freed_memory
from realm_jax.models.inputs import PassageBatch, document_segments, token_mask
from realm_jax.models.layers import BertConfig
from realm_jax.retrieval.embed import CorpusRows
from realm_jax.run import Run

SIZES = {  # width, layers, heads, feed-forward
    "384 x 6": (384, 6, 12, 1536),
    "768 x 12": (768, 12, 12, 3072),
}
BATCHES = {"cpu": 32, "cuda": 256}  # passages that PyTorch and onnxruntime embed at a time
CLS, SEP, WORDS = 101, 102, 30_522  # of BERT's uncased vocabulary
FIRST_WORD = 1000  # pieces before it are specials, letters and unused ones
Embed = Callable[[], NDArray[np.float32]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a prepared folder; else tokens are drawn at random")
    parser.add_argument("--device", default="cpu", choices=BATCHES)
    parser.add_argument("--passages", type=int, default=512)
    parser.add_argument("--length", type=int, default=128, help="tokens of a passage at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds, where other work shares the cores")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all of the device")
    args = parser.parse_args()
    prepare_backends(args.device)
    corpus, words = corpus_of(args.data, args.passages, args.length)
    wanted = args.ways or [way for way in WAYS if args.device == "cpu" or "onnx" not in way]
    clock = time.process_time if args.cpu_time else time.monotonic
    print(f"{jax.devices()[0].device_kind}: {len(corpus.ids)} passages, {corpus.lengths.mean():.0f} tokens in the mean;"
          f" jax {jax.__version__}, torch {torch.__version__}, {threads()} threads")  # fmt: skip
    for name in args.sizes:
        for dtype in args.dtypes:
            compare(name, dtype, corpus, words, wanted, args, clock)


def prepare_backends(device: str) -> None:
    """Let JAX and PyTorch use this device, with all threads. Ends the program where there is none."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
        keep_freed_memory()
        torch.set_num_threads(threads())
    elif jax.default_backend() != "gpu" or not torch.cuda.is_available():
        sys.exit("--device=cuda: JAX and PyTorch both need a GPU here")


def exact_products(dtype: str) -> None:
    """Have JAX multiply float32 as such, where that is what is compared: a GPU would round to 10 bits."""
    jax.config.update("jax_default_matmul_precision", "float32" if dtype == "float32" else None)


def threads() -> int:
    return len(os.sched_getaffinity(0))


def corpus_of(data: str | None, rows: int, length: int) -> tuple[CorpusRows, int]:
    """Some document rows of a prepared folder, or of random tokens, and the size of their vocabulary."""
    rng = np.random.default_rng(0)
    if data:
        sources = open_sources(data, questions=False)
        every = CorpusRows(*sources.passages.document_matrix(length, sources.tokenizer.special))
        some = rng.choice(len(every.ids), min(rows, len(every.ids)), replace=False)
        return every.take(np.sort(some)), sources.tokenizer.size
    ids = rng.integers(FIRST_WORD, WORDS, (rows, length), np.uint16)
    lengths = rng.integers(length // 2, length + 1, rows).astype(np.uint16)
    titles = rng.integers(1, 9, rows).astype(np.uint16)
    each = np.arange(rows)
    ids[:, 0], ids[each, titles + 1], ids[each, lengths - 1] = CLS, SEP, SEP
    ids[np.arange(length) >= lengths[:, None]] = 0
    return CorpusRows(ids, lengths, titles), WORDS


def compare(
    name: str, dtype: str, corpus: CorpusRows, words: int, wanted: list[str], args: argparse.Namespace,
    clock: Callable[[], float],
) -> None:  # fmt: skip
    exact_products(dtype)
    run = run_of(name, dtype, corpus, words)
    params = jax.tree.map(np.array, run.initial_params())
    ways = {way: WAYS[way](run, params, args.device) for way in wanted}
    vectors = {}
    for way, embed in ways.items():
        began = time.monotonic()
        vectors[way] = embed()
        print(f"{way}: first pass, with compiling, {time.monotonic() - began:.0f} s", flush=True)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.repeats):
        for way, embed in ways.items():
            began = clock()
            embed()
            times[way].append(clock() - began)
    lengths, counts = np.unique(corpus.lengths, return_counts=True)
    each = [embedding_flops(run.config, int(length)) for length in lengths]
    operations = float(np.dot(each, counts))
    print(f"{'model':>9} {'dtype':>9} {'way':>22} {'passages/s':>11} {'to the first':>13} {'largest difference':>19} "
          f"{'of the peak':>12}")  # fmt: skip
    limit = peak(jax.devices()[0].device_kind) if dtype == "bfloat16" else None
    for way, found in times.items():
        seconds = statistics.median(found)
        apart = np.abs(vectors[way] - vectors[wanted[0]]).max()
        ratio = statistics.median(times[wanted[0]]) / seconds
        share = f"{operations / seconds / limit:12.1%}" if limit else f"{'':12}"
        print(f"{name:>9} {dtype:>9} {way:>22} {len(corpus.ids) / seconds:11.2f} {ratio:13.2f} {apart:19.1e} {share}",
              flush=True)  # fmt: skip


def run_of(name: str, dtype: str, corpus: CorpusRows, words: int) -> Run:
    """A run of this corpus with a fresh BERT of such a size."""
    config = default()
    config.model.width, config.model.layers, config.model.heads, config.model.feed_forward = SIZES[name]
    config.model.dtype, config.model.hidden_act = dtype, "gelu"
    config.data.document_length = corpus.ids.shape[1]
    run = abstract_run(config, Path("."), len(corpus.ids), words, special=(CLS, SEP))
    run.__dict__["corpus"] = corpus  # where cached_property keeps it
    return run


def ours(run: Run, params: Any, device: str) -> Embed:
    placed = jax.device_put(params, run.param_shardings)
    return lambda: run.embed(placed)


def inputs(documents: PassageBatch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Ids, segments and mask of document rows."""
    ids = documents.ids.astype(jnp.int32)
    return ids, document_segments(documents), token_mask(documents.lengths, ids.shape[1])


class TorchTower(torch.nn.Module):
    """The same tower around `BertModel`."""

    def __init__(self, config: BertConfig, projection: int, attention: str) -> None:
        super().__init__()
        sizes = TorchConfig(
            vocab_size=config.vocabulary_size, hidden_size=config.width, num_hidden_layers=config.layers,
            num_attention_heads=config.heads, intermediate_size=config.feed_forward,
            max_position_embeddings=config.max_length, hidden_act="gelu", attn_implementation=attention,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert = BertModel(sizes)
        self.projection = torch.nn.Linear(config.width, projection)
        self.norm = torch.nn.LayerNorm(projection, eps=1e-12)

    def forward(self, ids: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pooled = self.bert(ids, mask, segments).pooler_output
        return self.norm(self.projection(pooled)).float()


def torch_tower(config: BertConfig, params: Any, attention: str = "sdpa") -> TorchTower:
    """The tower with these weights."""
    found = TorchTower(config, params["projection"]["bias"].shape[0], attention).eval()
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
    return found.to(getattr(torch, jnp.dtype(config.compute.dtype).name))


def with_torch(run: Run, params: Any, device: str) -> Embed:
    return embed_with(torch_tower(run.model.bert, params["document_embedder"]), run.corpus, device)


def with_compiled_torch(run: Run, params: Any, device: str) -> Embed:
    model = torch.compile(torch_tower(run.model.bert, params["document_embedder"]), dynamic=True)
    return embed_with(model, run.corpus, device)


def embed_with(model: Any, corpus: CorpusRows, device: str) -> Embed:
    model = model.to(device)

    def embed(*batch: NDArray) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(*(torch.from_numpy(part).to(device) for part in batch))
        return found

    def fetch(vectors: list[torch.Tensor]) -> NDArray[np.float32]:
        return torch.cat(vectors).cpu().numpy()

    return theirs(embed, fetch, corpus, BATCHES[device])


def with_onnx(run: Run, params: Any, device: str, int8: bool = False) -> Embed:
    """onnxruntime over float32, or over matrices in int8."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    exact = run.model.bert.with_compute(dtype=jnp.float32)
    model = torch_tower(exact, params["document_embedder"], attention="eager")
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
    embed = lambda *batch: session.run(None, dict(zip(names, batch, strict=True)))[0]  # noqa: E731
    return theirs(embed, np.concatenate, run.corpus, BATCHES[device])


def with_int8(run: Run, params: Any, device: str) -> Embed:
    return with_onnx(run, params, device, int8=True)


def theirs(
    embed: Callable[..., Any], fetch: Callable[[list], NDArray[np.float32]], corpus: CorpusRows, size: int
) -> Embed:
    """A way to all vectors, `size` passages at a time, by a function of int64 ids, segments and mask [rows, length]
    whose results `fetch` brings to the host at the end."""
    order = np.argsort(corpus.lengths, kind="stable")
    parts = [order[start : start + size] for start in range(0, len(order), size)]

    def run() -> NDArray[np.float32]:
        found = fetch([embed(*padded(corpus.take(rows))) for rows in parts])
        vectors = np.empty_like(found)
        vectors[order] = found
        return vectors

    return run


def padded(rows: CorpusRows) -> list[NDArray[np.int64]]:
    """Ids, segments and mask [rows, length of the longest]."""
    width = int(rows.lengths.max())
    documents = PassageBatch(rows.ids[:, :width], rows.lengths, rows.title_lengths)
    with jax.default_device(jax.devices("cpu")[0]):
        return [np.asarray(part, np.int64) for part in inputs(documents)]


WAYS: dict[str, Callable[[Run, Any, str], Embed]] = {
    "realm_jax": ours,
    "onnxruntime": with_onnx,
    "onnxruntime int8": with_int8,
    "PyTorch": with_torch,
    "PyTorch, compiled": with_compiled_torch,
}


if __name__ == "__main__":
    main()
