"""Answers to questions, and the nearest passages of texts, many at a time.

Questions are answered by `realm_jax/eval/prediction.py`; here rows of the corpus become documents, titles and texts.
"""

from collections.abc import Sequence
from typing import NotRequired  # of typing only from Python 3.12 as pydantic reads it

from typing_extensions import TypedDict

from realm_jax.data.questions import Question
from realm_jax.eval.prediction import Answer as FoundAnswer
from realm_jax.eval.prediction import Evaluator, Prediction
from realm_jax.train.trained_run import NBEST, TrainedRun, float32_digits, ranks_by_search, recorded_metrics

NEAREST = 5  # passages of a search, if nothing else is asked for


class Place(TypedDict):
    """Where a passage is from. part: which of the passages of its document, from 0."""

    id: str
    part: int
    title: str


class AnswerPassage(Place):
    """The passage of an answer, which stands at the characters `span` of its text."""

    span: list[int]
    text: NotRequired[str]


class ScoredAnswer(TypedDict):
    """An answer with its probability; passage: where it stands, None if no passage was found."""

    answer: str
    probability: float
    passage: AnswerPassage | None


class Candidate(Place):
    """A passage that was read.

    ranks: its places by the searches that found it, {"vectors": 3, "bm25": 1}; probability: p(z|x) among those read;
    answer, span: the best answer in it, of a trained reader.
    """

    ranks: dict[str, int]
    probability: float
    answer: NotRequired[str]
    span: NotRequired[list[int]]
    text: str


Measured = TypedDict("Measured", {"exact_match": float | None, "recall@5": float | None, "on": str | None})


class Answer(TypedDict):
    """A question and its answer.

    answer, probability, passage: None where no reader was trained, or where BM25 alone searches and no passage shares a
    word with the question; nbest is empty then. nbest: the likeliest answers. candidates: the passages that were read.
    measured: what the run measured of itself, and on which questions or sentences; None if it has no results yet.
    """

    question: str
    answer: str | None
    probability: float | None
    passage: AnswerPassage | None
    nbest: list[ScoredAnswer]
    candidates: list[Candidate]
    measured: Measured | None


class NearPassage(Place):
    """A passage that a search found; ranks: as of `Candidate`; score: the retriever's."""

    ranks: dict[str, int]
    score: float
    text: str


class Nearest(TypedDict):
    """The nearest passages of a question. index_step: the step of the towers that found them."""

    question: str
    index_step: int
    candidates: list[NearPassage]


def answers(trained: TrainedRun, questions: Sequence[str], top: int | None = None, batch_size: int = 1) -> list[Answer]:
    """Answers to checked questions, `batch_size` at a time. top: candidates to give (default: all that were read)."""
    found = _evaluator(trained, questions, batch_size).predict(trained.params, trained.index)
    measured = _measured(trained)
    return [_answer(trained, *one, top, measured) for one in zip(questions, found, strict=True)]


def nearest(trained: TrainedRun, questions: Sequence[str], top: int = NEAREST, batch_size: int = 1) -> list[Nearest]:
    """The `top` nearest passages of checked questions, without an answer, `batch_size` questions at a time."""
    found = _evaluator(trained, questions, batch_size).find(trained.params, trained.index, top)
    by_question = zip(*(part.tolist() for part in found), strict=True)
    return [
        Nearest(
            question=question,
            index_step=trained.step,
            candidates=[_near(trained, *one) for one in zip(*columns, strict=True) if one[0] >= 0],
        )
        for question, columns in zip(questions, by_question, strict=True)
    ]


def placed(trained: TrainedRun, answer: FoundAnswer) -> ScoredAnswer:
    """An answer with the place of its passage."""
    passage = AnswerPassage(**place(trained, answer.row), span=list(answer.span)) if answer.row >= 0 else None
    return ScoredAnswer(answer=answer.text, probability=float32_digits(answer.probability), passage=passage)


def place(trained: TrainedRun, row: int) -> Place:
    """Where the passage of a row is from."""
    store = trained.run.sources.passages
    document = store.document_id(row)
    return Place(id=document, part=row - store.rows_of(document).start, title=store.title(row))


def _evaluator(trained: TrainedRun, questions: Sequence[str], batch_size: int) -> Evaluator:
    return trained.evaluator([Question(question, []) for question in questions], batch_size)


def _near(trained: TrainedRun, row: int, score: float, ranks: Sequence[int]) -> NearPassage:
    text = trained.run.sources.passages.text(row)
    return NearPassage(**place(trained, row), ranks=ranks_by_search(ranks), score=score, text=text)


def _answer(
    trained: TrainedRun, question: str, prediction: Prediction, top: int | None, measured: Measured | None
) -> Answer:
    ranks = dict(zip(prediction.retrieved.tolist(), map(ranks_by_search, prediction.ranks.tolist()), strict=True))
    store, found, reads = trained.run.sources.passages, prediction.candidates, trained.reads
    # Without a reader the order of the search is all that is known; one that learnt from blanks does not change it.
    by_reader = reads and not trained.reads_blanks
    ranked = (sorted(found, key=lambda one: -one.probability) if by_reader else found)[:top]
    candidates = []
    for one in ranked:
        text, (start, end) = store.text(one.row), one.span
        candidate = Candidate(**place(trained, one.row), ranks=ranks[one.row], probability=one.probability, text=text)
        if reads:
            candidate |= {"answer": text[start:end], "span": [start, end]}
        candidates.append(candidate)
    answer = Answer(
        question=question, answer=None, probability=None, passage=None, nbest=[], candidates=candidates,
        measured=measured,
    )  # fmt: skip
    if candidates and reads:
        nbest = [placed(trained, one) for one in prediction.nbest[:NBEST]]
        passage = nbest[0]["passage"]
        whole = None if passage is None else AnswerPassage(**passage, text=store.text(prediction.nbest[0].row))
        answer |= {
            "answer": nbest[0]["answer"],
            "probability": nbest[0]["probability"],
            "passage": whole,
            "nbest": nbest,
        }
    return answer


def _measured(trained: TrainedRun) -> Measured | None:
    known = recorded_metrics(trained.run, trained.task)
    if known is None:
        return None
    return Measured({"exact_match": known.exact_match, "recall@5": known.found, "on": known.on})
