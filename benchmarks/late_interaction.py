"""nDCG@10 and recall of token rerank over vectors, BM25 and hybrid search, on the questions of a prepared folder.

    python benchmarks/late_interaction.py --data=data/medquad --encoder=MODEL_DIR --vectors=vectors/medquad \\
        --splits=train --cluster=focus --tune
    python benchmarks/late_interaction.py --data=data/medquad --encoder=MODEL_DIR --vectors=vectors/medquad --splits=dev

The rule of the package is `realm_jax/retrieval/token_rerank.py`; here it is written once more in NumPy, over PyTorch's
hidden states, with what it was compared with: depths, layers, tokens and weights. --tune prints that grid for hybrid
search; look at it only on questions that no table reports. Without it, RULE is compared with each search. Intervals are
over clusters: the questions of one gold document, or those with one value of the field that --cluster names.

--encoder: a sentence-transformers folder with a BERT, needs `pip install 'realm_jax[parity]'`. --vectors: a folder that
keeps the vectors of passages and questions, as `hybrid_search.py` does. Token vectors are not kept.
"""

import argparse
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hybrid_search import Asked, Lists, asked_of, lists_of, vectors_of
from numpy.typing import NDArray

from realm_jax.data.sources import Sources, open_sources
from realm_jax.eval.retrieval_metrics import documents_of, gold_hits, rank_measures
from realm_jax.eval.significance import clustered_interval
from realm_jax.retrieval.bm25 import Bm25, language_of, searchable_texts
from realm_jax.retrieval.fusion import fuse

DEEPEST = 50  # passages that a rule may order
ENCODED = 32  # passages at a time
ASKED = 32  # questions at a time; the token vectors of their passages are in memory


class Tokens(NamedTuple):
    """The token states that are compared.

    Attributes:
        layer: of the states, −1 for the last.
        kept: 'all', 'inner' for all but [CLS] and [SEP], or 'words' for the query's words among them: no punctuation.
    """

    layer: int = -1
    kept: str = "all"


class Rule(NamedTuple):
    """How the first passages are ordered again.

    Attributes:
        tokens: that are compared.
        depth: passages that are ordered; the others keep their order below them.
        weight: of MaxSim's z-score; infinite for MaxSim without the search.
    """

    tokens: Tokens = Tokens()
    depth: int = 10
    weight: float = 1.0


RULE = Rule()
TOKENS = [Tokens(*values) for values in product((-1, -2), ("all", "inner", "words"))]
GRID = [Rule(*values) for values in product(TOKENS, (10, 20, 30, 50), (0.5, 1.0, 2.0, float("inf")))]


class Searched(NamedTuple):
    """The first passages of each question, best first.

    Attributes:
        rows: int32 [questions, DEEPEST].
        values: by which the search orders them, [questions, DEEPEST].
    """

    rows: NDArray
    values: NDArray


def searches_of(lists: Lists) -> dict[str, Searched]:
    """Return the rankings of both searches, and of the package's hybrid search with its fused values."""
    fused = fuse(*lists, DEEPEST)
    searched = {
        "vectors": Searched(lists.rows, lists.scores),
        "bm25": Searched(lists.bm25_rows, lists.bm25_scores),
        "hybrid": Searched(fused.rows, fused.values),
    }
    return {name: Searched(*(part[:, :DEEPEST] for part in parts)) for name, parts in searched.items()}


class TokenEncoder:
    """The unit token vectors of texts."""

    def __init__(self, folder: str, layers: set[int]) -> None:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(folder, device="cpu")
        self._tokenizer, self._bert, self._length = model.tokenizer, model[0].auto_model.eval(), model.max_seq_length
        self._layers = layers
        self.seconds, self.texts = 0.0, 0

    def __call__(self, texts: Sequence[str]) -> list[dict[int, NDArray[np.float32]]]:
        """Return layer → [tokens, width] of each text; [CLS] is the first token and [SEP] the last one."""
        import torch

        encoded, began = [], time.process_time()
        for first in range(0, len(texts), ENCODED):
            part = list(texts[first : first + ENCODED])
            batch = self._tokenizer(part, padding=True, truncation=True, max_length=self._length, return_tensors="pt")
            with torch.inference_mode():
                states = self._bert(**batch, output_hidden_states=True).hidden_states
            units = {layer: torch.nn.functional.normalize(states[layer], dim=-1).numpy() for layer in self._layers}
            lengths = batch["attention_mask"].sum(dim=1).tolist()
            encoded += [{layer: unit[n, :length] for layer, unit in units.items()} for n, length in enumerate(lengths)]
        self.seconds, self.texts = self.seconds + time.process_time() - began, self.texts + len(texts)
        return encoded

    def words(self, text: str) -> NDArray[np.bool_]:
        """Return True for the tokens of a text that have a letter or a digit and are not special, [tokens]."""
        ids = self._tokenizer(text, truncation=True, max_length=self._length)["input_ids"]
        tokens = self._tokenizer.convert_ids_to_tokens(ids)
        is_word = np.array([any(map(str.isalnum, token)) for token in tokens])
        is_word[[0, -1]] = False
        return is_word


def max_sims(
    encoder: TokenEncoder, asked: Sequence[str], texts: Sequence[str], rows: NDArray, tokens: Sequence[Tokens]
) -> dict[Tokens, NDArray[np.float64]]:
    """Return MaxSim of each question with its passages, [questions, depth] for each kind of tokens; 0 for no passage.

    Args:
        encoder: of both.
        asked: the questions.
        texts: of all passages.
        rows: of each question's passages, [questions, depth].
        tokens: kinds.
    """
    sims = {kind: np.zeros(rows.shape) for kind in tokens}
    for first in range(0, len(asked), ASKED):
        numbers = range(first, min(first + ASKED, len(asked)))
        wanted = [row for row in np.unique(rows[numbers]).tolist() if row >= 0]
        passages = dict(zip(wanted, encoder([texts[row] for row in wanted]), strict=True))
        queries = encoder([asked[number] for number in numbers])
        for number, query in zip(numbers, queries, strict=True):
            masks = {"all": slice(None), "inner": slice(1, -1), "words": encoder.words(asked[number])}
            for kind, (rank, row) in product(tokens, enumerate(rows[number].tolist())):
                vectors = query[kind.layer][masks[kind.kept]]  # [query tokens, width]
                if row >= 0 and len(vectors):
                    inner = slice(None) if kind.kept == "all" else slice(1, -1)
                    cosines = vectors @ passages[row][kind.layer][inner].T  # [query tokens, passage tokens]
                    sims[kind][number, rank] = cosines.max(axis=1, initial=-1.0).mean()
    return sims


def reordered(searched: Searched, sims: NDArray, rule: Rule) -> NDArray[np.int32]:
    """Return the rows in the order of z(search) + weight · z(MaxSim) over the first `rule.depth`."""
    rows, values, sims = (part[:, : rule.depth] for part in (*searched, sims))
    total = z_scores(sims, rows >= 0) if np.isinf(rule.weight) else z_scores(values, rows >= 0)
    if np.isfinite(rule.weight):
        total = total + rule.weight * z_scores(sims, rows >= 0)
    order = np.argsort(-np.where(rows >= 0, total, -np.inf), axis=1, kind="stable")
    return np.concatenate([np.take_along_axis(rows, order, axis=1), searched.rows[:, rule.depth :]], axis=1)


def z_scores(values: NDArray, is_passage: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the z-scores of each question's passages, 0 for missing ones, [questions, depth]."""
    masked = np.ma.masked_array(values.astype(np.float64), ~is_passage)
    deviation = np.ma.maximum(masked.std(axis=1, keepdims=True), 1e-6)
    return np.asarray(((masked - masked.mean(axis=1, keepdims=True)) / deviation).filled(0.0))


def measures(sources: Sources, golds: list[Any], rows: NDArray) -> dict[str, NDArray[np.float64]]:
    """Return nDCG@10, recall@1 and recall@5 of each question."""
    hits = gold_hits(sources.passages, rows, golds)
    ranks = rank_measures(documents_of(sources.passages, rows.astype(np.int64)), golds)
    recalls = {f"recall@{k}": hits[:, :k].any(axis=1).astype(float) for k in (1, 5)}
    return {"nDCG@10": ranks["ndcg@10"]} | recalls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--vectors", required=True, type=Path)
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--splits", default="dev")
    parser.add_argument("--cluster", help="question field; questions with the same value are one cluster")
    parser.add_argument("--questions", type=int, default=0, help="take so many, evenly spaced (default: all)")
    parser.add_argument("--tune", action="store_true", help="print the grid for hybrid search instead of the table")
    args = parser.parse_args()
    sources = open_sources(args.data, flag="--data=")
    texts = list(searchable_texts(sources.passages))
    passage_vectors = vectors_of(args.vectors, "PASSAGES", args.encoder, lambda: texts)
    words = Bm25(texts, language_of(sources.passages))
    rules = GRID if args.tune else [RULE]
    kinds = list(dict.fromkeys(rule.tokens for rule in rules))
    encoder = TokenEncoder(args.encoder, {kind.layer for kind in kinds})
    deepest = max(rule.depth for rule in rules)
    for split in args.splits.split(","):
        asked = asked_of(sources, split)
        query_vectors = vectors_of(args.vectors, split, args.encoder, asked.texts.copy)
        numbers = [number for number, question in enumerate(sources.questions[split]) if question.gold]
        if args.questions:
            numbers = numbers[:: max(1, len(numbers) // args.questions)][: args.questions]
        questions = [sources.questions[split][number] for number in numbers]
        golds = [question.gold for question in questions]
        clusters = [str(q.fields.get(args.cluster)) if args.cluster else min(q.gold) for q in questions]
        asked = Asked([asked.texts[number] for number in numbers], [asked.golds[number] for number in numbers])
        searches = searches_of(lists_of(query_vectors[numbers], passage_vectors, words, asked))
        if args.tune:
            searches = {"hybrid": searches["hybrid"]}
        print(f"{split}: {len(questions)} questions, {len({*clusters})} clusters")
        for search, searched in searches.items():
            before = measures(sources, golds, searched.rows)
            print(f"  {search:20}", "  ".join(f"{name} {values.mean():.3f}" for name, values in before.items()))
            sims = max_sims(encoder, asked.texts, texts, searched.rows[:, :deepest], kinds)
            for rule in rules:
                after = measures(sources, golds, reordered(searched, sims[rule.tokens], rule))
                label = f"+ {rule.depth} {rule.tokens.layer} {rule.tokens.kept} {rule.weight:g}"
                changes = (change(name, after[name] - before[name], clusters) for name in after)
                print(f"    {label:18}", "  ".join(changes), flush=True)
    print(f"{encoder.seconds / encoder.texts:.3f} CPU s for the token vectors of a text")


def change(name: str, differences: NDArray[np.float64], clusters: list[str]) -> str:
    """Return the mean difference of a measure with its interval, as text."""
    low, high = clustered_interval(differences, clusters)
    ends = "" if low is None else f" [{low:+.3f}, {high:+.3f}]"
    return f"{name} {differences.mean():+.3f}{ends}"


if __name__ == "__main__":
    main()
