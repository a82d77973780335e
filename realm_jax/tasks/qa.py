"""Fine-tuning: questions with answers, read in the passages that the retriever finds for them.

Three objectives (`qa.objective`): 'marginal', the paper's −log Σ_z p(z|x) p(y|z,x); 'orqa', L_ret + L_read of the
released code; 'positive', L_ret, and L_read of one passage a question that holds its answer. Read `qa_loss`; which
answers and passages questions are trained with is `qa_examples.py`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from realm_jax.data.examples import Examples
from realm_jax.data.questions import answered
from realm_jax.data.tokenizer import Tokenizer, id_dtype
from realm_jax.errors import UserError
from realm_jax.flops import embedding_flops, reader_of, score_flops
from realm_jax.forward import (
    Batch,
    Index,
    PackingSpec,
    StaticContext,
    bm25_list_length,
    dropout_keys,
    gather_passages,
    read_question,
    read_spans,
    reader_query,
    retrieve_and_rerank,
)
from realm_jax.models import likelihood
from realm_jax.models.inputs import ReaderInput, has_answer_span, token_mask
from realm_jax.models.likelihood import Mean
from realm_jax.models.realm import Params, Realm
from realm_jax.run import Run
from realm_jax.schema import require
from realm_jax.sections import QaConfig, joint_length, task_names
from realm_jax.tasks.base import (
    Embed,
    Means,
    Monitor,
    Shapes,
    Short,
    Task,
    batch_mean,
    evaluation_questions,
    question_shapes,
)
from realm_jax.tasks.collapse import CollapseMonitor
from realm_jax.tasks.packed import SAMPLED, PlaceCounter, PlacesMonitor, TextLengths
from realm_jax.tasks.qa_examples import fine_tuning_examples

Array = jax.Array
BEAM_PART = 64  # passages of a beam that are looked through at a time


class Qa(Task):
    """The reader learns, and with a search of vectors the query tower, and with `qa.refresh_every` both towers."""

    name = "qa"
    stream = 4
    title = "Fine-tuning"
    section = QaConfig(160_000, 16, learning_rate=1e-5)
    settings: QaConfig
    short = Short(40, 2e-5 / 1.5e-4)
    retrieves = True
    learns_to_answer = True
    selects_by = "exact_match"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        qa, rows = self.settings, run.context.rows
        self.trained = (*trained_towers(qa, run.context.model), "reader")
        self.refresh_every = qa.refresh_every
        self.evaluate_every = run.config.evaluation.every
        self.eval_search = qa.search
        self.bm25_depth = bm25_list_length(qa.search, qa.depth(rows), rows)

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        qa = config.qa
        trains_tower = cls.name in task_names(config) and qa.search != "bm25"
        require(
            not (trains_tower and config.model.shared_tower and qa.refresh_every == 0),
            "model.shared_tower",
            "cannot be fine-tuned while the document tower stays as it is; set qa.refresh_every, or leave qa out of "
            "tasks",
        )
        if qa.refresh_every:
            trained = qa.objective != "positive"
            require(trained, "qa.refresh_every", "qa.objective=positive trains no document tower; set it to 0")
            unsearched = "trains vectors that qa.search=bm25 does not search; set it to 0"
            require(qa.search != "bm25", "qa.refresh_every", unsearched)
        fits = qa.objective == "marginal" or qa.beam >= qa.passages
        require(fits, "qa.beam", "must be at least qa.passages")

    @classmethod
    def supervision(cls, config: ConfigDict) -> str:
        if config.qa.objective == "positive":
            return (
                "Questions with answer strings, each read beside one passage that holds an answer: of its gold "
                "document where that is known, else the first that was retrieved."
            )
        return "Questions with answer strings. Nobody says which passage holds the answer."

    def check_data(self) -> None:
        config, sources = self.run.config, self.run.sources
        if self.evaluate_every and not answered(evaluation_questions(sources)):
            raise UserError(
                "config.evaluation.every: goes by exact match, but no development question that is measured has "
                f"answers in {config.data.path}; set it to 0"
            )

    @property
    def keeps_best(self) -> bool:
        return super().keeps_best or self.evaluate_every > 0

    @property
    def is_positive(self) -> bool:
        """Whether the reader is given one passage a question, which comes with the batch."""
        return self.settings.objective == "positive"

    def examples(self, params: Params, embed: Embed) -> Examples:
        return fine_tuning_examples(self, params, embed)

    def array_shapes(self) -> Shapes:
        found = question_shapes(self.run, self.bm25_depth)
        if not self.is_positive:
            return found
        joint, ids = joint_length(self.run.config), id_dtype(self.run.model.reader.bert.vocabulary_size)
        return found | {
            "joint": ((joint,), ids),
            "joint_length": ((), np.int32),
            "body_start": ((), np.int32),
        }

    def packed_places(self) -> PackingSpec | None:
        """With one passage a question batches are of questions of like length, and stay padded."""
        run, qa, asked = self.run, self.settings, self.run.sources.answered("train")
        if self.is_positive or not asked:
            return None
        chosen = np.random.default_rng(run.config.seed).integers(len(asked), size=SAMPLED).tolist()
        texts = [asked[number].question for number in chosen]
        question_lengths = text_lengths(run.sources.tokenizer, texts, run.lengths.query)
        lengths = TextLengths(question_lengths, question_lengths)
        count = PlaceCounter(run, self.microbatch)
        return PackingSpec(
            count.examples,
            queries=0 if qa.uses_bm25_only else count.queries(lengths),
            joints=count.joints(lengths, qa.passages, qa.titles),
            documents=count.documents(qa.passages) if qa.trains_passages else 0,
        )

    def loss(self, params: Params, batch: Batch, index: Index, key: Array | None) -> Means:
        if self.is_positive:
            return positive_qa_loss(self.settings, self.context, params, batch, index, key)
        return qa_loss(self.settings, self.packed_context, params, batch, index, key)

    def example_flops(self) -> dict[str, float]:
        """A question beside its positive passage counts as long as the longest can be; the length of batches is up to
        data."""
        config, joint = self.run.config, joint_length(self.run.config)
        reader, packed = reader_of(config), self.share_places
        spans = 2 * joint * reader.width * 2 * self.context.model.reader.span_hidden
        read = 1 if self.is_positive else config.qa.passages
        places = packed.joints / (packed.examples * read)
        parts = {"reader": 3 * read * (reader.forward(joint, packed_length=places) + spans)}
        if not self.settings.uses_bm25_only:
            asked = packed.queries / packed.examples
            queries = 3 * embedding_flops(config, config.data.query_length, packed_length=asked)
            parts |= {"search": self.context.rows * score_flops(self.run), "queries": queries}
        if self.refresh_every:
            embedded = packed.documents / (packed.examples * read)
            documents = embedding_flops(config, config.data.document_length, packed_length=embedded)
            parts["documents"] = 3 * config.qa.passages * documents
        return parts

    def monitors(self) -> list[Monitor]:
        return [CollapseMonitor().questions, PlacesMonitor()]


def trained_towers(qa: QaConfig, model: Realm) -> tuple[str, ...]:
    """Return the encoders that fine-tuning trains."""
    if qa.uses_bm25_only:
        return ()
    return model.embedder_names if qa.trains_passages else model.embedder_names[:1]


def text_lengths(tokenizer: Tokenizer, texts: Sequence[str], longest: int) -> NDArray[np.int64]:
    """Pieces of texts as queries of at most so many, specials counted: int64 [texts]."""
    counts = np.array([len(one.ids) for one in tokenizer.encode_batch(list(texts))], np.int64)
    return np.minimum(counts, longest - 2) + 2


# --- the losses -------------------------------------------------------------------------------------------------------


def qa_loss(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None
) -> Means:
    """Fine-tuning on what is retrieved: the paper's marginal over passages and spans, or ORQA's L_ret + L_read."""
    read = read_question(qa, context, params, batch, index, key, qa.depth(context.rows))
    scores, spans = read.scores, read.span_scores
    loss, log_likelihood = likelihood.answer_marginal(scores, spans, read.allowed, read.correct)
    has_answer = read.correct.any(axis=(2, 3))
    if qa.objective == "orqa":
        beam_correct = beam_has_answer(context, batch, index, read.beam.rows)
        loss = likelihood.orqa_loss(read.beam.scores, beam_correct, scores, spans, read.allowed, read.correct)
    final = read.prior[:, :, None, None] + read.spans
    answered = has_answer.any(axis=1)
    return {
        "loss": loss,
        "accuracy": batch_mean(top1_is_correct(final, read.correct)),
        "answer_in_passages": batch_mean(answered),
        "log_likelihood": Mean(jnp.where(answered, log_likelihood, 0.0).sum(), answered.sum().astype(jnp.float32)),
        "unplaced": read.unplaced,
    }


def top1_is_correct(scores: Array, correct: Array) -> Array:
    """Whether the span with the largest score of an example is correct: both [batch, …] → [batch] bool."""
    flat = scores.reshape(len(scores), -1)
    return jnp.take_along_axis(correct.reshape(flat.shape), flat.argmax(axis=1)[:, None], axis=1)[:, 0]


def positive_qa_loss(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None
) -> Means:
    """Fine-tuning with one positive passage a question, which comes with the batch.

    The reader's term is −log p(correct span) among the spans of that passage; the retriever's is ORQA's L_ret over a
    beam of the index, whose passages are not read. `joint` of the batch: ids [batch, length]; see `positive_examples`.
    """
    keys = dropout_keys(key, 2)
    joint, answers = batch_reader_input(batch), (batch["answers"], batch["answer_lengths"])
    _, spans, allowed, correct = read_spans(context, params, joint, answers, keys[1])
    terms = likelihood.reader_terms(jnp.zeros(joint.lengths.shape), spans, allowed, correct)
    right = top1_is_correct(jnp.where(allowed, spans, likelihood.NEGATIVE), correct)
    found = {"accuracy": batch_mean(right), "reader_loss": batch_mean(terms)}
    if not qa.uses_bm25_only:
        beam, _ = retrieve_and_rerank(qa, context, params, batch, index, keys[0], qa.depth(context.rows))
        hits = beam_has_answer(context, batch, index, beam.rows)
        retriever = likelihood.retriever_terms(beam.scores, hits)
        terms += retriever
        found |= {"answer_in_beam": batch_mean(hits.any(axis=1)), "retriever_loss": batch_mean(retriever)}
    return {"loss": batch_mean(terms)} | found


def batch_reader_input(batch: Batch) -> ReaderInput:
    """The joint layout that came with the batch, one passage a question: arrays [batch, 1, …]."""
    ids, lengths = batch["joint"].astype(jnp.int32)[:, None], batch["joint_length"][:, None]
    mask = token_mask(lengths, ids.shape[-1])
    _, query_lengths = reader_query(batch)
    is_passage = (jnp.arange(ids.shape[-1]) >= query_lengths[:, None, None]) & mask
    return ReaderInput(ids, is_passage.astype(jnp.int32), mask, batch["body_start"][:, None], lengths)


def beam_has_answer(context: StaticContext, batch: Batch, index: Index, rows: Array) -> Array:
    """Which passages of a beam hold an answer of their question, as spans of tokens: [batch, beam] bool.

    rows [batch, beam]. The texts of BEAM_PART passages a question are on hand at a time, however long the beam is.
    """
    count, beam = rows.shape
    parts = -(-beam // BEAM_PART)
    padded = jnp.pad(rows, ((0, 0), (0, parts * BEAM_PART - beam)))
    split = padded.reshape(count, parts, BEAM_PART).swapaxes(0, 1)
    answers = (batch["answers"], batch["answer_lengths"], context.model.reader.span_width)
    found = jax.lax.map(lambda part: has_answer_span(gather_passages(index, part), *answers), split)
    return found.swapaxes(0, 1).reshape(count, -1)[:, :beam]
