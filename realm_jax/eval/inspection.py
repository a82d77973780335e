"""Inspect a prediction: the paper's table 3 for any sentence with a blank, or for a question.

For a text x and what is to be predicted of it, y: p(z|x) and p(y|z,x) of every passage z that is looked at, the
marginal p(y|x), and the posterior p(z|x,y) that says which passage explains y. Posterior less prior is r(z), the weight
of a passage's score in the gradient of log p(y|x) (Guu et al. 2020, section 3.3). How it is shown is
`realm_jax/cli/inspect_text.py`.
"""

import dataclasses
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.data.examples import Example, Lengths, query_arrays, question_arrays, with_reader_query
from realm_jax.data.tokenizer import MARK, Tokenizer
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator
from realm_jax.forward.context import Index, StepContext
from realm_jax.forward.masked import masked_inputs, masked_spans, null_candidates, read_masked, read_targets
from realm_jax.forward.question import read_question
from realm_jax.forward.search import gather_documents, search_queries, stored_scores
from realm_jax.mesh import to_host
from realm_jax.models.inputs import Documents
from realm_jax.models.likelihood import NEGATIVE, log_prior, log_sum_selected
from realm_jax.models.realm import Params
from realm_jax.run import Run, put_batch

GUESSING = 8  # candidates whose answers are weighed, as many as the paper has; each answer is read with all candidates
_BLANK = re.compile(r"_{2,}|\[([^\[\]]+)\]")


class Masked(NamedTuple):
    """A sentence cut at its blank. answer: what stands there, or None if that is to be found out."""

    before: str
    answer: str | None
    after: str


class Passage(NamedTuple):
    """One z. row: None for the null document; prior p(z|x), likelihood p(y|z,x) and posterior p(z|x,y).

    There is no posterior (None) where y can be said beside no passage: its p(y|x), the divisor, is 0.
    """

    row: int | None
    prior: float
    likelihood: float
    posterior: float | None

    @property
    def gain(self) -> float | None:
        """r(z); None if there is no posterior."""
        return None if self.posterior is None else self.posterior - self.prior


@dataclasses.dataclass(frozen=True)
class TextInspection:
    """How a model predicts one text.

    probability: p(y|x), the sum of prior × likelihood over `passages`, whose priors add up to 1; alone: p(y|x) beside
    the null document, None for a question; held: the share of exp(score) over the whole corpus that falls to
    `passages`; others: further answers with their p(y|x), the likeliest first; targets: the tokens of the answer,
    none for a question.
    """

    answer: str
    probability: float
    alone: float | None
    held: float
    passages: list[Passage]
    others: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    targets: list[int] = dataclasses.field(default_factory=list)


def parse(text: str) -> Masked | None:
    """A sentence with one blank, `___` or `[what stands there]`; None for one without. Raises UserError for more."""
    found = list(_BLANK.finditer(text))
    if not found:
        return None
    if len(found) > 1:
        raise UserError(f"the text has {len(found)} blanks, {found[0][0]!r} and {found[1][0]!r}; leave one")
    (blank,) = found
    answer = blank[1].strip() if blank[1] is not None else None
    return Masked(text[: blank.start()], answer, text[blank.end() :])


# --- a sentence with a blank ------------------------------------------------------------------------------------------


def masked_text(text: Masked, pieces: int, lengths: Lengths, tokenizer: Tokenizer) -> Example:
    """The arrays of one REALM example; see `Task.array_shapes`. pieces: of a blank whose answer is not known.

    Its own passage is looked for by its text, as in pre-training. Raises UserError for a text or an answer that is too
    long or empty.
    """
    before = np.array(tokenizer.encode(text.before.rstrip()).ids, np.int32)
    after = np.array(tokenizer.encode_behind(MARK, text.after), np.int32)
    answer = [0] * pieces if text.answer is None else tokenizer.encode_behind(text.before, text.answer)
    targets = np.array(answer, np.int32)
    whole = np.concatenate([before, targets, after])
    if not len(targets):
        raise UserError(f"the blank [{text.answer}] holds no token; write a word in it, or ___")
    if len(targets) > lengths.predictions:
        raise UserError(f"the blank has {len(targets)} tokens, but this run predicts at most {lengths.predictions}")
    if len(whole) > lengths.query - 2:
        raise UserError(f"the text has {len(whole):,} tokens, but this run reads at most {lengths.query - 2}")
    places = np.arange(len(targets))
    arrays = {name: np.zeros(lengths.predictions, np.int32) for name in ("positions", "targets")}
    arrays["positions"][places] = 1 + len(before) + places
    arrays["targets"][places] = targets
    weights = np.zeros(lengths.predictions, np.float32)
    weights[places] = 1.0
    masked = np.concatenate([before, np.full(len(targets), tokenizer.mask_id, np.int32), after])
    sentence = np.zeros(lengths.query, tokenizer.dtype)
    sentence[: len(whole)] = whole
    known = len(whole) if text.answer is not None else 0
    own = {"sentence": sentence, "sentence_length": np.int32(known), "own_row": np.int32(-1)}
    return arrays | {"weights": weights} | own | query_arrays(masked, lengths.query, tokenizer)


def retriever_arrays(text: Masked, pieces: int, lengths: Lengths, tokenizer: Tokenizer) -> Example:
    """What the retriever takes of a sentence if the reader points: the query without the blank, and the sentence."""
    made = masked_text(text, pieces, lengths._replace(predictions=lengths.query), tokenizer)
    asked = made["query"][1 : made["query_length"] - 1]
    made |= query_arrays(asked[asked != tokenizer.mask_id], lengths.query, tokenizer)
    return {name: made[name] for name in ("query", "query_length", "sentence", "sentence_length")}


class InspectionOutputs(NamedTuple):
    """What `inspect_batch` finds for each text of a batch; candidates are the null document and k passages.

    rows [batch, k]; log_p(z|x) prior and log p(y|z,x) reading [batch, 1 + k]; held [batch]; guesses [batch, 1 + k, m]:
    the likeliest piece in every place that is text.
    """

    rows: Any
    prior: Any
    reading: Any
    held: Any
    guesses: Any


@partial(jax.jit, static_argnums=0)
def inspect_batch(context: StepContext, params: Params, batch: Any, index: Index, special: Any) -> InspectionOutputs:
    """Retrieve for masked texts and read them with every candidate. special [s] int: the pieces that are no text."""
    read = read_masked(context, params, batch, index, None)
    reading = (read.log_p * batch["weights"][:, None]).sum(axis=-1)
    passages = gather_documents(index, read.found.rows)
    if context.points:
        guesses = _likeliest_spans(context, params, batch, passages)
        guesses = jnp.concatenate([guesses[:, :1], guesses], axis=1)  # the null document shows none: as the first does
    else:
        parts = [null_candidates(context, batch), passages]
        guesses = jnp.concatenate([_likeliest(context, params, batch, part, special) for part in parts], axis=1)
    null = jnp.where(context.null_document, read.scores[:, 0], NEGATIVE)
    total = jnp.logaddexp(null, _log_total(context, params, batch, index))
    held = jnp.exp(jax.nn.logsumexp(jnp.where(read.valid, read.scores, NEGATIVE), axis=1) - total)
    return InspectionOutputs(read.found.rows, log_prior(read.scores, read.valid), reading, held, guesses)


def _likeliest(context: StepContext, params: Params, batch: Any, documents: Documents, special: Any) -> jax.Array:
    """The likeliest piece of text in every place beside each passage, [batch, k, m]."""
    words = context.model.reader.read_words(params, *masked_inputs(batch, documents))
    return words.at[..., special].set(-jnp.inf).argmax(axis=-1).reshape(*documents.ids.shape[:2], -1)


def _likeliest_spans(context: StepContext, params: Params, batch: Any, documents: Documents) -> jax.Array:
    """The likeliest span of each passage with as many pieces as the blank has, [batch, k, m]."""
    spans = masked_spans(context, params, batch, documents)
    size = batch["weights"].sum(axis=1).astype(jnp.int32)[:, None, None, None]
    scores = jnp.where(spans.allowed, spans.scores, NEGATIVE)
    start = jnp.take_along_axis(scores, size - 1, axis=-1)[..., 0].argmax(axis=-1)
    places = start[..., None] + jnp.arange(batch["targets"].shape[1])
    return jnp.take_along_axis(spans.joint.ids, jnp.minimum(places, spans.joint.ids.shape[-1] - 1), axis=-1)


def _log_total(context: StepContext, params: Params, batch: Any, index: Index) -> jax.Array:
    """log Σ exp(score) over the whole corpus, [batch]."""
    queries = search_queries(context, params, batch, index.tower)
    scores = jnp.einsum("bd,nd->bn", queries, index.vectors.astype(jnp.float32))
    return jax.nn.logsumexp(jnp.where(jnp.arange(scores.shape[1]) < context.rows, scores, NEGATIVE), axis=1)


def inspect_masked(run: Run, params: Params, index: Index, text: Masked, pieces: int = 1) -> TextInspection:
    """How the model fills the blank of a sentence. Without an answer, of the likeliest one of `pieces` tokens.

    Answers that are weighed against each other are the likeliest beside each of the first GUESSING candidates. Raises
    UserError as `masked_text`.
    """
    tokenizer = run.sources.tokenizer
    example = masked_text(text, pieces, run.lengths, tokenizer)
    if run.context.points:
        example = with_reader_query(example) | retriever_arrays(text, pieces, run.lengths, tokenizer)
    if (find := run.find_sentence) is not None:
        example |= find(f"{text.before} {text.after}", -1)
    (seen,) = _inspect_examples(run, params, index, [example])
    count = int(example["weights"].sum())
    if text.answer is not None:
        return _text_inspection(seen, example["targets"][:count], tokenizer)
    first = np.argsort(-seen.prior, kind="stable")[:GUESSING]
    guesses = np.unique(seen.guesses[first[seen.prior[first] > np.log(1e-9)]][:, :count], axis=0)
    looks = _inspect_examples(run, params, index, [_filled_in(example, guess) for guess in guesses])
    found = [_text_inspection(one, guess, tokenizer) for one, guess in zip(looks, guesses, strict=True)]
    best, *others = sorted(found, key=lambda one: -one.probability)
    return dataclasses.replace(best, others=[(one.answer, one.probability) for one in others])


def _filled_in(example: Example, targets: Sequence[int] | NDArray) -> Example:
    """An example of `masked_text` with other tokens in its blank, as many as it has."""
    padded = np.zeros_like(example["targets"])
    padded[: len(targets)] = targets
    return example | {"targets": padded}


def _inspect_examples(run: Run, params: Params, index: Index, examples: Sequence[Example]) -> list[InspectionOutputs]:
    """`inspect_batch` at some examples, on the host."""
    special = np.array(sorted(run.sources.tokenizer.special_ids), np.int32)
    found = jax.tree.map(to_host, inspect_batch(run.context, params, _put(run, examples), index, special))
    return [InspectionOutputs(*(part[i] for part in found)) for i in range(len(examples))]


def _put(run: Run, examples: Sequence[Example]) -> Any:
    """A batch of some examples on the devices, filled up with the first: a power of two for each device, so that few
    programs are compiled whatever the number of guesses."""
    each = -(-len(examples) // run.mesh.size)
    filled = [*examples, *[examples[0]] * ((1 << (each - 1).bit_length()) * run.mesh.size - len(examples))]
    return put_batch(run.mesh, {key: np.stack([example[key] for example in filled]) for key in filled[0]})


def _text_inspection(found: InspectionOutputs, targets: NDArray, tokenizer: Tokenizer) -> TextInspection:
    passages = _passages([None, *found.rows.tolist()], found.prior, found.reading)
    alone, pieces = float(np.exp(found.reading[0])), targets.tolist()
    return TextInspection(
        tokenizer.decode(pieces), _marginal(passages), alone, float(found.held), passages, targets=pieces
    )


def _passages(rows: Sequence[int | None], prior: NDArray, reading: NDArray) -> list[Passage]:
    """The candidates that take part, the likeliest a priori first."""
    joint = prior.astype(np.float64) + reading
    taking_part = prior > NEGATIVE / 2
    total = np.logaddexp.reduce(joint[taking_part])
    posterior: list[float | None] = [None] * len(joint)
    if total > NEGATIVE / 2:
        posterior = np.exp(joint - total).tolist()
    numbers = zip(rows, np.exp(prior).tolist(), np.exp(reading).tolist(), posterior, strict=True)
    found = [Passage(*values) for values, takes_part in zip(numbers, taking_part, strict=True) if takes_part]
    return sorted(found, key=lambda one: -one.prior)


def _marginal(passages: Sequence[Passage]) -> float:
    return sum(one.prior * one.likelihood for one in passages)


def null_likelihood(run: Run, params: Params, text: Masked, targets: Sequence[int]) -> float:
    """p(y|x) of a reader beside the null document: BERT, where it was trained so.

    targets: y, in tokens of this run. Text would not do: pieces that were guessed, such as `##nri`, are others
    when they are read as text and encoded again.
    """
    example = _filled_in(masked_text(text, len(targets), run.lengths, run.sources.tokenizer), targets)
    return float(np.exp(to_host(_null_log_likelihood(run.context, params, _put(run, [example])))[0]))


@partial(jax.jit, static_argnums=0)
def _null_log_likelihood(context: StepContext, params: Params, batch: Any) -> jax.Array:
    log_p, _ = read_targets(context, params, batch, null_candidates(context, batch))
    return (log_p[:, 0] * batch["weights"]).sum(axis=-1)


# --- a question -------------------------------------------------------------------------------------------------------


def inspect_question(asked: Evaluator, params: Params, index: Index, answer: str) -> TextInspection:
    """The probability that a fine-tuned model gives to an answer: p(y|z,x) is the sum over the spans that are the
    answer.

    asked: with one question. Raises UserError for an answer that can be no span.
    """
    run = asked.run
    target = question_arrays([], [answer], run.sources.tokenizer, run.lengths)
    if not target["answer_lengths"].any():
        tokens, most = len(run.sources.tokenizer.encode(answer).ids), run.lengths.span_width
        if tokens:
            raise UserError(
                f"the answer {answer!r} has {tokens} tokens, and this run points at {most} at most "
                "(config.model.span_width); give a shorter one"
            )
        raise UserError(f"the answer {answer!r} has no tokens; give a word that a passage may hold")
    example = asked.queries[0] | {name: target[name] for name in ("answers", "answer_lengths")}
    context = dataclasses.replace(run.question_context, qa_search=asked.search, rerank=asked.rerank)
    found = _inspect_question_batch(context, params, _put(run, [example]), index)
    rows, prior, reading, held = (to_host(part)[0] for part in found)
    passages = _passages(rows.tolist(), prior, reading)
    return TextInspection(answer, _marginal(passages), None, float(held), passages)


@partial(jax.jit, static_argnums=0)
def _inspect_question_batch(context: StepContext, params: Params, batch: Any, index: Index) -> tuple[jax.Array, ...]:
    """(rows, log p(z|x), log p(y|z,x)) [batch, k] and the share of the corpus [batch]."""
    passages = context.qa_passages
    read = read_question(context, params, batch, index, None, passages, passages)
    likelihood = log_sum_selected(read.spans, read.correct, (2, 3))
    rows, scores = read.rows, read.scores
    if context.rerank is not None:  # the corpus has the retriever's scores alone
        scores = stored_scores(search_queries(context, params, batch, index.tower), index, rows)
    held = jnp.exp(jax.nn.logsumexp(scores, axis=1) - _log_total(context, params, batch, index))
    return rows, read.prior, likelihood, held
