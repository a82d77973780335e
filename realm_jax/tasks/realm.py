"""REALM: masked sentences whose passages are retrieved, −log Σ_z p(z|x) p(y|z,x) (Guu et al. 2020, section 3.3).

Read `realm_loss`, then `read_masked` of `realm_jax/forward.py`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.config import RealmConfig
from realm_jax.data.evidence import find_evidence
from realm_jax.data.examples import (
    Bm25Lookup,
    Example,
    Examples,
    Lengths,
    masked_arrays,
    query_arrays,
    require_passages,
    salient_rows,
    spans_of,
    with_reader_query,
)  # fmt: skip
from realm_jax.data.masking import OF_SPANS
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.forward import (
    MAX_POINTED,
    Batch,
    Candidates,
    Index,
    PackingSpec,
    StaticContext,
    bm25_list_length,
    read_masked,
    search_depth,
)
from realm_jax.models import losses
from realm_jax.models.layers import Params
from realm_jax.models.losses import WeightedSum
from realm_jax.run import Run
from realm_jax.tasks.base import (
    LOG_PERPLEXITY,
    EmbedCorpus,
    ExampleSpec,
    Metrics,
    Task,
    batch_mean,
    bm25_spec,
    masked_spec,
    query_spec,
)
from realm_jax.tasks.packed import SAMPLED, PackingEstimator, TextLengths

logger = logging.getLogger(__name__)

Array = jax.Array


class RealmTask(Task):
    """Train retriever and reader together, while the index follows the passage encoder."""

    name = "realm"
    stream = 3
    settings: RealmConfig
    retrieves = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        encoders = run.context.model.embedder_names
        self.refresh_every = run.config.refresh.every
        self.frozen_passages = self.refresh_every == 0  # passages keep the vectors of the index
        self.trained = encoders[:1] if self.frozen_passages else encoders
        self.trained += ("reader",) if self.settings.reads else ()

    def examples(self, params: Params, embed: EmbedCorpus) -> Examples:
        run, sources = self.run, self.run.sources
        return MaskedSentences(
            sources.pretraining, sources.tokenizer, run.lengths, self.settings.masking, sources.pretraining_is_corpus,
            run.bm25_for_masked_sentence, run.training_rows(sources.pretraining), self.settings.uses_span_marginal,
        ).examples()  # fmt: skip

    def example_spec(self) -> ExampleSpec:
        realm, rows = self.settings, self.run.context.rows
        query = query_spec(self.run)
        if realm.uses_span_marginal:
            query |= query_spec(self.run, "reader_query")
        masked = masked_spec(self.run, query)
        sentence: ExampleSpec = {
            "sentence": masked["query"],
            "sentence_length": ((), np.int32),
            "own_row": ((), np.int32),
        }
        return masked | sentence | bm25_spec(bm25_list_length(realm.search, search_depth(realm, rows), rows))

    def loss(self, params: Params, batch: Batch, index: Index, key: Array | None) -> Metrics:
        return realm_loss(self.settings, self.context, params, batch, index, key, self.frozen_passages)

    def packing(self) -> PackingSpec:
        """Return the token slots for a sample of sentences.

        They have a salient span, if there are any: sentences of other kinds of masking are as long or shorter.
        """
        run, realm, sources = self.run, self.settings, self.run.sources
        masking = "salient" if len(salient_rows(sources.pretraining, run.lengths.query - 2)) else "uniform"
        examples = MaskedSentences(
            sources.pretraining, sources.tokenizer, run.lengths, masking, sources.pretraining_is_corpus,
            separate_reader_query=realm.uses_span_marginal,
        ).examples()  # fmt: skip
        rng = np.random.default_rng(run.config.seed)
        sample = [examples.make(number, rng) for number in rng.integers(examples.total, size=SAMPLED).tolist()]
        read = "reader_query_length" if realm.uses_span_marginal else "query_length"
        lengths = TextLengths(
            np.array([example["query_length"] for example in sample], np.int64),
            np.array([example[read] for example in sample], np.int64),
        )
        estimator = PackingEstimator(run, realm.batch_size // self.num_microbatches)
        candidates = realm.candidates - 1
        candidates_read = min(MAX_POINTED, candidates) if realm.uses_span_marginal else candidates
        return PackingSpec(
            estimator.examples,
            queries=estimator.queries(lengths),
            null_inputs=0 if realm.uses_span_marginal else estimator.null_inputs(lengths),
            reader_inputs=(
                estimator.reader_inputs(lengths, candidates_read, titles=realm.uses_span_marginal) if realm.reads else 0
            ),
            passages=0 if self.frozen_passages else estimator.documents(candidates),
        )


def realm_loss(
    realm: RealmConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None,
    frozen_passages: bool,
) -> Metrics:  # fmt: skip
    """Return −log Σ_z p(z|x) p(y|z,x) over the null document and the retrieved candidates, and the other metrics.

    Args:
        realm: settings of REALM.
        context: static arguments of the step.
        params: all parameters.
        batch: arrays of `MaskedSentences`, [batch, …].
        index: the corpus.
        key: random key for dropout; None for none.
        frozen_passages: True if candidates are scored by the vectors of the index, False if they are embedded again.

    Returns:
        The metrics of `realm_metrics`, and `unplaced`: `MaskedReading.truncated_fraction`.
    """
    read = read_masked(realm, context, params, batch, index, key, frozen_passages)
    result = losses.masked_word_marginal(read.scores, read.log_p, batch["weights"], read.valid, realm.marginal)
    return realm_metrics(result, read.is_top1, batch, read.candidates) | {"unplaced": read.truncated_fraction}


def realm_metrics(result: losses.Marginal, is_top1: Array, batch: Batch, candidates: Candidates) -> Metrics:
    """Return the metrics of a REALM step: means over the examples of the batch, or over its masked tokens.

    Args:
        result: the marginal likelihood of the batch.
        is_top1: True if no token is more probable than the masked one, bool [batch, 1 + k, m].
        batch: has `weights` [batch, m].
        candidates: the retrieved passages.

    Returns:
        loss: the loss that is minimized.
        log_perplexity: −log p(y|x) of a masked token.
        accuracy: masked tokens that the reader gets right with the candidate of largest p(z|x).
        retrieval_utility: log p(y|x) − log p(y|null, x), in nats.
        useful_candidates: examples whose best candidate beats the null document by more than a tenth of a nat.
        best_candidate_gain: log p(y|z, x) of the best candidate − log p(y|null, x), in nats.
        null_probability: p(null|x).
        prior_entropy: entropy of p(z|x), in nats.
        excluded: retrieved passages that were dropped because the example comes from them.
    """
    prior = jnp.exp(result.log_prior)  # [batch, 1 + k]
    weights = batch["weights"].astype(jnp.float32)  # [batch, m]
    top_candidate = result.log_prior.argmax(axis=1)  # [batch]
    correct = jnp.take_along_axis(is_top1, top_candidate[:, None, None], axis=1)[:, 0] * weights  # [batch, m]
    gain = result.best_log_likelihood - result.null_log_likelihood  # [batch]
    return {
        "loss": result.loss,
        LOG_PERPLEXITY: WeightedSum(-result.log_likelihood.sum(), weights.sum()),
        "accuracy": WeightedSum(correct.sum(), weights.sum()),
        "retrieval_utility": batch_mean(result.log_likelihood - result.null_log_likelihood),
        "useful_candidates": batch_mean(gain > 0.1),
        "best_candidate_gain": batch_mean(gain),
        "null_probability": batch_mean(prior[:, 0]),
        "prior_entropy": batch_mean(-jnp.sum(prior * result.log_prior, axis=1)),
        "excluded": batch_mean(candidates.excluded),
    }


# --- Examples ---------------------------------------------------------------------------------------------------------


@dataclass
class MaskedSentences:
    """REALM's queries: one masked sentence per passage and epoch.

    If spans are hidden, the sentence is that of a span chosen uniformly over those of the passage, as in the released
    code; otherwise it is any sentence.

    Attributes:
        store: the pre-training text.
        tokenizer: its tokenizer.
        lengths: sizes of the arrays.
        masking: kind of masking, as in `masking.mask`.
        pretraining_is_corpus: True if `store` is the corpus, so that `own_row` is the passage that may not be
            retrieved; otherwise it is −1.
        bm25_lookup: returns BM25's list for the words that are not hidden; None if examples have no list.
        training_rows: True for rows that may be trained on, bool [rows]; None for all.
        separate_reader_query: True if the retriever's query is the sentence without the hidden tokens, and only the
            reader gets the masked sentence.
        rows: rows with tokens to hide, in the order of the examples, int64 [examples].

    Raises:
        UserError: there are no such rows.
    """

    store: PassageStore
    tokenizer: Tokenizer
    lengths: Lengths
    masking: str
    pretraining_is_corpus: bool
    bm25_lookup: Bm25Lookup | None = None
    training_rows: NDArray[np.bool_] | None = None
    separate_reader_query: bool = False

    def __post_init__(self) -> None:
        store, training_rows, hidden = self.store, self.training_rows, "a salient span"
        if self.masking == "evidence":
            hidden += " that another passage is evidence for"
            evidence = find_evidence(store, *self.lengths.hidden)
            self._evidence = (evidence if training_rows is None else evidence.among(training_rows)).spans
            rows = np.unique(self._evidence.rows)
            logger.info("%d spans of %d passages have evidence in another passage", len(self._evidence.rows), len(rows))
        elif self.masking == "salient":
            rows = salient_rows(store, self.lengths.query - 2)
        else:
            rows = np.flatnonzero(store.counts("sentences"))
        self.rows = rows if training_rows is None else rows[training_rows[rows]]
        require_passages(len(self.rows), store, hidden, "learning from masked sentences", training_rows)

    def examples(self) -> Examples:
        """Return one example per row."""
        return Examples(len(self.rows), self.make)

    def make(self, index: int, rng: np.random.Generator) -> Example:
        """Return the arrays of an example.

        Args:
            index: position in `rows`.
            rng: draws the sentence and its mask.
        """
        row, query_length, max_tokens = int(self.rows[index]), self.lengths.query, self.lengths.query - 2

        # If spans are hidden, sentences are drawn by their number of spans that fit into a query; otherwise uniformly.
        numbers, sentences = self.sentences(row)
        hides_spans = self.masking in OF_SPANS
        weights = [(spans[:, 1] <= max_tokens).sum() if hides_spans else 1 for _, spans in sentences]
        share = np.array(weights, np.float64)
        chosen = rng.choice(len(sentences), p=share / share.sum())
        number, (sentence, spans) = int(numbers[chosen]), sentences[chosen]

        arrays = masked_arrays(sentence, spans, self.masking, rng, self.lengths, self.tokenizer)
        unmasked = np.zeros(query_length, self.tokenizer.dtype)  # [query_length], without [CLS] and [SEP]
        unmasked[: min(len(sentence), query_length)] = sentence[:query_length]
        arrays |= {"sentence": unmasked, "sentence_length": np.int32(min(len(sentence), query_length))}
        if self.separate_reader_query:
            shown = without_hidden(sentence, hidden_positions(arrays), self.tokenizer)
            arrays = with_reader_query(arrays) | query_arrays(shown, query_length, self.tokenizer)
        own_row = row if self.pretraining_is_corpus else -1
        arrays |= {"own_row": np.int32(own_row)}
        if self.bm25_lookup is None:
            return arrays
        hidden = arrays["positions"][arrays["weights"] > 0] - 1
        return arrays | self.bm25_lookup(unmasked_text(self.store, self.tokenizer, row, number, hidden), own_row)

    def sentences(self, row: int) -> tuple[Sequence[int], list[tuple[NDArray, NDArray]]]:
        """Return the sentences of a row that have tokens to hide.

        Returns:
            Their numbers in the row, and for each its tokens and the spans that may be hidden, relative to it [m, 2].
        """
        store = self.store
        if self.masking == "evidence":
            numbers = np.unique(self._evidence.of_row(row).sentences).tolist()
            return numbers, [
                (spans_of(store, row, number)[0], self._evidence.of_sentence(store, row, number)) for number in numbers
            ]
        if self.masking == "salient":  # as `salient_sentences`, without a list of all
            starts, spans = store.sentences(row)[:, 0], store.spans(row)
            owners = np.searchsorted(starts, spans[:, 0], side="right") - 1  # sentence of each span
            numbers = np.unique(owners[spans[:, 1] - starts[owners] <= self.lengths.query - 2]).tolist()
        else:
            numbers = list(range(len(store.sentences(row))))
        return numbers, [spans_of(store, row, number) for number in numbers]


def hidden_positions(arrays: Example) -> NDArray[np.int64]:
    """Return the positions in a sentence of the tokens that are hidden or predicted, sorted."""
    count = min(int(arrays["sentence_length"]), len(arrays["query"]) - 2)
    changed = np.flatnonzero(arrays["query"][1 : 1 + count] != arrays["sentence"][:count])
    return np.union1d(changed, arrays["positions"][arrays["weights"] > 0] - 1)


def without_hidden(sentence: NDArray, hidden: NDArray[np.int64], tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return the tokens of a sentence without the hidden ones; if all are hidden, as many [MASK].

    Args:
        sentence: tokens, [n] int.
        hidden: positions of the hidden tokens.
        tokenizer: has the id of [MASK].
    """
    shown = np.delete(sentence, hidden).astype(np.int32)
    return shown if len(shown) else np.full(len(sentence), tokenizer.mask_id, np.int32)


def unmasked_text(store: PassageStore, tokenizer: Tokenizer, row: int, number: int, hidden: NDArray) -> str:
    """Return the text of a sentence with spaces instead of its hidden tokens.

    Args:
        store: the text.
        tokenizer: its tokenizer.
        row: the passage.
        number: number of the sentence in the row.
        hidden: positions of the tokens in the sentence.
    """
    text, body, (start, end) = store.text(row), store.body_tokens(row), store.sentences(row)[number]
    offsets = tokenizer.offsets_of(text, body)
    if offsets is None:  # the passage was cut within a word
        return tokenizer.decode(np.delete(body[start:end], hidden).tolist())
    letters = list(text)
    for first, last in offsets[start:end][hidden].tolist():
        letters[first:last] = " " * (last - first)
    return "".join(letters[offsets[start, 0] : offsets[end - 1, 1]])
