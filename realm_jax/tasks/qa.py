"""Fine-tuning: questions with answers, read in the passages that the retriever finds for them.

There are three objectives (`qa.objective`): 'marginal', the paper's −log Σ_z p(z|x) p(y|z,x); 'orqa', L_ret + L_read of
the released code; 'positive', L_ret, and L_read of one passage per question that has its answer. Read `qa_loss`, then
`qa_examples.py` for the answers and passages of training questions.
"""

import jax
import jax.numpy as jnp
import numpy as np

from realm_jax.config import QaConfig, joint_length
from realm_jax.data.examples import Examples
from realm_jax.data.tokenizer import id_dtype
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
from realm_jax.models import losses
from realm_jax.models.inputs import ReaderInput, has_answer_span, token_mask
from realm_jax.models.layers import Params
from realm_jax.models.losses import WeightedSum
from realm_jax.run import Run
from realm_jax.tasks.base import EmbedCorpus, ExampleSpec, Metrics, Task, batch_mean, question_spec
from realm_jax.tasks.packed import SAMPLED, PackingEstimator, TextLengths
from realm_jax.tasks.qa_examples import fine_tuning_examples

Array = jax.Array
BEAM_PART = 64  # passages of a beam whose texts are in memory at a time


class Qa(Task):
    """Train the reader; with vector search the query encoder too, and with `qa.refresh_every` both encoders."""

    name = "qa"
    stream = 4
    settings: QaConfig
    retrieves = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        encoders = run.context.model.embedder_names
        if self.settings.uses_bm25_only:
            encoders = ()
        elif not self.settings.trains_passages:
            encoders = encoders[:1]
        self.trained = (*encoders, "reader")
        self.refresh_every = self.settings.refresh_every

    @property
    def is_positive(self) -> bool:
        """Return True if the reader reads one passage per question, which comes with the batch."""
        return self.settings.objective == "positive"

    def examples(self, params: Params, embed: EmbedCorpus) -> Examples:
        return fine_tuning_examples(self, params, embed)

    def example_spec(self) -> ExampleSpec:
        qa, rows = self.settings, self.run.context.rows
        shapes = question_spec(self.run, bm25_list_length(qa.search, qa.depth(rows), rows))
        if not self.is_positive:
            return shapes
        joint, ids = joint_length(self.run.config), id_dtype(self.run.model.reader.bert.vocabulary_size)
        return shapes | {"joint": ((joint,), ids), "joint_length": ((), np.int32), "body_start": ((), np.int32)}

    def loss(self, params: Params, batch: Batch, index: Index, key: Array | None) -> Metrics:
        if self.is_positive:
            return positive_qa_loss(self.settings, self.context, params, batch, index, key)
        return qa_loss(self.settings, self.context, params, batch, index, key)

    def packing(self) -> PackingSpec | None:
        """Return the token slots for a sample of questions.

        With one passage per question the questions of a batch have similar lengths, so they stay padded.
        """
        run, qa, questions = self.run, self.settings, self.run.sources.answered("train")
        if self.is_positive or not questions:
            return None
        sample = np.random.default_rng(run.config.seed).integers(len(questions), size=SAMPLED).tolist()
        encoded = run.sources.tokenizer.encode_batch([questions[number].question for number in sample])
        token_counts = np.array([len(encoding.ids) for encoding in encoded], np.int64)
        question_lengths = np.minimum(token_counts, run.lengths.query - 2) + 2
        lengths = TextLengths(question_lengths, question_lengths)
        estimator = PackingEstimator(run, qa.batch_size // self.num_microbatches)
        return PackingSpec(
            estimator.examples,
            queries=0 if qa.uses_bm25_only else estimator.queries(lengths),
            reader_inputs=estimator.reader_inputs(lengths, qa.passages, qa.titles),
            passages=estimator.documents(qa.passages) if qa.trains_passages else 0,
        )


# --- The losses -------------------------------------------------------------------------------------------------------


def qa_loss(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None
) -> Metrics:
    """Return the paper's marginal over passages and spans, or ORQA's L_ret + L_read.

    Args:
        qa: settings of fine-tuning.
        context: static arguments of the step.
        params: all parameters.
        batch: arrays of `question_examples`, [batch, …].
        index: the corpus.
        key: random key for dropout; None for none.

    Returns:
        loss: the loss that is minimized.
        accuracy: questions whose most probable span is an answer.
        answer_in_passages: questions with an answer in a passage that is read.
        log_likelihood: log p(y|x) of these questions.
        unplaced: share of tokens that packing dropped.
    """
    read = read_question(qa, context, params, batch, index, key, qa.depth(context.rows))
    scores, spans = read.scores, read.span_scores  # [batch, k], [batch, k, start, width]
    loss, log_likelihood = losses.answer_marginal(scores, spans, read.allowed, read.correct)
    if qa.objective == "orqa":
        beam_correct = beam_has_answer(context, batch, index, read.beam.rows)
        loss = losses.orqa_loss(read.beam.scores, beam_correct, scores, spans, read.allowed, read.correct)
    log_p = read.prior[:, :, None, None] + read.spans  # log p(z|x) p(span|z,x), [batch, k, start, width]
    has_answer = read.correct.any(axis=(1, 2, 3))  # [batch]
    return {
        "loss": loss,
        "accuracy": batch_mean(top1_is_correct(log_p, read.correct)),
        "answer_in_passages": batch_mean(has_answer),
        "log_likelihood": WeightedSum(
            jnp.where(has_answer, log_likelihood, 0.0).sum(), has_answer.sum().astype(jnp.float32)
        ),
        "unplaced": read.truncated_fraction,
    }


def top1_is_correct(scores: Array, correct: Array) -> Array:
    """Return True for examples whose span of largest score is correct, bool [batch].

    Args:
        scores: scores of spans, [batch, …].
        correct: True for correct spans, bool [batch, …].
    """
    flat = scores.reshape(len(scores), -1)
    return jnp.take_along_axis(correct.reshape(flat.shape), flat.argmax(axis=1)[:, None], axis=1)[:, 0]


def positive_qa_loss(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None
) -> Metrics:
    """Return the loss of one positive passage per question, which comes with the batch.

    The reader's term is −log p(correct span) among the spans of that passage; the retriever's is ORQA's L_ret over a
    beam of the index, whose passages are not read.

    Args:
        qa: settings of fine-tuning.
        context: static arguments of the step.
        params: all parameters.
        batch: arrays of `positive_examples`, [batch, …].
        index: the corpus.
        key: random key for dropout; None for none.

    Returns:
        loss: the loss that is minimized, the sum of the next two.
        reader_loss: the reader's term.
        retriever_loss: the retriever's term, if it is trained.
        accuracy: questions whose most probable span is an answer.
        answer_in_beam: questions with an answer in a passage of the beam, if the retriever is trained.
    """
    keys = dropout_keys(key, 2)
    joint, answers = batch_reader_input(batch), (batch["answers"], batch["answer_lengths"])
    _, spans, allowed, correct = read_spans(context, params, joint, answers, keys[1])  # [batch, 1, start, width] each
    terms = losses.orqa_reader_loss(jnp.zeros(joint.lengths.shape), spans, allowed, correct)  # [batch]
    is_top1 = top1_is_correct(jnp.where(allowed, spans, losses.NEG_INF), correct)  # [batch]
    metrics = {"accuracy": batch_mean(is_top1), "reader_loss": batch_mean(terms)}
    if not qa.uses_bm25_only:
        beam, _ = retrieve_and_rerank(qa, context, params, batch, index, keys[0], qa.depth(context.rows))
        beam_correct = beam_has_answer(context, batch, index, beam.rows)  # [batch, beam]
        retriever = losses.orqa_retriever_loss(beam.scores, beam_correct)  # [batch]
        terms += retriever
        metrics |= {"answer_in_beam": batch_mean(beam_correct.any(axis=1)), "retriever_loss": batch_mean(retriever)}
    return {"loss": batch_mean(terms)} | metrics


def batch_reader_input(batch: Batch) -> ReaderInput:
    """Return the reader input of the batch, one passage per question: arrays [batch, 1, …]."""
    ids, lengths = batch["joint"].astype(jnp.int32)[:, None], batch["joint_length"][:, None]
    mask = token_mask(lengths, ids.shape[-1])
    _, query_lengths = reader_query(batch)
    is_passage = (jnp.arange(ids.shape[-1]) >= query_lengths[:, None, None]) & mask
    return ReaderInput(ids, is_passage.astype(jnp.int32), mask, batch["body_start"][:, None], lengths)


def beam_has_answer(context: StaticContext, batch: Batch, index: Index, rows: Array) -> Array:
    """Return True for passages of a beam that have an answer of their question as a span.

    The texts of BEAM_PART passages per question are in memory at a time, so memory does not depend on the beam.

    Args:
        context: static arguments of the step.
        batch: has `answers` [batch, answers, width] and `answer_lengths` [batch, answers].
        index: the corpus.
        rows: rows of the passages, [batch, beam].

    Returns:
        bool [batch, beam].
    """
    count, beam = rows.shape
    parts = -(-beam // BEAM_PART)
    padded = jnp.pad(rows, ((0, 0), (0, parts * BEAM_PART - beam)))  # [batch, parts · BEAM_PART]
    split = padded.reshape(count, parts, BEAM_PART).swapaxes(0, 1)  # [parts, batch, BEAM_PART]
    answers = (batch["answers"], batch["answer_lengths"], context.model.reader.span_width)
    has_answer = jax.lax.map(lambda part: has_answer_span(gather_passages(index, part), *answers), split)
    return has_answer.swapaxes(0, 1).reshape(count, -1)[:, :beam]
