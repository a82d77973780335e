"""Token rerank and PyLate (Chaffin and Sourty 2025) on the first passages of hybrid search: MaxSim, quality, seconds.

    pip install pylate==1.6.0      in its own environment, because it pins older sentence-transformers and transformers
    python benchmarks/pylate_rerank.py --data=data/medquad --encoder=MODEL_DIR --questions=300

PyLate is a library for ColBERT. Each way gets one question and its first 10 passages at a time, the ways in turn:

* MaxSim: `token_rerank.max_sim` and `pylate.rank.rerank` get the token vectors of our encoder. The seconds of a
  question are the median of SCORED calls. PyLate sums over the tokens of the query; we take the mean.
* from text: ours is the tokenizer for the question, then `rescore_by_tokens`, which reads the token ids of passages in
  the index. PyLate's is `ColBERT.encode` for the question and for the passages, then `pylate.rank.rerank`.

--encoder: a sentence-transformers folder with a BERT. PyLate adds a random projection to 128 dimensions if the encoder
has none; we give it an identity. It runs once without query expansion and prefixes, scoring all tokens, and once with
its defaults: prefixes that are new to the encoder, queries filled up to 32 tokens with [MASK], which are scored, and no
punctuation of passages scored. `ours from text` is the default of our index: it compares only words, and adds MaxSim to
the value of the search.
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from numpy.typing import NDArray
from pylate.models import ColBERT, Dense
from pylate.rank import rerank
from search_stages import cells, measures
from sentence_transformers.models import Transformer

from realm_jax.cache import cache_programs
from realm_jax.config import load_config
from realm_jax.data.examples import query_arrays
from realm_jax.data.held_out import evenly_spaced
from realm_jax.eval.prediction import Evaluator
from realm_jax.forward import Index, SearchPipeline, gather_passages, rescore_by_tokens
from realm_jax.host import keep_freed_memory
from realm_jax.indexing.vector_cache import embed_with_cache
from realm_jax.models.retriever import TokenVectors
from realm_jax.retrieval.bm25 import searchable_texts
from realm_jax.retrieval.fusion import FusedRanking
from realm_jax.retrieval.token_rerank import max_sim
from realm_jax.run import Run
from realm_jax.train.init_from import init_from_sources
from realm_jax.train.recipe import open_run

DEPTH = 10
SCORED = 20  # calls that score the vectors of a question
QUERY_LENGTH, DOCUMENT_LENGTH = 48, 128  # tokens
OURS, THEIRS, THEIR_DEFAULTS = "ours from text", "PyLate from text", "PyLate from text, its defaults"
OUR_MAX_SIM, THEIR_MAX_SIM = "MaxSim by ours", "MaxSim by PyLate"


def open_index(data: str, encoder: str, workdir: Path) -> tuple[Run, Any, Index]:
    """Return a run over a prepared folder, the parameters of an encoder as it is, and its index."""
    config = load_config("real_text")
    config.tasks, config.init_from, config.data.path = "ict", encoder, data
    config.data.update(query_length=QUERY_LENGTH, document_length=DOCUMENT_LENGTH)
    config.evaluation.update(held_out=0.0)
    run = open_run(config, workdir)
    params = init_from_sources(run, run.initial_params())
    return run, params, run.index(embed_with_cache(run, params, bar=True))


def pylate_model(encoder: str, **settings: Any) -> ColBERT:
    """Return PyLate's model of an encoder, with an identity as projection."""
    transformer = Transformer(encoder)
    width = transformer.get_word_embedding_dimension()
    identity = Dense(width, width, bias=False, init_weight=torch.eye(width))
    return ColBERT(modules=[transformer, identity], device="cpu", **settings)


def pylate_scores(query: NDArray, passages: Sequence[NDArray]) -> list[float]:
    """Return PyLate's MaxSim of a query with each passage, in their order; arrays are [tokens, width]."""
    (results,) = rerank([[*range(len(passages))]], [query], [passages])
    return [result["score"] for result in sorted(results, key=lambda result: result["id"])]


@jax.jit
def our_scores(query: TokenVectors, passages: TokenVectors) -> jax.Array:
    """Return our MaxSim of a query, arrays [1, q, …], with each passage, [passages, d, …]; [passages]."""
    return jax.vmap(max_sim, (None, None, 0, 0))(*query, *(part[:, None] for part in passages))[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prepared with the encoder's tokenizer and --limit=128")
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--split", default="dev")
    parser.add_argument("--questions", type=int, default=300, help="take so many, evenly spaced (default: 300)")
    args = parser.parse_args()
    keep_freed_memory()
    cache_programs()
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # JAX uses as many
    torch.manual_seed(0)  # PyLate draws the embeddings of its default prefixes

    # --- Search
    with tempfile.TemporaryDirectory() as workdir:
        run, params, index = open_index(args.data, args.encoder, Path(workdir))
        judged = [question for question in run.sources.questions[args.split] if question.gold]
        questions = evenly_spaced(judged, args.questions)
        searched = Evaluator(run, questions, SearchPipeline("hybrid")).ranking(params, index, DEPTH)  # [questions, 10]
    texts, tokenizer = list(searchable_texts(run.sources.passages)), run.sources.tokenizer

    # --- Both libraries
    same = {"do_query_expansion": False, "query_prefix": "", "document_prefix": "", "skiplist_words": []}
    colbert = pylate_model(args.encoder, query_length=QUERY_LENGTH, document_length=DOCUMENT_LENGTH, **same)
    default_colbert = pylate_model(args.encoder)
    encode_query, encode_passages = jax.jit(run.model.query_tokens), jax.jit(run.model.document_tokens)

    @jax.jit
    def rescored(params: Any, index: Index, query: Any, first: FusedRanking) -> jax.Array:  # [10]
        return rescore_by_tokens(run.answering_qa, run.context, params, query, index, first).values[0]

    def query_of(question: str) -> dict[str, NDArray]:  # [1, …]
        query = query_arrays(np.asarray(tokenizer.encode(question).ids), QUERY_LENGTH, tokenizer)
        return {name: np.asarray(array)[None] for name, array in query.items()}

    def ours(question: str, first: FusedRanking) -> jax.Array:
        return rescored(params, index, query_of(question), first)

    def theirs(model: ColBERT, question: str, passages: list[str]) -> list[float]:
        return pylate_scores(model.encode(question, is_query=True), model.encode(passages, is_query=False))

    # --- Rerank
    seconds, values, tokens = defaultdict(list), defaultdict(list), []
    for number in [0, *range(len(questions))]:  # the first question twice, because first calls compile
        question, first = questions[number].question, FusedRanking(*(part[[number]] for part in searched))
        passages = [texts[row] for row in first.rows[0]]
        query = encode_query(params, *query_of(question).values())
        documents = encode_passages(params, gather_passages(index, first.rows[0]))  # vectors [10, d, width]
        query_vectors = np.asarray(query.vectors)[np.asarray(query.mask)]  # [tokens, width]
        document_vectors = [vectors[mask] for vectors, mask in zip(*map(np.asarray, documents), strict=True)]
        ways: dict[str, Callable[[], Any]] = {
            OURS: partial(ours, question, first),
            THEIRS: partial(theirs, colbert, question, passages),
            THEIR_DEFAULTS: partial(theirs, default_colbert, question, passages),
            OUR_MAX_SIM: partial(our_scores, query, documents),
            THEIR_MAX_SIM: partial(pylate_scores, query_vectors, document_vectors),
        }
        for name, way in ways.items():
            times = []
            for _ in range(SCORED if name in (OUR_MAX_SIM, THEIR_MAX_SIM) else 1):
                began = time.perf_counter()
                result = np.asarray(way(), np.float64)  # [10]
                times.append(time.perf_counter() - began)
            seconds[name].append(np.median(times))
            values[name].append(result)
        tokens.append((len(query_vectors), np.mean([*map(len, document_vectors)])))

    # --- Report
    scores = {name: np.stack(each[1:]) for name, each in values.items()}  # [questions, 10]
    orders = {name: np.argsort(-each, axis=1, kind="stable") for name, each in scores.items()}
    query_tokens, passage_tokens = np.array(tokens[1:]).T  # [questions] each
    print(f"{len(questions)} questions of {query_tokens.mean():.0f} tokens, passages of {passage_tokens.mean():.0f}")
    for name in (THEIR_MAX_SIM, THEIRS):
        difference = np.abs(scores[name] / query_tokens[:, None] - scores[OUR_MAX_SIM]).max()
        same_order = (orders[name] == orders[OUR_MAX_SIM]).all(axis=1).mean()
        print(f"{name}: largest difference to ours {difference:.1e}, equal orders {same_order:.3f}")
    golds = [question.gold for question in questions]
    store, clusters = run.sources.passages, [*map(min, golds)]
    before = measures(store, golds, searched.rows)
    print(f"{'hybrid search':32}", "  ".join(cells(before, clusters)))
    for way, order in orders.items():
        after = measures(store, golds, np.take_along_axis(searched.rows, order, axis=1))
        changes = {name: values - before[name] for name, values in after.items()}
        print(f"{way:32}", "  ".join(cells(changes, clusters, "+")))
    for mine, other in ((OURS, THEIRS), (OURS, THEIR_DEFAULTS), (OUR_MAX_SIM, THEIR_MAX_SIM)):
        ratios = np.array(seconds[other][1:]) / np.array(seconds[mine][1:])
        means = (f"{name} {np.mean(seconds[name][1:]):.4f} s" for name in (mine, other))
        print(", ".join(means) + f", median of PyLate / ours {np.median(ratios):.2f}")


if __name__ == "__main__":
    main()
