"""REALM: masked sentences whose passages are retrieved, −log Σ_z p(z|x) p(y|z,x) (Guu et al. 2020, section 3.3).

Read `realm_loss`, then what it is given: `realm_jax/forward.py`.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from realm_jax.data.evidence import EvidenceSpans, find_evidence
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
from realm_jax.errors import UserError
from realm_jax.flops import embedding_flops, reader_of, score_flops, word_flops
from realm_jax.forward import (
    POINTED,
    Batch,
    Candidates,
    Index,
    PackingSpec,
    StaticContext,
    bm25_list_length,
    read_masked,
    search_depth,
)
from realm_jax.models import likelihood
from realm_jax.models.likelihood import Mean
from realm_jax.models.realm import Params
from realm_jax.run import Run
from realm_jax.schema import require
from realm_jax.sections import RealmConfig, joint_length, task_names
from realm_jax.tasks.base import (
    LOG_PERPLEXITY,
    Embed,
    Means,
    Monitor,
    Shapes,
    Short,
    Task,
    batch_mean,
    bm25_shapes,
    masked_shapes,
    query_shapes,
)
from realm_jax.tasks.collapse import CollapseMonitor
from realm_jax.tasks.packed import SAMPLED, PlaceCounter, PlacesMonitor, TextLengths

logger = logging.getLogger(__name__)

Array = jax.Array


class RealmTask(Task):
    """Retriever and reader learn together, while the index follows the document tower."""

    name = "realm"
    stream = 3
    title = "REALM"
    section = RealmConfig(200_000, 512, learning_rate=3e-5)
    settings: RealmConfig
    short = Short(20, 1e-5 / 5e-5)
    retrieves = True
    inspects_sentences = True
    follows_builder = True
    host_search = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        towers, rows = run.context.model.embedder_names, run.context.rows
        self.refresh_every = run.config.refresh.every
        self.frozen_passages = self.refresh_every == 0  # the passages keep the vectors of the index
        self.trained = (*(towers[:1] if self.frozen_passages else towers), "reader")
        self.retriever_delay = self.settings.retriever_start
        self.bm25_depth = bm25_list_length(self.settings.search, search_depth(self.settings, rows), rows)

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        if cls.name not in task_names(config) or config.refresh.every:
            return
        inline, on_devices = config.refresh.mode == "inline", config.retrieval.backend == "device"
        require(inline, "refresh.every", "0 leaves a builder nothing to do; set refresh.mode=inline")
        require(on_devices, "refresh.every", "0 takes vectors from the devices; set retrieval.backend=device")
        apart = not config.model.shared_tower
        require(apart, "refresh.every", "0 trains the query tower alone; set model.shared_tower=False")

    @classmethod
    def supervision(cls, config: ConfigDict) -> str:
        return (
            "Names and dates hidden in the pre-training text. Nobody says which passage helps: the retriever learns "
            "from how well the reader fills the gap."
        )

    @classmethod
    def teaches_pointing(cls, config: ConfigDict) -> bool:
        return bool(config.realm.marginal == "span")

    @classmethod
    def learns_from_evidence(cls, config: ConfigDict) -> bool:
        return bool(config.realm.masking == "evidence")

    @property
    def searches(self) -> set[str]:
        return {self.question_search, self.settings.search}

    def check_data(self) -> None:
        if self.settings.masking == "evidence" and not self.run.sources.pretraining_is_corpus:
            raise UserError(
                "config.realm.masking: 'evidence' looks for it among the passages that sentences stand in, but "
                f"{self.run.config.data.path} has other pre-training text; set config.data.text=passages"
            )

    def examples(self, params: Params, embed: Embed) -> Examples:
        return self.masked_examples(self.settings.masking, self.run.training_rows(self.run.sources.pretraining))

    def packed_places(self) -> PackingSpec:
        """Sentences with a name say how long texts are, which are as long as those that other kinds of masking take, or
        longer."""
        run, realm, sources = self.run, self.settings, self.run.sources
        kind = "salient" if len(salient_rows(sources.pretraining, run.lengths.query - 2)) else "uniform"
        examples = masked_examples(
            sources.pretraining, sources.tokenizer, run.lengths, kind, sources.pretraining_is_corpus,
            leave_out=realm.uses_span_marginal,
        )  # fmt: skip
        text = "reader_query_length" if realm.uses_span_marginal else "query_length"
        rng = np.random.default_rng(run.config.seed)
        numbers = rng.integers(examples.total, size=SAMPLED).tolist()
        made = [examples.make(number, rng) for number in numbers]
        lengths = TextLengths(*(np.array([one[name] for one in made], np.int64) for name in ("query_length", text)))
        count, candidates = PlaceCounter(run, self.microbatch), realm.candidates - 1
        read_with = min(POINTED, candidates) if realm.uses_span_marginal else candidates
        return PackingSpec(
            count.examples,
            queries=count.queries(lengths),
            nulls=0 if realm.uses_span_marginal else count.nulls(lengths),
            joints=count.joints(lengths, read_with, titles=realm.uses_span_marginal),
            documents=0 if self.frozen_passages else count.documents(candidates),
        )

    def masked_examples(self, masking: str, kept: NDArray[np.bool_] | None = None) -> Examples:
        """Its examples with any masking; kept: as of the function of this name."""
        run, sources = self.run, self.run.sources
        return masked_examples(
            sources.pretraining, sources.tokenizer, run.lengths, masking, sources.pretraining_is_corpus,
            run.bm25_for_masked_sentence, kept, self.settings.uses_span_marginal,
        )  # fmt: skip

    def array_shapes(self) -> Shapes:
        query = query_shapes(self.run)
        if self.settings.uses_span_marginal:
            query |= query_shapes(self.run, "reader_query")
        masked = masked_shapes(self.run, query)
        sentence: Shapes = {"sentence": masked["query"], "sentence_length": ((), np.int32)}
        own: Shapes = {"own_row": ((), np.int32)}
        return masked | sentence | own | bm25_shapes(self.bm25_depth)

    def loss(self, params: Params, batch: Batch, index: Index, key: Array | None) -> Means:
        return realm_loss(self.settings, self.packed_context, params, batch, index, key, self.frozen_passages)

    def example_flops(self) -> dict[str, float]:
        realm, config, reader = self.settings, self.run.config, reader_of(self.run.config)
        candidates = realm.candidates - 1
        data, predictions = config.data, self.run.lengths.predictions
        packed = self.share_places
        read = min(POINTED, candidates) if realm.uses_span_marginal else candidates
        padded = embedding_flops(config, data.query_length)  # as hosts embed it
        query = embedding_flops(config, data.query_length, packed_length=packed.queries / packed.examples)
        embedded = packed.documents / (packed.examples * candidates)
        document = embedding_flops(config, data.document_length, packed_length=embedded)
        asked = None if realm.uses_span_marginal else predictions
        reading = read * reader.forward(joint_length(config), asked, packed.joints / (packed.examples * read))
        if not realm.uses_span_marginal:
            reading += reader.forward(data.query_length + 1, predictions, packed.nulls / packed.examples)
            reading += realm.candidates * word_flops(self.run)
        compared = 0 if realm.search == "bm25" else self.context.rows
        on_hosts = config.retrieval.backend == "scann"
        return {
            "search": padded if on_hosts else query + compared * score_flops(self.run),
            "queries": 3 * query,
            "documents": 0.0 if self.frozen_passages else 3 * candidates * document,
            "reader": 3 * reading,
        }

    def monitors(self) -> list[Monitor]:
        return [CollapseMonitor().masked, PlacesMonitor()]


def realm_loss(
    realm: RealmConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None,
    frozen_passages: bool,
) -> Means:  # fmt: skip
    """Return −log Σ_z p(z|x) p(y|z,x) over the null document and the retrieved candidates, and what is reported."""
    read = read_masked(realm, context, params, batch, index, key, frozen_passages)
    result = likelihood.masked_word_marginal(read.scores, read.log_p, batch["weights"], read.valid, realm.marginal)
    return realm_metrics(result, read.is_top1, batch, read.candidates) | {"unplaced": read.unplaced}


def realm_metrics(result: likelihood.Marginal, is_top1: Array, batch: Batch, candidates: Candidates) -> Means:
    """What a REALM step reports; means over the examples of the batch.

    retrieval_utility: log p(y|x) − log p(y|null, x), nats. useful_candidates: share of examples whose best candidate
    beats the null document by more than a tenth of a nat. accuracy: pieces that the reader gets right beside the
    candidate of largest p(z|x). best_candidate_gain: log p(y|z, x) of the best candidate − log p(y|null, x), nats.
    null_probability: p(null|x). prior_entropy: of p(z|x), nats. excluded: own passages dropped, per example.
    `realm_loss` adds `unplaced` (see `MaskedReading`).
    """
    prior = jnp.exp(result.log_prior)
    weights = batch["weights"].astype(jnp.float32)
    likeliest = result.log_prior.argmax(axis=1)
    right = jnp.take_along_axis(is_top1, likeliest[:, None, None], axis=1)[:, 0] * weights  # [batch, m]
    gain = result.best_log_likelihood - result.null_log_likelihood
    return {
        "loss": result.loss,
        LOG_PERPLEXITY: Mean(-result.log_likelihood.sum(), weights.sum()),
        "accuracy": Mean(right.sum(), weights.sum()),
        "retrieval_utility": batch_mean(result.log_likelihood - result.null_log_likelihood),
        "useful_candidates": batch_mean(gain > 0.1),
        "best_candidate_gain": batch_mean(gain),
        "null_probability": batch_mean(prior[:, 0]),
        "prior_entropy": batch_mean(-jnp.sum(prior * result.log_prior, axis=1)),
        "excluded": batch_mean(candidates.excluded),
    }


# --- examples ---------------------------------------------------------------------------------------------------------


def masked_examples(
    store: PassageStore,
    tokenizer: Tokenizer,
    lengths: Lengths,
    kind: str,
    pretraining_is_corpus: bool,
    find: Bm25Lookup | None = None,
    kept: NDArray[np.bool_] | None = None,
    leave_out: bool = False,
) -> Examples:
    """REALM's queries: one masked sentence a passage and pass, spans chosen as `mask(kind, …)` does.

    pretraining_is_corpus: the rows are the corpus's own, so that `own_row` names the passage that may not be retrieved
    (else −1).
    The sentence is that of a span chosen uniformly over those of the passage, as in the reference, where spans are
    hidden; else any. find: the list of BM25 for the words that are left, where that comes with an example. kept: rows
    that may be trained on, bool [rows]; None for all. leave_out: the retriever asks with the sentence without what is
    hidden, and the masked sentence is the reader's alone.
    """
    room = lengths.query - 2
    rows, sentences_of = _maskable(store, lengths, kind, kept)
    rows = rows if kept is None else rows[kept[rows]]
    what = "a salient span that another passage is evidence for" if kind == "evidence" else "a salient span"
    require_passages(len(rows), store, what, "learning from masked sentences", kept)

    def make(index: int, rng: np.random.Generator) -> Example:
        row = int(rows[index])
        numbers, parts = sentences_of(row)
        # A sentence is drawn as often as it has spans within reach, where these are hidden; else all alike.
        share = np.array([(spans[:, 1] <= room).sum() if kind in OF_SPANS else 1 for _, spans in parts], np.float64)
        chosen = rng.choice(len(parts), p=share / share.sum())
        sentence, spans = parts[chosen]
        arrays = masked_arrays(sentence, spans, kind, rng, lengths, tokenizer)
        text = np.zeros(lengths.query, tokenizer.dtype)
        text[: min(len(sentence), lengths.query)] = sentence[: lengths.query]
        arrays |= {"sentence": text, "sentence_length": np.int32(min(len(sentence), lengths.query))}
        number = int(numbers[chosen])
        if leave_out:
            arrays = with_reader_query(arrays) | query_arrays(
                without_hidden(sentence, hidden_places(arrays), tokenizer), lengths.query, tokenizer
            )
        own_row = row if pretraining_is_corpus else -1
        arrays |= {"own_row": np.int32(own_row)}
        if find is None:
            return arrays
        hidden = arrays["positions"][arrays["weights"] > 0] - 1
        return arrays | find(unmasked_text(store, tokenizer, row, number, hidden), own_row)

    return Examples(len(rows), make)


def hidden_places(arrays: Example) -> NDArray[np.int64]:
    """The pieces of a masked sentence that are hidden, or predicted as they stand: their places in the sentence."""
    count = min(int(arrays["sentence_length"]), len(arrays["query"]) - 2)
    changed = np.flatnonzero(arrays["query"][1 : 1 + count] != arrays["sentence"][:count])
    return np.union1d(changed, arrays["positions"][arrays["weights"] > 0] - 1)


def without_hidden(sentence: NDArray, hidden: NDArray[np.int64], tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return the tokens of a sentence without those at the places `hidden`; if all are hidden, as many [MASK]."""
    shown = np.delete(sentence, hidden).astype(np.int32)
    return shown if len(shown) else np.full(len(sentence), tokenizer.mask_id, np.int32)


def unmasked_text(store: PassageStore, tokenizer: Tokenizer, row: int, number: int, hidden: NDArray) -> str:
    """The text of a sentence with spaces in place of its hidden pieces. hidden: their places in the sentence."""
    text, body, (start, end) = store.text(row), store.body_tokens(row), store.sentences(row)[number]
    offsets = tokenizer.offsets_of(text, body)
    if offsets is None:  # the passage was cut within a word
        return tokenizer.decode(np.delete(body[start:end], hidden).tolist())
    letters = list(text)
    for first, last in offsets[start:end][hidden].tolist():
        letters[first:last] = " " * (last - first)
    return "".join(letters[offsets[start, 0] : offsets[end - 1, 1]])


# Numbers of sentences in their row, and the tokens of each with its spans that may be hidden, relative to it.
Sentences = tuple[Sequence[int] | NDArray[np.int64], list[tuple[NDArray, NDArray]]]


def _maskable(
    store: PassageStore, lengths: Lengths, kind: str, kept: NDArray[np.bool_] | None
) -> tuple[NDArray[np.int64], Callable[[int], Sentences]]:
    """Rows with something to hide, and what finds the sentences of a row, with what may be hidden in each. kept: rows
    that may be evidence, None for all."""
    room = lengths.query - 2
    if kind == "evidence":
        evidence = find_evidence(store, *lengths.hidden)
        found = (evidence if kept is None else evidence.among(kept)).spans
        logger.info("%d spans of %d passages have evidence elsewhere", len(found.rows), len(np.unique(found.rows)))
        return np.unique(found.rows), partial(_evidence_sentences, store, found)

    def sentences_of(row: int) -> Sentences:
        numbers = _salient_numbers(store, row, room) if kind == "salient" else range(len(store.sentences(row)))
        return numbers, [spans_of(store, row, int(number)) for number in numbers]

    if kind == "salient":
        return salient_rows(store, room), sentences_of
    return np.flatnonzero(store.counts("sentences")), sentences_of


def _evidence_sentences(store: PassageStore, found: EvidenceSpans, row: int) -> Sentences:
    numbers = np.unique(found.of_row(row).sentences).tolist()
    return numbers, [(spans_of(store, row, one)[0], found.of_sentence(store, row, one)) for one in numbers]


def _salient_numbers(store: PassageStore, row: int, room: int) -> NDArray[np.int64]:
    """`salient_sentences` of one row, without a list of all: numbers, int64 [n]."""
    sentences, spans = store.sentences(row), store.spans(row)
    owner = np.searchsorted(sentences[:, 0], spans[:, 0], side="right") - 1
    return np.unique(owner[spans[:, 1] - sentences[owner, 0] <= room])
