"""A whole REALM training step beside PyTorch: same weights, same batch, same arithmetic, on the same machine.

Query tower → exact search over all vectors → gather the documents' tokens → document tower → reader over query and
document → marginal likelihood → backward → clipping → AdamW. Ours is `make_step`, twice: with sequences packed where
their lengths leave enough padding for that, as in training, and with all of them padded. PyTorch's is `torch_realm.py`,
padded: eager and through `torch.compile`, with the whole last layer or at needed positions only, as ours always is.
Every way takes its first steps from the same weights; losses and gradient norms are printed and have to agree in
float32. Then the ways take turns, and the median counts. First one tower alone, forward and backward, beside
`transformers.BertModel`: the PyTorch side is no slower than that.

Operations are those of ours: at packed or padded lengths, the last layer at needed positions. PyTorch does not compute
the metrics that ours reports beside the loss.

    pip install torch==2.13.0 transformers
    python benchmarks/realm_step.py [--size 384] [--data=DIR]
    python benchmarks/realm_step.py --device=cuda --dtype=bfloat16 --size=base --batch=64 --candidates=8
"""

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import torch_realm
from embedding import CLS, SEP, corpus_of, exact_products, inputs, prepare_backends, torch_tower
from ml_collections import ConfigDict
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from realm_jax.assemble import abstract_run
from realm_jax.config import default, joint_length
from realm_jax.flops import peak
from realm_jax.forward import PackingSpec
from realm_jax.indexing.control import ControlSignal, put_control
from realm_jax.mesh import logical_sharding
from realm_jax.models.inputs import PassageBatch
from realm_jax.run import Run, put_batch
from realm_jax.tasks import make_task
from realm_jax.tasks.packed import SAMPLED, PackingEstimator, TextLengths
from realm_jax.tasks.step_flops import step_flops
from realm_jax.train.optimizer import CLIP, WEIGHT_DECAY
from realm_jax.train.step import make_step, start_state

SIZES = {"128": (128, 2, 2, 512), "384": (384, 6, 12, 1536), "base": (768, 12, 12, 3072)}
WAYS = ["packed", "padded", "eager", "eager-needed", "compiled", "compiled-needed"]
MASK = 103  # of BERT's uncased vocabulary
OURS, PADDED = "realm_jax", "realm_jax, padded"
CHECKED = 3  # first steps whose losses and gradient norms are compared; the rate is 0 at the first of them
CLOSE = 1e-4  # relative, in float32
Values = tuple[float, float]  # loss and norm of the gradient


class Way(NamedTuple):
    """One way to take a step: as it is timed, and with what is checked; and the operations of a step."""

    step: Callable[[], Any]
    checked: Callable[[], Values]
    operations: float


def main() -> None:
    args = arguments()
    prepare_backends(args.device)
    exact_products(args.dtype)
    config = config_of(args)
    corpus, words = corpus_of(args.data, args.rows, args.document)
    run = abstract_run(config, Path("."), len(corpus.ids), words, special=(CLS, SEP))
    documents = jax.device_put(PassageBatch(*corpus), logical_sharding(run.mesh, "rows"))
    run.__dict__.update(corpus=corpus, documents=documents, _held_out=None)  # where cached_property keeps them
    batch = batch_of(run, np.random.default_rng(1))
    kind = jax.devices()[0].device_kind
    print(f"{args.size}, {args.dtype}, {kind}: {args.batch} queries of {args.query} × {args.candidates} candidates of "
          f"{args.document}, {len(corpus.ids):,} vectors; jax {jax.__version__}, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads", flush=True)  # fmt: skip
    params = jax.tree.map(np.array, run.initial_params())
    with nullcontext() if args.attention == "fused" else sdpa_kernel(SDPBackend.MATH):
        if "tower" in args.only:
            compare_towers(run, params, batch, args)
            gc.collect()
        if "step" in args.only:
            compare_steps(run, params, batch, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", default="384", choices=SIZES)
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--batch", type=int, default=8)
    add("--candidates", type=int, default=4, help="of a query, the null document counted")
    add("--query", type=int, default=64, help="tokens")
    add("--document", type=int, default=128, help="tokens")
    add("--predictions", type=int, default=8, help="masked pieces of a query at most")
    add("--rows", type=int, default=100_000, help="vectors that are searched")
    add("--remat", default="none", help="config.model.remat of ours")
    add("--microbatches", type=int, default=1, help="config.optimizer.microbatches of ours")
    add("--modes", nargs="+", default=["default"], help="of torch.compile; on a GPU try max-autotune")
    add("--ways", nargs="+", default=WAYS, choices=WAYS, help="to take a step (default: all)")
    add("--attention", default="fused", choices=["fused", "math"],
        help="of PyTorch: its own choice, or plain products, which on a CPU are quicker in bfloat16")  # fmt: skip
    add("--repeats", type=int, default=5)
    add("--only", nargs="+", default=["tower", "step"], choices=["tower", "step"], help="what to time (default: both)")
    add("--cpu-time", action="store_true", help="count CPU seconds: on one core that others use too")
    add("--data", help="a prepared folder; else tokens are drawn at random")
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> ConfigDict:
    config = default()
    config.tasks = "realm"
    model, data, task = config.model, config.data, config.realm
    model.width, model.layers, model.heads, model.feed_forward = SIZES[args.size]
    model.dtype, model.dropout, model.remat = args.dtype, 0.0, args.remat
    config.encoder.norm_scale = 0.3  # fresh scores near each other: every candidate and both towers matter
    data.query_length, data.document_length, data.predictions = args.query, args.document, args.predictions
    config.realm.candidates = args.candidates
    task.batch_size, config.optimizer.microbatches = args.batch, args.microbatches
    task.steps, config.optimizer.warmup, task.learning_rate = 1000, 1, 1e-5
    return config


def batch_of(run: Run, rng: np.random.Generator) -> dict[str, NDArray]:
    """Sentences of random passages with some pieces masked."""
    examples = [example_of(run, row, rng) for row in rng.choice(len(run.corpus.ids), run.config.realm.batch_size)]
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def example_of(run: Run, row: int, rng: np.random.Generator) -> dict[str, Any]:
    """As `realm_jax.tasks.realm` makes it."""
    size, most = run.lengths.query, run.lengths.predictions
    body = run.corpus.ids[row, run.corpus.title_lengths[row] + 2 : run.corpus.lengths[row] - 1]
    sentence = body[: rng.integers(size // 4, size - 1)]
    places = np.sort(rng.choice(len(sentence), min(rng.integers(1, most + 1), len(sentence)), replace=False))
    masked = sentence.copy()
    masked[places] = MASK
    pad = lambda values, length: np.pad(values, (0, length - len(values)))  # noqa: E731
    return {
        "query": pad(np.concatenate([[CLS], masked, [SEP]]), size).astype(np.uint16),
        "query_length": np.int32(len(sentence) + 2),
        "positions": pad(places + 1, most).astype(np.int32),
        "targets": pad(sentence[places], most).astype(np.int32),
        "weights": pad(np.ones(len(places)), most).astype(np.float32),
        "sentence": pad(sentence, size).astype(np.uint16),
        "sentence_length": np.int32(len(sentence)),
        "own_row": np.int32(row),
    }


def compare_towers(run: Run, params: Any, batch: Any, args: argparse.Namespace) -> None:
    """One tower over all candidates of a step, forward and backward, whole last layer in PyTorch."""
    rows = np.arange(args.batch * (args.candidates - 1))
    documents = PassageBatch(*(part[rows] for part in run.corpus))
    tower = params["document_embedder"]
    pull = np.random.default_rng(2).normal(size=(len(rows), run.model.projection)).astype(np.float32)
    slope = jax.jit(jax.grad(lambda tower, pull, documents: (run.model.embed_documents(
        {"document_embedder": tower}, documents) * pull).sum()))  # fmt: skip
    here = jax.device_put((tower, pull, documents))
    plain = torch_realm.Embedder(sizes_of(run, needed=False))
    torch_realm.copy_weights(plain, tower)
    bert = torch_tower(run.model.bert, tower).train().float()
    ids, segments, mask = (torch.from_numpy(np.array(part)).to(args.device) for part in inputs(documents))
    arrays = ids.long(), segments.long(), mask
    ways: dict[str, Callable[[], Any]] = {OURS: lambda: jax.block_until_ready(slope(*here))}
    for name, model in {"plain PyTorch": plain, "transformers.BertModel": bert}.items():
        model = model.to(args.device)
        weight = torch.from_numpy(pull).to(args.device)
        ways[name] = partial(tower_step, model, model, arrays, weight, args)
        ways[f"{name}, compiled"] = partial(tower_step, model, torch.compile(model), arrays, weight, args)
    times = in_turn(ways, args)
    print(f"\n{'one tower, forward and backward':>32} {'ms':>9} {'to BertModel':>13}")
    for name, found in times.items():
        print(f"{name:>32} {found * 1e3:9.1f} {times['transformers.BertModel'] / found:13.2f}", flush=True)


def tower_step(model: Any, call: Any, arrays: Any, pull: torch.Tensor, args: argparse.Namespace) -> None:
    with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        vectors = call(*arrays)
    (vectors.float() * pull).sum().backward()
    model.zero_grad()
    synchronize(args)


def compare_steps(run: Run, params: Any, batch: Any, args: argparse.Namespace) -> None:
    """One way after another is made and checked; then they take turns."""
    vectors = np.random.default_rng(3).normal(size=(len(run.corpus.ids), run.model.projection)).astype(np.float32)
    ways: dict[str, Way] = {}
    first: dict[str, list[Values]] = {}
    apart: dict[str, float] = {}
    memory: dict[str, float] = {}
    for name, make in makers(run, params, batch, vectors, args).items():
        began, before = time.monotonic(), device_memory(name, args)
        ways[name] = make()
        first[name] = [ways[name].checked() for _ in range(CHECKED)]
        memory[name] = added_memory(name, before, device_memory(name, args))
        apart[name] = difference(first[name], next(iter(first.values())))
        loss, norm = first[name][-1]
        print(f"{name:>44}: {CHECKED} steps with compiling {time.monotonic() - began:.0f} s; loss and gradient norm of "
              f"the last {loss:.5f} {norm:.5f}, largest difference {apart[name]:.1e}", flush=True)  # fmt: skip
    show(in_turn({name: way.step for name, way in ways.items()}, args), ways, memory, args)
    if args.dtype == "float32" and max(apart.values()) > CLOSE:
        sys.exit(f"losses or gradient norms differ by more than {CLOSE:.0e}")


def makers(
    run: Run, params: Any, batch: Any, vectors: NDArray[np.float32], args: argparse.Namespace
) -> dict[str, Callable[[], Way]]:
    """What makes each of the ways that are wanted, by its name in the table."""
    ours = partial(our_way, run, params, batch, vectors)
    found: dict[str, Callable[[], Way]] = {}
    if "packed" in args.ways:
        places = packing_of(run)
        print(f"{OURS} packs a part of a batch into these places (0: it pads): {places}", flush=True)
        if any(places[1:]):
            found[OURS] = partial(ours, places)
    if "padded" in args.ways:
        found[PADDED] = partial(ours, None)
    for mode in (None, *args.modes):
        kind, name = ("eager", "PyTorch eager") if mode is None else ("compiled", f"PyTorch compiled, {mode}")
        if kind in args.ways:
            found[name] = partial(their_way, run, params, batch, vectors, mode, False, args)
        if f"{kind}-needed" in args.ways:
            found[f"{name}, needed positions"] = partial(their_way, run, params, batch, vectors, mode, True, args)
    return found


def show(times: dict[str, float], ways: dict[str, Way], memory: dict[str, float], args: argparse.Namespace) -> None:
    best = min((value for name, value in times.items() if not name.startswith(OURS)), default=float("nan"))
    limit = peak(jax.devices()[0].device_kind) if args.device == "cuda" else None
    device = f" {'MFU':>6} {'GiB':>6}" if limit else ""
    print(f"\n{'step':>44} {'seconds':>8} {'to best PyTorch':>16} {'TFLOP/s':>8}{device}")
    for name, seconds in times.items():
        speed = ways[name].operations / seconds
        device = f" {speed / limit:6.1%} {memory[name]:6.1f}" if limit else ""
        print(f"{name:>44} {seconds:8.3f} {best / seconds:16.2f} {speed / 1e12:8.2f}{device}", flush=True)


def packing_of(run: Run) -> PackingSpec:
    """Of the sequences of a part of a batch, as training works it out, from sentences drawn as the batch's are."""
    rng = np.random.default_rng(4)
    rows = rng.choice(len(run.corpus.ids), SAMPLED)
    queries = np.array([example_of(run, row, rng)["query_length"] for row in rows], np.int64)
    titles = run.corpus.title_lengths.astype(np.int64)
    tokens = run.corpus.lengths - 3  # of titles and bodies
    passages = SimpleNamespace(column=lambda _: titles, counts=lambda _: tokens)
    sources = SimpleNamespace(passages=passages)
    at_once = run.config.realm.batch_size // run.config.optimizer.microbatches
    lengths, candidates = TextLengths(queries, queries), run.config.realm.candidates - 1
    count = PackingEstimator(replace(run, sources=sources), at_once)
    return PackingSpec(
        count.examples,
        count.queries(lengths),
        count.null_inputs(lengths),
        count.reader_inputs(lengths, candidates, titles=False),
        count.documents(candidates),
    )


def our_way(run: Run, params: Any, batch: Any, vectors: NDArray[np.float32], packed: PackingSpec | None) -> Way:
    task = make_task("realm", run)
    task.__dict__["context"] = replace(run.context, packing=packed)  # where cached_property keeps it
    step = make_step(task)
    index, placed = run.index(vectors), put_batch(run.mesh, batch)
    control = put_control(run.mesh, ControlSignal())
    state = start_state(task, jax.device_put(params, run.param_shardings))

    def once() -> dict[str, jax.Array]:
        nonlocal state
        state, metrics = step(state, placed, index, control)
        jax.block_until_ready(state)
        return metrics

    def checked() -> Values:
        metrics = once()
        if packed and metrics["unplaced"] > 0:
            print(f"packing had no slot for {metrics['unplaced']:.1%} of the tokens", flush=True)
        return float(metrics["loss"]), float(metrics["gradient_norm"])

    return Way(once, checked, sum(step_flops(task).values()))


def their_way(
    run: Run, params: Any, batch: Any, vectors: NDArray, mode: str | None, needed: bool, args: argparse.Namespace
) -> Way:
    model = torch_realm.Realm(sizes_of(run, needed))
    torch_realm.copy_weights(model, params)
    bfloat16, config = args.dtype == "bfloat16", run.config
    trainer = torch_realm.Trainer(model.to(args.device), mode, bfloat16, WEIGHT_DECAY, CLIP)
    rows = (torch.from_numpy(part.astype(np.int64)) for part in run.corpus)
    index = torch_realm.Index(*(part.to(args.device) for part in (torch.from_numpy(vectors), *rows)))
    wide = {name: part if part.dtype == np.float32 else part.astype(np.int64) for name, part in batch.items()}
    placed = {name: torch.from_numpy(part).to(args.device) for name, part in wide.items()}
    number = itertools.count()

    def once() -> None:
        trainer.step(placed, index, rate(next(number), config))
        synchronize(args)

    def checked() -> Values:
        loss = trainer.gradient(placed, index)
        values = float(loss), float(trainer.gradient_norm())
        trainer.update(rate(next(number), config))
        return values

    return Way(once, checked, sum(step_flops(make_task("realm", run)).values()))


def rate(step: int, config: ConfigDict) -> float:
    """The learning rate of `realm_jax.train.optimizer` with one step of warm-up."""
    return config.realm.learning_rate * (1 - step / config.realm.steps) if step else 0.0


def sizes_of(run: Run, needed: bool) -> torch_realm.Sizes:
    bert = run.model.bert
    return torch_realm.Sizes(
        bert.vocabulary_size, bert.width, bert.layers, bert.heads, bert.feed_forward, joint_length(run.config),
        run.model.projection, run.config.realm.candidates, (CLS, SEP), needed,
    )  # fmt: skip


def in_turn(ways: dict[str, Callable[[], Any]], args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of each way; the first round warms up."""
    clock = time.process_time if args.cpu_time else time.monotonic
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats + 1):
        for name, run in ways.items():
            began = clock()
            run()
            times[name].append(clock() - began)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def difference(values: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The largest relative one among all numbers of the first steps."""
    pair = np.array(values), np.array(others)
    return float((np.abs(pair[0] - pair[1]) / np.abs(pair[1])).max())


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def device_memory(name: str, args: argparse.Namespace) -> tuple[int, int]:
    """Bytes on the GPU in use, and at most so far: for PyTorch since it was last asked."""
    if args.device == "cpu":
        return 0, 0
    if name.startswith(OURS):
        found = jax.devices()[0].memory_stats()
        return found["bytes_in_use"], found["peak_bytes_in_use"]
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), most


def added_memory(name: str, before: tuple[int, int], after: tuple[int, int]) -> float:
    """GiB that a way needs at most; unknown for one of ours after another that needs more, whose peak stays."""
    if name.startswith(OURS) and after[1] <= before[1]:
        return float("nan")
    return (after[1] - before[0]) / 2**30


if __name__ == "__main__":
    main()
