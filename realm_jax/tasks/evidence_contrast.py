"""Which passages tell what a sentence leaves out: contrastive training of both towers.

The query is a sentence without one of its names. Right are its own passage and those that are evidence for the name
(`data/evidence.py`), one of which comes with it; wrong are the other passages of the batch, whose sentences come in
groups that are alike. It is the retriever's part of REALM with a reader that never errs on which passages help, so it
needs no index and can move the passages as well. What it gains, and over what, stands in `docs/results/adaptation.md`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from realm_jax.data.evidence import HOLDERS, Evidence, find_evidence
from realm_jax.data.examples import (
    MINIMUM_SENTENCE,
    Example,
    Examples,
    Lengths,
    document_arrays,
    pieces_without,
    query_arrays,
    require_passages,
)
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.flops import embedding_flops, score_flops
from realm_jax.forward import Batch, StaticContext, batch_passages, dropout_keys
from realm_jax.models import likelihood
from realm_jax.models.realm import Params
from realm_jax.run import Run
from realm_jax.sections import TaskSection
from realm_jax.tasks.base import Embed, Means, Shapes, Task, batch_mean, document_shapes, query_shapes
from realm_jax.tasks.groups import GROUP, check_groups, grouped_rows, numbered

Array = jax.Array
MOST = HOLDERS - 1  # passages that can be evidence beside a sentence's own


class EvidenceContrast(Task):
    """Both towers learn."""

    name = "evidence_contrast"
    stream = 13
    title = "Evidence contrast"
    section = TaskSection(1000, 16, learning_rate=1e-5)
    is_parted = False  # it embeds short texts alone, and a part of a batch would have fewer to compare

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.evaluates_start = bool(run.config.init_from)
        self.trained = run.context.model.embedder_names

    @classmethod
    def supervision(cls, config: ConfigDict) -> str:
        return (
            "Sentences without a name, their own passages, and passages that share the name and rare words with them. "
            "Passages only; no questions, no labels."
        )

    @classmethod
    def learns_from_evidence(cls, config: ConfigDict) -> bool:
        return True

    def check_data(self) -> None:
        check_groups(self)

    def examples(self, params: Params, embed: Embed) -> Examples:
        passages, lengths = self.run.sources.passages, self.run.lengths
        evidence, kept = find_evidence(passages, *lengths.hidden), self.run.training_rows(passages)
        if kept is not None:  # what is right is learned from as well
            evidence = evidence.among(kept)
        rows = np.unique(evidence.spans.rows)
        require_passages(len(rows), passages, "a name that another passage is evidence for", self.name, kept)
        return evidence_examples(
            passages, self.run.sources.tokenizer, lengths, evidence, grouped_rows(self, embed, rows)
        )

    def array_shapes(self) -> Shapes:
        rows: Shapes = {name: ((), np.int32) for name in ("own_row", "owner", "other_row", "other_owner")}
        other = {f"other_{name}": shape for name, shape in document_shapes(self.run).items()}
        right: Shapes = {"right_rows": ((MOST,), np.int32)}
        return query_shapes(self.run) | document_shapes(self.run) | other | rows | right

    def loss(self, params: Params, batch: Batch, index: None, key: Array | None) -> Means:
        return evidence_loss(self.context, params, batch, key)

    def example_flops(self) -> dict[str, float]:
        config = self.run.config
        towers = {"queries": config.data.query_length, "documents": config.data.document_length}
        parts = {name: 3 * embedding_flops(config, length) for name, length in towers.items()}
        parts["documents"] *= 2
        return parts | {"scores": 6 * score_flops(self.run) * self.settings.batch_size}


def evidence_loss(context: StaticContext, params: Params, batch: Batch, key: Array | None) -> Means:
    """−log p(a right passage) among all passages of the batch, mean over its sentences; `accuracy`: the likeliest is
    right.

    A passage is one candidate, however often it came. Passages of the sentence's own document that are not right are
    none: they may tell as well.
    """
    keys = dropout_keys(key, 2)
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], keys[0])
    passages = batch_passages(batch), batch_passages(batch, "other_")
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts), *passages)
    scores = queries @ context.model.embed_documents(params, both, keys[1]).T
    rows = jnp.concatenate([batch["own_row"], batch["other_row"]])
    owners = jnp.concatenate([batch["owner"], batch["other_owner"]])
    right = (rows == batch["own_row"][:, None]) | (rows == batch["right_rows"][..., None]).any(axis=1)
    repeated = jnp.tril(rows[:, None] == rows, -1).any(axis=1)
    left_out = repeated | (~right & (owners == batch["owner"][:, None]))
    log_p = jax.nn.log_softmax(jnp.where(left_out, likelihood.NEGATIVE, scores), axis=1)
    found = jax.nn.logsumexp(jnp.where(right & ~left_out, log_p, likelihood.NEGATIVE), axis=1)
    best = jnp.take_along_axis(right, log_p.argmax(axis=1, keepdims=True), axis=1)
    return {"loss": batch_mean(-found), "accuracy": batch_mean(best)}


# --- examples ---------------------------------------------------------------------------------------------------------


def evidence_examples(
    store: PassageStore, tokenizer: Tokenizer, lengths: Lengths, evidence: Evidence, rows: NDArray[np.int64]
) -> Examples:
    """A sentence without a span that has evidence, its passage, and another that is evidence, drawn for each.

    rows: of passages with such a span, in groups of GROUP, in the order of the examples. A sentence of which too little
    would be left is given whole.
    """
    spans = evidence.spans
    owner = numbered(store.document_id(row) for row in range(len(store)))

    def passage(row: int) -> Example:
        return document_arrays(store.title_tokens(row), store.body_tokens(row), lengths.document, tokenizer)

    def make(index: int, rng: np.random.Generator) -> Example:
        row = int(rows[index])
        number = int(rng.integers(*np.searchsorted(spans.rows, [row, row + 1])))
        right = evidence.rows_of(number)
        other = int(rng.choice(right))
        query = without_span(store, evidence, number)[: lengths.query - 2]
        known = np.full(MOST, -1, np.int32)
        known[: len(right)] = right
        numbers = {"own_row": row, "owner": owner[row], "other_row": other, "other_owner": owner[other]}
        return (
            query_arrays(query, lengths.query, tokenizer)
            | passage(row)
            | {f"other_{name}": value for name, value in passage(other).items()}
            | {name: np.int32(value) for name, value in numbers.items()}
            | {"right_rows": known}
        )

    return Examples(len(rows), make, group=GROUP)


def without_span(store: PassageStore, evidence: Evidence, number: int) -> NDArray:
    """The pieces of a span's sentence that are left without it; all where hardly any would be."""
    spans = evidence.spans
    row = int(spans.rows[number])
    start, end = store.sentences(row)[spans.sentences[number]]
    sentence = store.body_tokens(row)[start:end]
    left = pieces_without(sentence, spans.starts[number] - start, spans.ends[number] - start)
    return left if len(left) >= MINIMUM_SENTENCE else sentence
