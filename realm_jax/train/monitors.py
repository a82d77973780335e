"""Warn from the records of a task: retriever collapse, and tokens that packing drops.

Collapse is REALM's known failure: the candidates help too rarely, so the reader learns to ignore its passages, the null
document takes the whole prior, and retrieval never recovers. It shows first in the nats that the best candidate gains
over the null document, then in p(null), last in recall. `CollapseMonitor` compares the mean gain of a window of steps
with that of the best window so far.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

WINDOW = 20  # logged records in a window
NULL_LIMIT = 0.8  # p(null) above which almost no gradient reaches the retriever
LEAST_GAIN = 0.1  # nats: a best window below it is noise, not help (`useful_candidates` counts from there too)
GAIN_DROP = 0.5  # share of the best window's gain below which the reader uses its passages less and less
RECALL_DROP = 0.7  # share of the best recall below which the retriever gets worse
MAX_DROPPED = 0.01  # share of a batch's tokens that packing drops, above which we warn
Monitor = Callable[[dict[str, Any]], str | None]  # gets every record, in order; returns a warning, or None


def task_monitors(task: str) -> list[Monitor]:
    """Return the monitors of a task, by its name."""
    if task == "realm":
        return [CollapseMonitor().masked, TruncationMonitor()]
    if task == "qa":
        return [CollapseMonitor().questions, TruncationMonitor()]
    return [TruncationMonitor()] if task in ("mlm", "closed_book") else []


class TruncationMonitor:
    """Warns once if packing drops more than `MAX_DROPPED` of the tokens."""

    def __init__(self) -> None:
        self._warned = False

    def __call__(self, record: dict[str, Any]) -> str | None:
        """Check a record of metrics; return a warning or None."""
        dropped = record.get("unplaced", 0.0)
        if self._warned or dropped <= MAX_DROPPED:
            return None
        self._warned = True
        return (
            f"step {record['step']}: packing truncated {dropped:.1%} of the tokens, because texts or passages of "
            "this batch are longer than the sample that set the packed lengths (tasks/packed.py)"
        )


@dataclasses.dataclass
class CollapseMonitor:
    """Warns of retriever collapse, once for each cause.

    Attributes:
        window: number of records that are averaged.
    """

    window: int = WINDOW

    def __post_init__(self) -> None:
        self._null: deque[float] = deque(maxlen=self.window)
        self._gain: deque[float] = deque(maxlen=self.window)
        self._answered: deque[float] = deque(maxlen=self.window)
        self._best_gain = 0.0
        self._best_recall = 0.0
        self._reported: set[str] = set()

    def masked(self, record: dict[str, Any]) -> str | None:
        """Check a record of REALM's metrics or evaluations; return a warning or None."""
        if "null_probability" in record:
            return self.step(record["step"], record["null_probability"], record["best_candidate_gain"])
        return self.recall(record["step"], record["recall@5"]) if "recall@5" in record else None

    def questions(self, record: dict[str, Any]) -> str | None:
        """Check a record of fine-tuning; return a warning or None."""
        share = record.get("answer_in_passages")
        return None if share is None else self.answers(record["step"], share)

    def step(self, step: int, null_probability: float, candidate_gain: float) -> str | None:
        """Check a step of REALM.

        Args:
            step: number of steps with this one.
            null_probability: mean p(null|x).
            candidate_gain: mean of log p(y|best candidate, x) − log p(y|null, x), in nats.

        Returns:
            A warning in one line, or None.
        """
        self._null.append(null_probability)
        self._gain.append(candidate_gain)
        if len(self._null) < self.window:
            return None
        null, gain = float(np.mean(self._null)), float(np.mean(self._gain))
        falling = self._best_gain > LEAST_GAIN and gain < GAIN_DROP * self._best_gain
        self._best_gain = max(self._best_gain, gain)
        if falling and null > NULL_LIMIT:
            return self._once(
                "collapse",
                f"step {step}: collapse: p(null) is {null:.2f} and the best candidate now gains {gain:.2f} nats (best "
                f"window {self._best_gain:.2f}); too few candidates helped, so the reader stopped reading; restart "
                "with a longer warm-up (mlm.steps) or inverse cloze stage (ict.steps), or a lower realm.learning_rate",
            )
        if falling:
            return self._once(
                "gain",
                f"step {step}: candidates help less and less: the best one gains {gain:.2f} nats (best window "
                f"{self._best_gain:.2f}); likely cause: the reader ignores passages because most candidates mislead it",
            )
        if null > NULL_LIMIT:
            return self._once(
                "null",
                f"step {step}: p(null) is {null:.2f}: little gradient is left for the retriever; likely cause: the "
                "retriever started below the share of useful candidates that it needs (train ict longer)",
            )
        return None

    def answers(self, step: int, answer_in_passages: float) -> str | None:
        """Check a step of fine-tuning.

        Args:
            step: number of steps with this one.
            answer_in_passages: share of the questions for which a passage that the reader read has an answer.

        Returns:
            A warning in one line, or None.
        """
        self._answered.append(answer_in_passages)
        if len(self._answered) < self.window or any(self._answered):
            return None
        return self._once(
            "answers",
            f"step {step}: no passage that was read held an answer in the last {self.window} records, so nothing is "
            "learned; likely cause: the retriever finds nothing useful (train ict or realm longer), or the answers do "
            "not occur in the passages or are longer than model.span_width tokens",
        )

    def recall(self, step: int, recall: float) -> str | None:
        """Check a recall that was measured with a fresh index.

        Args:
            step: number of training steps that made the index.
            recall: recall of the gold passage or of an answer, 0 to 1.

        Returns:
            A warning in one line, or None.
        """
        best, self._best_recall = self._best_recall, max(self._best_recall, recall)
        if recall < RECALL_DROP * best:
            return self._once(
                f"recall {recall:.3f}",
                f"step {step}: recall fell to {recall:.3f} from {best:.3f}; likely cause: the reader no longer rewards "
                "the passages that help (watch useful_candidates), or realm.learning_rate is too high",
            )
        return None

    def _once(self, kind: str, message: str) -> str | None:
        """Return the message if no other of its kind was returned before, else None."""
        if kind in self._reported:
            return None
        self._reported.add(kind)
        return message
