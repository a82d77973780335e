"""The watch warns of a coming collapse in time, names a likely cause, says each thing once, and is quiet otherwise."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.train.metrics import MetricLogger, StepCost
from realm_jax.train.monitors import CollapseMonitor, task_monitors

LENGTH = 120


def noisy(values: np.ndarray, spread: float, seed: int = 0) -> np.ndarray:
    return values + np.random.default_rng(seed).normal(0.0, spread, values.shape)


def series(gain: tuple[float, float], null: tuple[float, float]) -> list[tuple[int, float, float]]:
    """(step, p(null), gain of the best candidate): flat for a third of the run, then from one value to the other."""
    progress = np.clip((np.arange(LENGTH) - LENGTH / 3) / (LENGTH / 2), 0.0, 1.0)
    gains = noisy(gain[0] + (gain[1] - gain[0]) * progress, 0.1)
    nulls = np.clip(noisy(null[0] + (null[1] - null[0]) * progress, 0.03, seed=1), 0.0, 1.0)
    return [(10 * (number + 1), n, g) for number, (n, g) in enumerate(zip(nulls, gains, strict=True))]


def told(watch: CollapseMonitor, records: list[tuple[int, float, float]]) -> list[str]:
    return [message for record in records if (message := watch.step(*record))]


HEALTHY = series(gain=(0.6, 1.4), null=(0.5, 0.25))
COLLAPSE = series(gain=(0.8, 0.02), null=(0.4, 0.97))


def test_a_healthy_run_is_not_disturbed():
    watch = CollapseMonitor()
    assert told(watch, HEALTHY) == []
    assert [watch.recall(step, recall) for step, recall in [(0, 0.5), (50, 0.47), (100, 0.6), (150, 0.55)]] == [
        None
    ] * 4


@pytest.mark.parametrize("gain", [0.0, 0.02])
def test_candidates_that_never_helped_do_not_help_less_and_less(gain):
    """Noise around nothing falls below any share of its best window."""
    assert told(CollapseMonitor(), series(gain=(gain, gain), null=(0.2, 0.2))) == []


def test_a_coming_collapse_is_told_before_it_is_there():
    messages = told(CollapseMonitor(), COLLAPSE)
    steps = [int(message.removeprefix("step ").split(":")[0]) for message in messages]
    assert "candidates help less and less" in messages[0] and "likely cause: the reader ignores passages" in messages[0]
    before = {step: null for step, null, _ in COLLAPSE}[steps[0]]
    assert before < 0.8, "there is still gradient for the retriever"
    collapse = messages[-1]
    assert "collapse" in collapse and "mlm.steps" in collapse and "realm.learning_rate" in collapse


def test_each_thing_is_said_once():
    messages = told(CollapseMonitor(), COLLAPSE + [(step + 10 * LENGTH, null, gain) for step, null, gain in COLLAPSE])
    kinds = [message.split(": ", 1)[1][:30] for message in messages]
    assert len(kinds) == len(set(kinds)) <= 3


def test_a_null_document_that_takes_everything_from_the_start_is_told_with_its_cause():
    messages = told(CollapseMonitor(), series(gain=(0.3, 0.3), null=(0.93, 0.95)))
    assert len(messages) == 1
    assert "p(null) is 0.9" in messages[0] and "train ict longer" in messages[0]


def test_recall_that_falls_is_told_once_with_its_best():
    watch = CollapseMonitor()
    assert [watch.recall(step, recall) for step, recall in [(0, 0.6), (50, 0.7)]] == [None, None]
    message = watch.recall(100, 0.4)
    assert message is not None and "step 100: recall fell to 0.400 from 0.700; likely cause" in message
    assert watch.recall(150, 0.4) is watch.recall(200, 0.65) is None
    assert "fell to 0.300" in watch.recall(250, 0.3)


# --- The watch of a run


def values(null: float, gain: float) -> dict[str, jax.Array]:
    numbers = {"loss": 1.0, "gradient_norm": 1.0, "null_probability": null, "best_candidate_gain": gain}
    return {key: jnp.float32(value) for key, value in numbers.items()}


def keep(folder, start: int, records: list[tuple[int, float, float]], task: str = "realm") -> None:
    """A task's records as the loop hands them over."""
    cost, monitors = StepCost(1.0, 1, None), task_monitors(task)
    with MetricLogger(folder, task, start, 10 * LENGTH, cost, {}, monitors=monitors) as metrics:
        for step, null, gain in records:
            metrics.log_step(step, values(null, gain), {"index_age": 0})
        metrics.flush()


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("realm_jax"), "propagate", True)  # the command line sets it to False
    caplog.set_level(logging.WARNING, "realm_jax")
    return lambda: [record.message for record in caplog.records if "step" in record.message]


def test_a_run_that_goes_on_remembers_its_best_and_what_it_said(tmp_path, warnings):
    """Cut off when it had just warned: the next start does not repeat it, but tells of the collapse that follows."""
    alone = told(CollapseMonitor(), COLLAPSE)
    assert len(alone) > 1
    cut = 1 + next(n for n, (step, _, _) in enumerate(COLLAPSE) if alone[0].startswith(f"step {step}:"))
    keep(tmp_path / "realm", 0, COLLAPSE[:cut])
    assert warnings() == alone[:1]
    keep(tmp_path / "realm", COLLAPSE[cut - 1][0], COLLAPSE[cut:])
    assert warnings() == alone
    lines = (tmp_path / "realm" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [step for step, _, _ in COLLAPSE]


def test_other_tasks_are_not_watched(tmp_path, warnings):
    keep(tmp_path / "qa", 0, COLLAPSE, task="qa")
    assert warnings() == []


def test_fine_tuning_without_any_answer_in_the_passages_is_told_once():
    watch = CollapseMonitor(window=3)
    told = [watch.answers(step, share) for step, share in enumerate([0.0, 0.1, 0.0, 0.0, 0.0, 0.0])]
    assert told[:4] == [None] * 4 and told[5] is None
    assert "no passage that was read held an answer in the last 3 records" in told[4]
