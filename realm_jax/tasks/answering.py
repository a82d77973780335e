"""Settings that answer questions with the parameters of a task, by the task's name, because few tasks differ.

Evaluation, inference and the index call these functions to choose search, reranker and reader.
"""

from realm_jax.config import AUTO, Config, task_names
from realm_jax.errors import UserError
from realm_jax.forward import Rerank, SearchPipeline, rescore_by_tokens
from realm_jax.models.folders import SHARED, TOWERS
from realm_jax.tasks.rerank import NAME, rescore

# Tasks that learn from questions with answers, and end with answers to them.
ANSWERING_TASKS = ("qa", "closed_book", "rerank")


def reads_passages(task: str) -> bool:
    """Return True if answers are read in passages."""
    return task != "closed_book"


def trains_qa_reader(task: str) -> bool:
    """Return True if the reader has learned from questions to answer from passages."""
    return task in ANSWERING_TASKS and reads_passages(task)


def trains_cloze_reader(task: str, config: Config) -> bool:
    """Return True if the reader has learned, without questions, to point at the answer of a blank.

    Args:
        task: its name.
        config: config of the run.
    """
    return task == "realm" and config.realm.marginal == "span"


def question_search(task: str, config: Config) -> str:
    """Return the search of questions for which the user names none, one of `config.SEARCHES`.

    Args:
        task: its name.
        config: config of the run.
    """
    return config.qa.search if reads_passages(task) else "vectors"


def evaluation_search(task: str, config: Config) -> str:
    """Return the search with which a task is measured: that of fine-tuning after it, vectors before.

    Args:
        task: its name.
        config: config of the run.
    """
    return config.qa.search if trains_qa_reader(task) else "vectors"


def needs_vectors(task: str, config: Config, search: str | None = None) -> bool:
    """Return True if answering needs the passages' vectors: to search them, or for p(z|x).

    A reader that was trained on BM25's scores is also evaluated with them.

    Args:
        task: its name.
        config: config of the run.
        search: one of `config.SEARCHES`; None for that of `evaluation_search`.
    """
    if not reads_passages(task):
        return False
    search = search or evaluation_search(task, config)
    return not (search == "bm25" and trains_qa_reader(task) and config.qa.uses_bm25_only)


def trained_reranker(task: str, config: Config) -> Rerank | None:
    """Return the cross-encoder; None if the recipe has trained none by the end of a task.

    Args:
        task: name of the last trained task.
        config: config of the run.
    """
    names = task_names(config)
    if task not in names or "rerank" not in names[: names.index(task) + 1]:
        return None
    return Rerank("cross-encoder", config.rerank.passages, (NAME,), rescore)


def prefers_tokens(task: str, config: Config) -> bool:
    """Return True if token rerank is the default.

    We measured it only for encoders whose vector is the mean of their token vectors. A task that trains a reader on
    questions keeps the order of the search, because the reader was trained on it.

    Args:
        task: its name.
        config: config of the run.
    """
    return config.encoder.pooling == "mean" and not trains_qa_reader(task)


def search_pipeline(task: str, config: Config, search: str | None = None, rerank: str | None = None) -> SearchPipeline:
    """Return how passages of questions are found with the parameters of a task.

    Args:
        task: its name.
        config: config of the run.
        search: one of `config.SEARCHES`; None for that of `question_search`.
        rerank: one of `config.RERANKERS`; None for `answering.rerank`.

    Raises:
        UserError: the cross-encoder was not trained by the end of the task, or the task reads no passages.
    """
    if rerank not in (None, "none") and not reads_passages(task):
        raise UserError(f"--rerank={rerank}: the task {task} answers without passages; leave it out")
    search, rerank = search or question_search(task, config), rerank or config.answering.rerank
    if not reads_passages(task) or rerank == "none":
        return SearchPipeline(search)
    trained = trained_reranker(task, config)
    if rerank == "tokens" or (rerank == AUTO and trained is None and prefers_tokens(task, config)):
        encoders = (SHARED,) if config.model.shared_tower else TOWERS
        tokens = Rerank("tokens", config.answering.rerank_depth, encoders, rescore_by_tokens)
        return SearchPipeline(search, tokens)
    if trained is None and rerank != AUTO:
        raise UserError(
            f"--rerank={rerank}: no cross-encoder was trained by the end of task {task}; train one (--config=rerank), "
            "or choose tokens or none"
        )
    return SearchPipeline(search, trained)


def evaluation_pipeline(task: str, config: Config) -> SearchPipeline:
    """Return how passages are found when a task is measured in training, with the cross-encoder if it was trained.

    Args:
        task: its name.
        config: config of the run.
    """
    return SearchPipeline(evaluation_search(task, config), trained_reranker(task, config))
