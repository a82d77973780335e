"""Answers to questions, and the nearest passages of texts, many at a time.

Questions are answered by `realm_jax/eval/prediction.py`; here rows of the corpus become documents, titles and texts.
"""

from collections.abc import Sequence
from typing import NotRequired  # TypedDict of typing only from Python 3.12 as pydantic reads it

from typing_extensions import TypedDict

from realm_jax.data.questions import Question
from realm_jax.eval.prediction import Answer as PredictedAnswer
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

    answer, probability, passage: None if no reader was trained, or if only BM25 searches and no passage shares a word
    with the question; nbest is empty then. nbest: the likeliest answers. candidates: the passages that were read.
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
    evaluator = trained.evaluator([Question(question, []) for question in questions], batch_size)
    store, reads = trained.run.sources.passages, trained.reads
    measured = None
    if (recorded := recorded_metrics(trained.run, trained.task)) is not None:
        measured = Measured({"exact_match": recorded.exact_match, "recall@5": recorded.recall, "on": recorded.on})
    answered = []
    for question, prediction in zip(questions, evaluator.predict(trained.params, trained.index), strict=True):
        ranks = dict(zip(prediction.retrieved.tolist(), map(ranks_by_search, prediction.ranks.tolist()), strict=True))
        passages = prediction.candidates
        # Without a reader the order of the search is all that is known; one that learnt from blanks does not change it.
        if reads and not trained.reads_blanks:
            passages = sorted(passages, key=lambda passage: -passage.probability)
        candidates = []
        for row, probability, (start, end) in passages[:top]:
            text, place = store.text(row), passage_place(trained, row)
            candidate = Candidate(**place, ranks=ranks[row], probability=probability, text=text)
            if reads:
                candidate |= {"answer": text[start:end], "span": [start, end]}
            candidates.append(candidate)
        answer = Answer(
            question=question, answer=None, probability=None, passage=None, nbest=[], candidates=candidates,
            measured=measured,
        )  # fmt: skip
        if candidates and reads:
            nbest = [scored_answer(trained, one) for one in prediction.nbest[:NBEST]]
            passage = nbest[0]["passage"]
            if passage is not None:
                passage = AnswerPassage(**passage, text=store.text(prediction.nbest[0].row))
            answer |= {"answer": nbest[0]["answer"], "probability": nbest[0]["probability"]}
            answer |= {"passage": passage, "nbest": nbest}
        answered.append(answer)
    return answered


def nearest(trained: TrainedRun, questions: Sequence[str], top: int = NEAREST, batch_size: int = 1) -> list[Nearest]:
    """The `top` nearest passages of checked questions, without an answer, `batch_size` questions at a time."""
    evaluator = trained.evaluator([Question(question, []) for question in questions], batch_size)
    ranking = evaluator.find(trained.params, trained.index, top)  # [questions, top] each
    replies = []
    for question, *columns in zip(questions, *(column.tolist() for column in ranking), strict=True):
        candidates = [
            NearPassage(
                **passage_place(trained, row),
                ranks=ranks_by_search(ranks),
                score=score,
                text=trained.run.sources.passages.text(row),
            )
            for row, score, ranks in zip(*columns, strict=True)
            if row >= 0
        ]
        replies.append(Nearest(question=question, index_step=trained.step, candidates=candidates))
    return replies


def passage_place(trained: TrainedRun, row: int) -> Place:
    """Where the passage of a row is from."""
    store = trained.run.sources.passages
    document = store.document_id(row)
    return Place(id=document, part=row - store.rows_of(document).start, title=store.title(row))


def scored_answer(trained: TrainedRun, answer: PredictedAnswer) -> ScoredAnswer:
    """An answer with the place of its passage."""
    passage = AnswerPassage(**passage_place(trained, answer.row), span=list(answer.span)) if answer.row >= 0 else None
    return ScoredAnswer(answer=answer.text, probability=float32_digits(answer.probability), passage=passage)
