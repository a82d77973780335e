"""Inspect a prediction: the paper's table 3 for any sentence with a blank, or for a question.

For a text x and a prediction y: p(z|x) and p(y|z,x) of every passage z that is read, the marginal p(y|x), and the
posterior p(z|x,y), which tells how far a passage explains y. Posterior minus prior is r(z), the weight of a passage's
score in the gradient of log p(y|x) (Guu et al. 2020, section 3.3). `realm_jax/cli/inspect.py` shows it.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NotRequired  # TypedDict of typing only from Python 3.12 as pydantic reads it

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from realm_jax.config import Config, QaConfig, RealmConfig, task_names
from realm_jax.data.examples import Example, query_arrays, question_arrays, with_reader_query
from realm_jax.data.questions import Question
from realm_jax.data.tokenizer import MARK
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator, answer_key
from realm_jax.forward import (
    Index,
    SearchPipeline,
    StaticContext,
    embed_searching_queries,
    gather_passages,
    masked_inputs,
    masked_spans,
    null_candidates,
    read_masked,
    read_question,
    read_targets,
    stored_scores,
)
from realm_jax.inference.answers import PassageSource, passage_source
from realm_jax.mesh import to_host
from realm_jax.mirror import url_of
from realm_jax.models.layers import Params
from realm_jax.models.losses import NEG_INF, log_prior, log_sum_selected
from realm_jax.models.question_reader import QuestionReader, ReaderText
from realm_jax.run import Run, put_batch
from realm_jax.train.trained_run import TrainedRun

ALL_SPANS = 1_000_000  # more than a passage has
GUESSING = 8  # candidates that propose answers, as in the paper; each answer is read with all candidates
_BLANK = re.compile(r"_{2,}|\[([^\[\]]+)\]")


class InspectedPassage(TypedDict):
    """A candidate z.

    Attributes:
        id: id of its document; None for the null document.
        part: number of the passage in its document, from 0.
        title: title of its document.
        text: text of the passage.
        prior: p(z|x).
        likelihood: p(y|z,x).
        posterior: p(z|x,y); None if the answer is in none of the passages.
        gain: r(z) = p(z|x,y) − p(z|x); None if there is no posterior.
    """

    id: str | None
    part: int
    title: str
    text: str
    prior: float
    likelihood: float
    posterior: float | None
    gain: float | None


class OtherAnswer(TypedDict):
    """A less probable answer.

    Attributes:
        answer: text.
        probability: p(y|x).
    """

    answer: str
    probability: float


class Inspection(TypedDict):
    """A prediction and the passages that explain it.

    Attributes:
        text: sentence or question.
        task: task of the parameters.
        step: step of the parameters.
        answer: y.
        probability: p(y|x), the marginal over the passages, whose priors sum to 1.
        alone: p(y|x) with the null document; None for a question.
        held: share of Σ exp(score) over all passages of the corpus that the listed passages have.
        others: less probable answers, the most probable first.
        passages: in the order of the prior.
        bert: p(y|x) of a reader that was trained without passages, if it was requested.
    """

    text: str
    task: str
    step: int
    answer: str
    probability: float
    alone: float | None
    held: float
    others: list[OtherAnswer]
    passages: list[InspectedPassage]
    bert: NotRequired[float]


class Masked(NamedTuple):
    """A sentence with a blank.

    Attributes:
        before: text before the blank.
        answer: words of the blank; None if they are to be predicted.
        after: text after the blank.
    """

    before: str
    answer: str | None
    after: str


def parse(text: str) -> Masked | None:
    """Parse a sentence with one blank, `___` or `[the words]`; return None without one. Raises UserError for more."""
    blanks = list(_BLANK.finditer(text))
    if not blanks:
        return None
    if len(blanks) > 1:
        raise UserError(f"the text has {len(blanks)} blanks, {blanks[0][0]!r} and {blanks[1][0]!r}; leave one")
    (blank,) = blanks
    answer = None if blank[1] is None else blank[1].strip()
    return Masked(text[: blank.start()], answer, text[blank.end() :])


def inspected_task(config: Config, is_question: bool) -> str | None:
    """Return the default task to inspect; None for the last.

    Args:
        config: config of the run.
        is_question: True for a question, False for a sentence with a blank.
    """
    return "realm" if "realm" in task_names(config) and not is_question else None


def check_has_priors(trained: TrainedRun) -> None:
    """Raise UserError for a run that does not search by vectors."""
    if trained.index.vectors is None:
        raise UserError(
            f"task {trained.task} of {url_of(trained.run.workdir)} does not search by vectors, so there is no "
            "p(z|x) to show; choose another task"
        )


# --- a sentence with a blank ------------------------------------------------------------------------------------------


def masked_text(run: Run, text: Masked, pieces: int) -> Example:
    """Return the arrays of a masked sentence, see `Task.example_spec`.

    As in pre-training, passages that contain the sentence do not take part.

    Args:
        run: with tokenizer and lengths.
        text: the sentence.
        pieces: tokens of the blank, if its answer is not known.

    Raises:
        UserError: the text or its answer is empty or too long.
    """
    lengths, tokenizer = run.lengths, run.sources.tokenizer
    before = np.array(tokenizer.encode(text.before.rstrip()).ids, np.int32)
    after = np.array(tokenizer.encode_behind(MARK, text.after), np.int32)
    answer = [0] * pieces if text.answer is None else tokenizer.encode_behind(text.before, text.answer)
    targets = np.array(answer, np.int32)
    unmasked = np.concatenate([before, targets, after])
    if not len(targets):
        raise UserError(f"the blank [{text.answer}] holds no token; write a word in it, or ___")
    if len(targets) > lengths.predictions:
        raise UserError(f"the blank has {len(targets)} tokens, but this run predicts at most {lengths.predictions}")
    if len(unmasked) > lengths.query - 2:
        raise UserError(f"the text has {len(unmasked):,} tokens, but this run reads at most {lengths.query - 2}")
    slots = np.arange(lengths.predictions)
    used = slots < len(targets)
    sentence = np.zeros(lengths.query, tokenizer.dtype)
    sentence[: len(unmasked)] = unmasked
    masked = np.concatenate([before, np.full(len(targets), tokenizer.mask_id, np.int32), after])
    return {
        "positions": np.where(used, 1 + len(before) + slots, 0).astype(np.int32),
        "targets": np.pad(targets, (0, lengths.predictions - len(targets))),
        "weights": used.astype(np.float32),
        "sentence": sentence,
        "sentence_length": np.int32(0 if text.answer is None else len(unmasked)),
        "own_row": np.int32(-1),
    } | query_arrays(masked, lengths.query, tokenizer)


def inspect_sentence(
    trained: TrainedRun, sentence: str, text: Masked, pieces: int = 1, bert: tuple[Run, Params] | None = None
) -> Inspection:
    """Inspect how a run fills the blank of a sentence.

    If the answer is not known, the most probable answer with each of the first GUESSING candidates is read with all
    candidates, and we take the best.

    Args:
        trained: the run.
        sentence: the input, which the result repeats.
        text: the same, parsed.
        pieces: tokens of the blank, if its answer is not known.
        bert: a run whose reader was trained without passages, and its parameters, for comparison.

    Raises:
        UserError: see `masked_text`.
    """
    run, tokenizer = trained.run, trained.run.sources.tokenizer
    example = masked_text(run, text, pieces)
    count = int(example["weights"].sum())
    if run.config.realm.uses_span_marginal:  # the retriever's query has no blank
        words = example["query"][1 : example["query_length"] - 1]
        query = query_arrays(words[words != tokenizer.mask_id], run.lengths.query, tokenizer)
        example = with_reader_query(example) | query
    if (bm25_arrays := run.bm25_for_masked_sentence) is not None:
        example |= bm25_arrays(f"{text.before} {text.after}", -1)
    (outputs,) = _inspect_examples(trained, [example])
    targets = example["targets"][:count]
    if text.answer is not None:
        inspection = _inspection(trained, sentence, tokenizer.decode(targets.tolist()), *outputs[:4])
    else:
        first = np.argsort(-outputs.prior, kind="stable")[:GUESSING]
        guesses = np.unique(outputs.guesses[first[outputs.prior[first] > np.log(1e-9)]][:, :count], axis=0)
        readings = _inspect_examples(trained, [_filled_in(example, guess) for guess in guesses])
        inspections = [
            (_inspection(trained, sentence, tokenizer.decode(guess.tolist()), *reading[:4]), guess)
            for guess, reading in zip(guesses, readings, strict=True)
        ]
        (inspection, targets), *others = sorted(inspections, key=lambda item: -item[0]["probability"])
        inspection["others"] = [
            OtherAnswer(answer=other["answer"], probability=other["probability"]) for other, _ in others
        ]
    if bert is not None:
        # Use the same tokens: predicted pieces, such as `##nri`, would change if they were encoded again as text.
        other, params = bert
        batch = _put(other, [_filled_in(masked_text(other, text, count), targets)])
        inspection["bert"] = float(np.exp(to_host(_null_log_likelihood(other.context, params, batch)))[0])
    return inspection


class InspectionOutputs(NamedTuple):
    """The result of `inspect_batch`. Candidates are the null document and k passages.

    Attributes:
        rows: rows of the passages, [batch, k].
        prior: log p(z|x), [batch, 1 + k].
        reading: log p(y|z,x), [batch, 1 + k].
        held: see `Inspection`, [batch].
        guesses: the most probable token in every slot, [batch, 1 + k, m].
    """

    rows: Any
    prior: Any
    reading: Any
    held: Any
    guesses: Any


@partial(jax.jit, static_argnums=(0, 1, 2))
def inspect_batch(
    realm: RealmConfig, context: StaticContext, frozen_passages: bool, params: Params, batch: Any, index: Index,
    special: Any,
) -> InspectionOutputs:  # fmt: skip
    """Retrieve for masked texts and read them with every candidate.

    Args:
        realm: see `forward.py`.
        context: see `forward.py`.
        frozen_passages: passages keep the vectors of the index.
        params: all parameters.
        batch: masked sentences, [batch, …].
        index: index that is searched.
        special: special tokens, which are never predicted, [s] int.
    """
    read = read_masked(realm, context, params, batch, index, None, frozen_passages)
    reading = (read.log_p * batch["weights"][:, None]).sum(axis=-1)  # [batch, 1 + k]
    passages = gather_passages(index, read.candidates.rows)
    if realm.uses_span_marginal:
        # The most probable span of each passage with as many tokens as the blank.
        spans = masked_spans(context, params, batch, passages)
        size = batch["weights"].sum(axis=1).astype(jnp.int32)[:, None, None, None]
        scores = jnp.where(spans.allowed, spans.scores, NEG_INF)
        start = jnp.take_along_axis(scores, size - 1, axis=-1)[..., 0].argmax(axis=-1)  # [batch, k]
        slots = start[..., None] + jnp.arange(batch["targets"].shape[1])  # [batch, k, m]
        last = spans.reader_input.ids.shape[-1] - 1
        guesses = jnp.take_along_axis(spans.reader_input.ids, jnp.minimum(slots, last), axis=-1)  # [batch, k, m]
        guesses = jnp.concatenate([guesses[:, :1], guesses], axis=1)  # the null document has no spans: repeat the first
    else:
        parts = []
        for documents in (null_candidates(context, batch), passages):
            words = context.model.reader.read_words(params, *masked_inputs(batch, documents))  # [·, m, vocabulary]
            best = words.at[..., special].set(-jnp.inf).argmax(axis=-1)
            parts.append(best.reshape(*documents.ids.shape[:2], -1))
        guesses = jnp.concatenate(parts, axis=1)  # [batch, 1 + k, m]
    null = jnp.where(realm.null_document, read.scores[:, 0], NEG_INF)
    total = jnp.logaddexp(null, _log_total(context, params, batch, index))
    held = jnp.exp(jax.nn.logsumexp(jnp.where(read.valid, read.scores, NEG_INF), axis=1) - total)
    return InspectionOutputs(read.candidates.rows, log_prior(read.scores, read.valid), reading, held, guesses)


def _log_total(context: StaticContext, params: Params, batch: Any, index: Index) -> jax.Array:
    """Return log Σ exp(score) over all passages of the corpus, [batch]."""
    queries = embed_searching_queries(context, params, batch, index.query_encoder)
    scores = jnp.einsum("bd,nd->bn", queries, index.vectors.astype(jnp.float32))  # [batch, padded rows]
    return jax.nn.logsumexp(jnp.where(jnp.arange(scores.shape[1]) < context.rows, scores, NEG_INF), axis=1)


@partial(jax.jit, static_argnums=0)
def _null_log_likelihood(context: StaticContext, params: Params, batch: Any) -> jax.Array:
    """Return log p(y|x) with the null document, [batch]: BERT, if the reader was trained without passages."""
    log_p, _ = read_targets(context, params, batch, null_candidates(context, batch))
    return (log_p[:, 0] * batch["weights"]).sum(axis=-1)


def _inspect_examples(trained: TrainedRun, examples: Sequence[Example]) -> list[InspectionOutputs]:
    """Return the result of `inspect_batch` for each example, on the host."""
    run = trained.run
    special = np.array(sorted(run.sources.tokenizer.special_ids), np.int32)
    realm, frozen = run.config.realm, run.config.refresh.every == 0
    outputs = inspect_batch(realm, run.context, frozen, trained.params, _put(run, examples), trained.index, special)
    outputs = jax.tree.map(to_host, outputs)
    return [InspectionOutputs(*(part[i] for part in outputs)) for i in range(len(examples))]


def _filled_in(example: Example, targets: NDArray) -> Example:
    """Return an example of `masked_text` with other tokens in its blank, as many as it has."""
    padded = np.zeros_like(example["targets"])
    padded[: len(targets)] = targets
    return example | {"targets": padded}


# --- a question -------------------------------------------------------------------------------------------------------


def inspect_question(trained: TrainedRun, question: str, answer: str | None = None) -> Inspection:
    """Inspect how a run answers a question. p(y|z,x) is the sum over the spans that are the answer.

    Args:
        trained: the run.
        question: question that `check_question` accepts.
        answer: y; None for the most probable answer.

    Raises:
        UserError: the answer is empty, or longer than a span.
    """
    run, evaluator = trained.run, trained.evaluator([Question(question, [])], 1)
    if trained.reader is not None:
        return _inspect_with_reader(trained, evaluator, trained.reader, question, answer)
    if answer is None:
        answer = evaluator.predict(trained.params, trained.index)[0].answer
    target = question_arrays([], [answer], run.sources.tokenizer, run.lengths)
    if not target["answer_lengths"].any():
        if tokens := len(run.sources.tokenizer.encode(answer).ids):
            raise UserError(
                f"the answer {answer!r} has {tokens} tokens, but this run extracts at most {run.lengths.span_width} "
                "(config.model.span_width); give a shorter one"
            )
        raise UserError(f"the answer {answer!r} has no tokens; give a word that a passage may hold")
    example = evaluator.queries[0] | {name: target[name] for name in ("answers", "answer_lengths")}
    qa, batch = run.answering_qa, _put(run, [example])
    outputs = _inspect_question_batch(qa, run.context, trained.pipeline, trained.params, batch, trained.index)
    return _inspection(trained, question, answer, *(to_host(part)[0] for part in outputs))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _inspect_question_batch(
    qa: QaConfig, context: StaticContext, pipeline: SearchPipeline, params: Params, batch: Any, index: Index
) -> tuple[jax.Array, ...]:
    """Return rows, log p(z|x) and log p(y|z,x), [batch, k]; and `Inspection.held`, [batch]."""
    read = read_question(qa, context, params, batch, index, None, qa.passages, pipeline)
    likelihood = log_sum_selected(read.spans, read.correct, (2, 3))
    # A reranker changes the scores of these passages only, so we take those of the retriever.
    return read.rows, read.prior, likelihood, _held_share(context, params, batch, index, read.rows)


def _inspect_with_reader(
    trained: TrainedRun, evaluator: Evaluator, reader: QuestionReader, question: str, answer: str | None
) -> Inspection:
    """Inspect the answer of a reader of texts. Other arguments: see `inspect_question`."""
    run, store = trained.run, trained.run.sources.passages
    (prediction,) = evaluator.predict(trained.params, trained.index)
    if not prediction.candidates:
        raise UserError("no passage shares a word with the question; ask with other words, or with --search=vectors")
    answer = prediction.answer if answer is None else answer
    rows = np.array([passage.row for passage in prediction.candidates], np.int32)  # [k]
    texts = [ReaderText(question, store.title(row), store.text(row)) for row in rows.tolist()]
    likelihood = []
    for text, reading in zip(texts, reader.read(texts, run.config.answering.answer_tokens, ALL_SPANS), strict=True):
        scored = zip(reading.spans, reading.probabilities, strict=True)
        likelihood.append(sum(p for span, p in scored if answer_key(text.text[slice(*span)]) == answer_key(answer)))
    batch = _put(run, [evaluator.queries[0]])
    held = to_host(_held_share(run.context, trained.params, batch, trained.index, np.tile(rows, (run.mesh.size, 1))))
    with np.errstate(divide="ignore"):
        log_p, prior = np.log(likelihood), np.log([passage.probability for passage in prediction.candidates])
    return _inspection(trained, question, answer, rows, prior, np.maximum(log_p, NEG_INF), held[0])


@partial(jax.jit, static_argnums=0)
def _held_share(context: StaticContext, params: Params, batch: Any, index: Index, rows: Any) -> jax.Array:
    """Return `Inspection.held` of rows [batch, k], [batch]."""
    scores = stored_scores(embed_searching_queries(context, params, batch, index.query_encoder), index, rows)
    return jnp.exp(jax.nn.logsumexp(scores, axis=1) - _log_total(context, params, batch, index))


# --- both -------------------------------------------------------------------------------------------------------------


def _put(run: Run, examples: Sequence[Example]) -> Any:
    """Put examples on the devices, padded with the first to a power of two for each device, so that few programs are
    compiled for any number of guesses."""
    each = -(-len(examples) // run.mesh.size)
    filled = [*examples, *[examples[0]] * ((1 << (each - 1).bit_length()) * run.mesh.size - len(examples))]
    return put_batch(run.mesh, {key: np.stack([example[key] for example in filled]) for key in filled[0]})


def _inspection(
    trained: TrainedRun, text: str, answer: str, rows: NDArray, prior: NDArray, reading: NDArray, held: NDArray
) -> Inspection:
    """Make the inspection of one text. rows [k]; prior and reading [k], or [1 + k] with the null document first."""
    has_null = len(prior) > len(rows)
    taking_part = prior > NEG_INF / 2
    joint = prior.astype(np.float64) + reading
    total = np.logaddexp.reduce(joint[taking_part])
    # There is no posterior if p(y|x), the divisor, is 0.
    posteriors: list[float | None] = [None] * len(joint)
    if total > NEG_INF / 2:
        posteriors = np.exp(joint - total).tolist()
    passages = []
    for number, row in enumerate([None, *rows.tolist()] if has_null else rows.tolist()):
        if taking_part[number]:
            source = PassageSource(id="", part=0, title="") if row is None else passage_source(trained, row)
            p_z, posterior = float(np.exp(prior)[number]), posteriors[number]
            passages.append(
                InspectedPassage(
                    id=source["id"] or None,
                    part=source["part"],
                    title=source["title"],
                    text="" if row is None else trained.run.sources.passages.text(row),
                    prior=p_z,
                    likelihood=float(np.exp(reading)[number]),
                    posterior=posterior,
                    gain=None if posterior is None else posterior - p_z,
                )
            )
    passages.sort(key=lambda passage: -passage["prior"])
    return Inspection(
        text=text,
        task=trained.task,
        step=trained.step,
        answer=answer,
        probability=sum(passage["prior"] * passage["likelihood"] for passage in passages),
        alone=float(np.exp(reading[0])) if has_null else None,
        held=float(held),
        others=[],
        passages=passages,
    )
