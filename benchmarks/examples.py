"""Examples a second that one core makes for each task, and what 512 examples a step ask of a host.

Takes a prepared folder and the paper's lengths, and makes batches in the thread that asks for them, as the loop has
them made ahead. Opening a pipeline (finding the sentences with salient spans) is given apart.

    python benchmarks/examples.py --data DIR [--seconds 10]
"""

import argparse
import time
from collections.abc import Callable

from realm_jax.config import default
from realm_jax.data.examples import Examples, dataset, lengths_from
from realm_jax.data.sources import open_sources
from realm_jax.tasks import TASKS
from realm_jax.tasks.closed_book import closed_book_examples
from realm_jax.tasks.ict import MASK_RATE, ict_examples
from realm_jax.tasks.mlm import warmup_examples
from realm_jax.tasks.qa_examples import question_examples
from realm_jax.tasks.realm import masked_examples

BATCH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of realm prepare")
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    sources, config = open_sources(args.data), default()
    data, tokenizer, passages = config.data, sources.tokenizer, sources.passages
    questions = sources.questions.get("train", [])
    sizes = (data.query_length, data.document_length, config.realm.masking, data.predictions, config.qa.answers)
    lengths = lengths_from(*sizes, config.model.span_width)
    x, own = sources.pretraining, sources.pretraining_is_corpus
    print(f"{len(passages):,} passages, {len(x):,} of text to learn from, {len(questions):,} questions; {lengths}")
    makers: dict[str, tuple[str, Callable[[], Examples]]] = {
        "mlm": ("mlm", lambda: warmup_examples(passages, x, tokenizer, lengths)),
        "ict": ("ict", lambda: ict_examples(passages, tokenizer, lengths, MASK_RATE)),
    }
    for kind in ("salient", "uniform", "random_span"):
        makers[f"realm, {kind}"] = "realm", lambda kind=kind: masked_examples(x, tokenizer, lengths, kind, own)
    if questions:
        makers["qa"] = "qa", lambda: question_examples(questions, tokenizer, lengths)
        makers["closed book"] = "closed_book", lambda: closed_book_examples(x, questions, tokenizer, lengths)
    for name, (task, maker) in makers.items():
        print(name, ", ".join(f"{key} {value:.4g}" for key, value in measure(task, maker, args.seconds).items()))


def measure(task: str, maker: Callable[[], Examples], seconds: float) -> dict[str, float]:
    """Seconds to open; examples a second of one core; its seconds for BATCH examples; cores for a step of 200 ms."""
    began = time.perf_counter()
    batches = dataset(maker(), 0, TASKS[task].stream, BATCH)
    batches[0]
    opened = time.perf_counter()
    step = 1
    while time.perf_counter() - opened < seconds:
        batches[step]
        step += 1
    each = (time.perf_counter() - opened) / (step - 1)
    return {
        "opened and first batch, s": opened - began,
        "examples/s": BATCH / each,
        f"s for {BATCH}": each,
        "cores at 200 ms a step": each / 0.2,
    }


if __name__ == "__main__":
    main()
