"""Why a trained run predicts what it predicts: a sentence with a blank, or a question, as the paper's table 3 has it.

The numbers are computed in `realm_jax/eval/inspection.py`; here rows of the corpus become documents, titles and texts.
"""

from typing import NotRequired  # of typing only from Python 3.12 as pydantic reads it

from ml_collections import ConfigDict
from typing_extensions import TypedDict

from realm_jax.config import task_names
from realm_jax.data.questions import Question
from realm_jax.errors import UserError
from realm_jax.eval.inspection import Masked, Passage, TextInspection, inspect_masked, inspect_question
from realm_jax.inference.answers import Place, place
from realm_jax.tasks import TASKS
from realm_jax.train.trained_run import TrainedRun


class InspectedPassage(TypedDict):
    """A candidate z: where it is from, p(z|x), p(y|z,x), p(z|x,y) and r(z) = p(z|x,y) − p(z|x).

    The null document's id is None; so are posterior and gain where the answer stands in none of the passages.
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
    """An answer that is less likely, with its p(y|x)."""

    answer: str
    probability: float


class Inspection(TypedDict):
    """How a run predicts a text.

    task, step: whose parameters; probability: p(y|x), the marginal over the passages; alone: p(y|x) beside the null
    document, None for a question; held: the share of exp(score) over the whole corpus that the passages have; bert:
    p(y|x) of a reader that was trained without passages, where one is compared with.
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


def inspected_task(config: ConfigDict, is_question: bool) -> str | None:
    """The task whose parameters are meant when none is named; None: the last."""
    inspected = [name for name in task_names(config) if TASKS[name].inspects_sentences]
    return inspected[-1] if inspected and not is_question else None


def check_has_priors(trained: TrainedRun) -> None:
    """Raise UserError for a run that finds no passages by vectors."""
    if trained.index.vectors is None:
        raise UserError(
            f"there is no p(z|x) to look at: task {trained.task} of {trained.run.workdir} finds no passages by their "
            "vectors"
        )


def see_sentence(trained: TrainedRun, text: Masked, pieces: int = 1) -> TextInspection:
    """A sentence with a blank; pieces: tokens of a blank whose answer is not known. Raises UserError as
    `eval.inspection.masked_text`."""
    return inspect_masked(trained.run, trained.params, trained.index, text, pieces)


def see_question(trained: TrainedRun, question: str, answer: str | None = None) -> TextInspection:
    """A checked question and an answer (default: the likeliest). Raises UserError for an answer that can be no span."""
    asked = trained.evaluator([Question(question, [])], 1)
    if answer is None:
        answer = asked.predict(trained.params, trained.index)[0].answer
    return inspect_question(asked, trained.params, trained.index, answer)


def to_record(trained: TrainedRun, text: str, seen: TextInspection) -> Inspection:
    """Everything that is shown, as JSON has it."""
    return Inspection(
        text=text,
        task=trained.task,
        step=trained.step,
        answer=seen.answer,
        probability=seen.probability,
        alone=seen.alone,
        held=seen.held,
        others=[OtherAnswer(answer=answer, probability=p) for answer, p in seen.others],
        passages=[_passage(trained, one) for one in seen.passages],
    )


def _passage(trained: TrainedRun, one: Passage) -> InspectedPassage:
    found = Place(id="", part=0, title="") if one.row is None else place(trained, one.row)
    return InspectedPassage(
        id=found["id"] or None,
        part=found["part"],
        title=found["title"],
        text="" if one.row is None else trained.run.sources.passages.text(one.row),
        prior=one.prior,
        likelihood=one.likelihood,
        posterior=one.posterior,
        gain=one.gain,
    )
