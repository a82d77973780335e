"""Answer questions and find nearest passages in batches.

`realm_jax/eval/prediction.py` answers with rows of the corpus; here rows become documents, titles and texts.
"""

import dataclasses
from collections.abc import Sequence
from typing import NotRequired  # TypedDict of typing only from Python 3.12 as pydantic reads it

from typing_extensions import TypedDict

from realm_jax.data.questions import Question
from realm_jax.eval.prediction import Answer as PredictedAnswer
from realm_jax.models.question_reader import NoReader
from realm_jax.train.trained_run import NBEST, TrainedRun, float32_digits

NEAREST = 5  # default number of passages of a search


class PassageSource(TypedDict):
    """The source of a passage.

    Attributes:
        id: id of its document.
        part: number of the passage in its document, from 0.
        title: title of its document.
    """

    id: str
    part: int
    title: str


class AnswerPassage(PassageSource):
    """The passage of an answer.

    Attributes:
        span: [start, end) of the answer in characters of the passage's text.
        text: text of the passage.
    """

    span: list[int]
    text: NotRequired[str]


class ScoredAnswer(TypedDict):
    """An answer with its probability.

    Attributes:
        answer: text.
        probability: p(y|x).
        passage: passage that holds the answer; None if no passage was retrieved.
    """

    answer: str
    probability: float
    passage: AnswerPassage | None


class Candidate(PassageSource):
    """A passage that was read.

    Attributes:
        ranks: its rank from 1 in each stage that ranked it, {"vectors": 3, "bm25": 1, "tokens": 2}: a search that
            returned it, and the reranker ("tokens" or "cross-encoder") if it placed this passage.
        probability: p(z|x) among the passages that were read.
        answer: the best answer in it, if a reader was trained.
        span: [start, end) of this answer in characters.
        text: text of the passage.
    """

    ranks: dict[str, int]
    probability: float
    answer: NotRequired[str]
    span: NotRequired[list[int]]
    text: str


Measured = TypedDict("Measured", {"exact_match": float | None, "recall@5": float | None, "on": str | None})


class Answer(TypedDict):
    """A question and its answer.

    If no reader was trained, or if only BM25 searches and no passage shares a word with the question, there is no
    answer.

    Attributes:
        question: without white space around it.
        answer: the most probable answer, or None.
        probability: p(y|x), or None.
        no_answer: p(no answer|x), only with a reader of `answering.reader`.
        passage: passage of the answer, or None.
        nbest: the most probable answers.
        candidates: the passages that were read.
        measured: metrics that the run recorded, and on which questions or sentences; None if it has no results yet.
    """

    question: str
    answer: str | None
    probability: float | None
    no_answer: NotRequired[float]
    passage: AnswerPassage | None
    nbest: list[ScoredAnswer]
    candidates: list[Candidate]
    measured: Measured | None


class NearPassage(PassageSource):
    """A passage that a search returned.

    Attributes:
        ranks: see `Candidate`.
        score: inner product of its vector with the query's.
        text: text of the passage.
    """

    ranks: dict[str, int]
    score: float
    text: str


class Nearest(TypedDict):
    """The nearest passages of a question.

    Attributes:
        question: without white space around it.
        index_step: training step of the encoders.
        candidates: the best first.
    """

    question: str
    index_step: int
    candidates: list[NearPassage]


def answers(trained: TrainedRun, questions: Sequence[str], top: int | None = None, batch_size: int = 1) -> list[Answer]:
    """Answer questions.

    Args:
        trained: the opened run.
        questions: questions that `check_question` accepts.
        top: number of candidates in a reply; None for all passages that were read.
        batch_size: questions of a batch.
    """
    evaluator = trained.evaluator([Question(question, []) for question in questions], batch_size)
    store, reads = trained.run.sources.passages, trained.reads
    if not reads:
        evaluator = dataclasses.replace(evaluator, reader=NoReader())
    measured = None
    if (recorded := trained.recorded) is not None:
        measured = Measured({"exact_match": recorded.exact_match, "recall@5": recorded.recall, "on": recorded.on})
    answered = []
    for question, prediction in zip(questions, evaluator.predict(trained.params, trained.index), strict=True):
        by_stage = map(trained.pipeline.ranks_by_stage, prediction.ranks.tolist())
        ranks = dict(zip(prediction.retrieved.tolist(), by_stage, strict=True))
        passages = prediction.candidates
        # Without a reader, or with one that has seen no question, candidates stay in the order of the pipeline.
        if reads and not trained.reads_blanks:
            passages = sorted(passages, key=lambda passage: -passage.probability)
        candidates = []
        for row, probability, (start, end) in passages[:top]:
            text, source = store.text(row), passage_source(trained, row)
            candidate = Candidate(**source, ranks=ranks[row], probability=probability, text=text)
            if reads:
                candidate |= {"answer": text[start:end], "span": [start, end]}
            candidates.append(candidate)
        answer = Answer(
            question=question, answer=None, probability=None, passage=None, nbest=[], candidates=candidates,
            measured=measured,
        )  # fmt: skip
        if candidates and reads:
            nbest = [scored_answer(trained, predicted) for predicted in prediction.nbest[:NBEST]]
            passage = nbest[0]["passage"]
            if passage is not None:
                passage = AnswerPassage(**passage, text=store.text(prediction.nbest[0].row))
            answer |= {"answer": nbest[0]["answer"], "probability": nbest[0]["probability"]}
            answer |= {"passage": passage, "nbest": nbest}
            if trained.reader is not None:
                answer["no_answer"] = float32_digits(prediction.no_answer)
        answered.append(answer)
    return answered


def nearest(trained: TrainedRun, questions: Sequence[str], top: int = NEAREST, batch_size: int = 1) -> list[Nearest]:
    """Find the nearest passages of questions.

    Args:
        trained: the opened run.
        questions: questions that `check_question` accepts.
        top: passages of each question.
        batch_size: questions of a batch.
    """
    evaluator = trained.evaluator([Question(question, []) for question in questions], batch_size)
    ranking = evaluator.ranking(trained.params, trained.index, top)  # [questions, top, …]
    replies = []
    columns_of_all = (ranking.rows.tolist(), ranking.scores.tolist(), ranking.ranks.tolist())
    for question, *columns in zip(questions, *columns_of_all, strict=True):
        candidates = [
            NearPassage(
                **passage_source(trained, row),
                ranks=trained.pipeline.ranks_by_stage(ranks),
                score=score,
                text=trained.run.sources.passages.text(row),
            )
            for row, score, ranks in zip(*columns, strict=True)
            if row >= 0
        ]
        replies.append(Nearest(question=question, index_step=trained.step, candidates=candidates))
    return replies


def passage_source(trained: TrainedRun, row: int) -> PassageSource:
    """Return the source of a passage.

    Args:
        trained: the opened run.
        row: row of the corpus.
    """
    store = trained.run.sources.passages
    document = store.document_id(row)
    return PassageSource(id=document, part=row - store.rows_of(document).start, title=store.title(row))


def scored_answer(trained: TrainedRun, answer: PredictedAnswer) -> ScoredAnswer:
    """Return an answer with the source of its passage.

    Args:
        trained: the opened run.
        answer: with a row of the corpus, or -1 for none.
    """
    passage = AnswerPassage(**passage_source(trained, answer.row), span=list(answer.span)) if answer.row >= 0 else None
    return ScoredAnswer(answer=answer.text, probability=float32_digits(answer.probability), passage=passage)
