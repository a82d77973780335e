"""Runs that end, or are looked at, before a step of the train loop."""

from collections.abc import Callable
from typing import Any

from realm_jax.run import Run
from realm_jax.training import loop


class Cut(Exception):
    """Stands for the power going off."""


def at_step(monkeypatch, act: Callable[[int], None]) -> None:
    """Has `act(step)` called before each step of the loop."""
    make = loop.make_step

    def watched(run: Run, task: Any) -> Any:
        step = make(run, task)

        def call(state: Any, *rest: Any) -> Any:
            act(int(state.step))
            return step(state, *rest)

        return call

    monkeypatch.setattr(loop, "make_step", watched)


def cut_at(monkeypatch, *wanted: int) -> None:
    """Cut a run off before these steps, one after the other, each once."""
    left = list(wanted)

    def cut(step: int) -> None:
        if left and step == left[0]:
            left.pop(0)
            raise Cut

    at_step(monkeypatch, cut)
