"""Contrastive training of both encoders: sentences without a name, and the passages that support the name.

The query is a sentence without one of its names. Correct passages are the sentence's and those that are evidence for
the name (`data/evidence.py`), one of which comes with it; the other passages of the batch are negatives. This is the
retriever's part of REALM with a reader that always knows which passages help. So it needs no index and can train the
passage encoder as well. Results are in `docs/results/adaptation.md`.

In a batch of random passages almost any word of a sentence identifies its passage, so there is nothing to learn.
Therefore passages come in groups of similar ones: a random passage, and the passages of other documents whose vectors
are nearest to its vector.
"""

import logging
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
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
from realm_jax.errors import UserError
from realm_jax.forward import Batch, StaticContext, batch_passages, dropout_keys
from realm_jax.models import losses
from realm_jax.models.layers import Params
from realm_jax.run import Run
from realm_jax.tasks.base import (
    EmbedCorpus,
    ExampleSpec,
    Metrics,
    Task,
    batch_mean,
    document_spec,
    load_or_create,
    query_spec,
)  # fmt: skip

logger = logging.getLogger(__name__)

Array = jax.Array
MAX_EVIDENCE = HOLDERS - 1  # passages that can be evidence, other than the sentence's
GROUP = 8  # passages
SEEDS = 64  # first passages of groups whose neighbors are computed at a time
GROUPS_FILE = "neighbours.json"


class EvidenceContrast(Task):
    """Train both encoders."""

    name = "evidence_contrast"
    stream = 13
    num_microbatches = 1  # it embeds only short texts, and a microbatch would have fewer passages to compare

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.trained = run.context.model.embedder_names

    def examples(self, params: Params, embed: EmbedCorpus) -> Examples:
        passages, tokenizer, lengths = self.run.sources.passages, self.run.sources.tokenizer, self.run.lengths
        evidence, training_rows = find_evidence(passages, *lengths.hidden), self.run.training_rows(passages)
        if training_rows is not None:  # evidence passages are trained on as well, so none may be held out
            evidence = evidence.among(training_rows)
        rows = np.unique(evidence.spans.rows)
        require_passages(len(rows), passages, "a name that another passage is evidence for", self.name, training_rows)
        return evidence_examples(passages, tokenizer, lengths, evidence, grouped_rows(self, embed, rows))

    def example_spec(self) -> ExampleSpec:
        rows: ExampleSpec = {name: ((), np.int32) for name in ("own_row", "owner", "other_row", "other_owner")}
        other = {f"other_{name}": shape for name, shape in document_spec(self.run).items()}
        evidence: ExampleSpec = {"right_rows": ((MAX_EVIDENCE,), np.int32)}
        return query_spec(self.run) | document_spec(self.run) | other | rows | evidence

    def loss(self, params: Params, batch: Batch, index: None, key: Array | None) -> Metrics:
        return evidence_loss(self.run.context, params, batch, key)


def evidence_loss(context: StaticContext, params: Params, batch: Batch, key: Array | None) -> Metrics:
    """Return −log p(a correct passage) among all passages of the batch, mean over its sentences.

    Duplicates of a passage are one candidate. Other passages of the sentence's document are no candidates, because they
    may support the name as well.

    Args:
        context: static arguments of the step.
        params: all parameters.
        batch: arrays of `evidence_examples`, [batch, …].
        key: random key for dropout; None for none.

    Returns:
        loss: the loss that is minimized.
        accuracy: sentences whose most probable passage is correct.
    """
    keys = dropout_keys(key, 2)
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], keys[0])  # [batch, projection]
    source_passages, other_passages = batch_passages(batch), batch_passages(batch, "other_")
    passages = jax.tree.map(lambda *parts: jnp.concatenate(parts), source_passages, other_passages)  # [2 · batch, …]
    scores = queries @ context.model.embed_documents(params, passages, keys[1]).T  # [batch, 2 · batch]
    rows = jnp.concatenate([batch["own_row"], batch["other_row"]])  # [2 · batch]
    owners = jnp.concatenate([batch["owner"], batch["other_owner"]])  # [2 · batch]: document of each passage

    is_evidence = (rows == batch["right_rows"][..., None]).any(axis=1)  # [batch, 2 · batch]
    is_correct = (rows == batch["own_row"][:, None]) | is_evidence  # [batch, 2 · batch]
    repeated = jnp.tril(rows[:, None] == rows, -1).any(axis=1)  # [2 · batch]
    excluded = repeated | (~is_correct & (owners == batch["owner"][:, None]))  # [batch, 2 · batch]
    log_p = jax.nn.log_softmax(jnp.where(excluded, losses.NEG_INF, scores), axis=1)  # [batch, 2 · batch]
    log_p_correct = jax.nn.logsumexp(jnp.where(is_correct & ~excluded, log_p, losses.NEG_INF), axis=1)  # [batch]
    top1_is_correct = jnp.take_along_axis(is_correct, log_p.argmax(axis=1, keepdims=True), axis=1)  # [batch, 1]
    return {"loss": batch_mean(-log_p_correct), "accuracy": batch_mean(top1_is_correct)}


# --- Examples ---------------------------------------------------------------------------------------------------------


def evidence_examples(
    store: PassageStore, tokenizer: Tokenizer, lengths: Lengths, evidence: Evidence, rows: NDArray[np.int64]
) -> Examples:
    """Return examples: a sentence without a random span that has evidence, its passage, and a random evidence passage.

    Args:
        store: the corpus.
        tokenizer: tokenizer of the corpus.
        lengths: sizes of the arrays.
        evidence: spans, and which passages are evidence for them.
        rows: passages with such a span, in groups of GROUP, in the order of the examples.
    """
    spans = evidence.spans
    owners = number_names(store.document_id(row) for row in range(len(store)))  # [rows]: document of each

    def passage_arrays(row: int) -> Example:
        return document_arrays(store.title_tokens(row), store.body_tokens(row), lengths.document, tokenizer)

    def make(index: int, rng: np.random.Generator) -> Example:
        row = int(rows[index])
        span = int(rng.integers(*np.searchsorted(spans.rows, [row, row + 1])))
        evidence_rows = evidence.rows_of(span)
        other = int(rng.choice(evidence_rows))
        query = without_span(store, evidence, span)[: lengths.query - 2]
        padded_rows = np.full(MAX_EVIDENCE, -1, np.int32)
        padded_rows[: len(evidence_rows)] = evidence_rows
        numbers = {"own_row": row, "owner": owners[row], "other_row": other, "other_owner": owners[other]}
        return (
            query_arrays(query, lengths.query, tokenizer)
            | passage_arrays(row)
            | {f"other_{name}": value for name, value in passage_arrays(other).items()}
            | {name: np.int32(value) for name, value in numbers.items()}
            | {"right_rows": padded_rows}
        )

    return Examples(len(rows), make, group=GROUP)


def without_span(store: PassageStore, evidence: Evidence, span: int) -> NDArray:
    """Return the tokens of a span's sentence without the span, or all of them if too few would remain.

    Args:
        store: the corpus.
        evidence: has the spans.
        span: number of the span in it.
    """
    spans = evidence.spans
    row = int(spans.rows[span])
    start, end = store.sentences(row)[spans.sentences[span]]
    sentence = store.body_tokens(row)[start:end]
    shown = pieces_without(sentence, spans.starts[span] - start, spans.ends[span] - start)
    return shown if len(shown) >= MINIMUM_SENTENCE else sentence


def grouped_rows(task: Task, embed: EmbedCorpus, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return rows in groups of GROUP, one group after another: as many as all steps of the task need, if possible.

    A file of the task stores the groups, so that a resumed run has the same.

    Args:
        task: whose passages are grouped.
        embed: embeds the corpus, [rows, width].
        rows: rows that may be in a group, int [n].

    Raises:
        UserError: there are too few documents for a group.
    """

    def make_groups() -> list[list[int]]:
        store, required = task.run.sources.passages, task.settings.steps * task.settings.batch_size // GROUP
        allowed = np.isin(np.arange(len(store)), rows)
        documents = [store.document_id(row) for row in range(len(store))]
        rng = np.random.default_rng((task.run.config.seed, task.stream))
        groups = group_neighbors(embed(), documents, allowed, required, rng)
        if not len(groups):
            raise UserError(
                f"{store.folder}: {task.name} needs {GROUP} documents to learn from; leave it out of config.tasks"
            )
        logger.info("made %d of %d groups of %d similar passages", len(groups), required, GROUP)
        return groups.tolist()

    return np.array(load_or_create(task, GROUPS_FILE, "groups", make_groups), np.int64).reshape(-1)


def group_neighbors(
    vectors: NDArray[np.floating], documents: Sequence[str], allowed: NDArray[np.bool_], max_groups: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:  # fmt: skip
    """Group rows with their nearest neighbors; no row is in two groups, and no document twice in one.

    Groups end when the rows that remain have too few documents.

    Args:
        vectors: vectors of all rows, [rows, width]; neighbors have large inner products.
        documents: document of each row.
        allowed: True for rows that may be in a group, bool [rows].
        max_groups: number of groups at most.
        rng: draws the first row of each group.

    Returns:
        Rows, [groups, GROUP].
    """
    free, seeds = allowed.copy(), rng.permutation(np.flatnonzero(allowed))
    owners = number_names(documents)
    groups: list[NDArray[np.int64]] = []
    for start in range(0, len(seeds), SEEDS):
        if len(groups) == max_groups:
            break
        seed_scores = vectors[seeds[start : start + SEEDS]] @ vectors.T  # [SEEDS, rows]
        for seed, scores in zip(seeds[start : start + SEEDS], seed_scores, strict=True):
            if len(groups) == max_groups:
                break
            if not free[seed]:
                continue
            # The free rows of largest score, each the best of its document.
            rows = np.flatnonzero(free & (owners != owners[seed]))
            rows = rows[np.argsort(-scores[rows], kind="stable")]
            _, first = np.unique(owners[rows], return_index=True)
            others = rows[np.sort(first)][: GROUP - 1]
            if len(others) == GROUP - 1:
                groups.append(np.concatenate([[seed], others]))
                free[groups[-1]] = False
    return np.array(groups, np.int64).reshape(-1, GROUP)


def number_names(names: Iterable[str]) -> NDArray[np.int64]:
    """Return a number for each name, equal ones for equal names, in order of first occurrence: int64 [names]."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
