"""SIGTERM: a notice that the machine goes away. Training saves, ends with exit code `PREEMPTED` and can be repeated."""

import signal
from types import FrameType
from typing import Any

PREEMPTED = 75  # exit code: saved, restart freely


class Preempted(Exception):
    """SIGTERM came and the state is saved; the process should end with exit code `PREEMPTED`."""


class Stop:
    """SIGTERM as a flag that the loop polls, so that a step and its save are never cut in half.

    One within another hears what the outer one has heard, and the other way round. at_once: what is safe wherever the
    signal comes; Preempted is then raised on the spot, and the flag stays for the next one within where that is lost:
    Python drops exceptions in some of its own callbacks, and libraries catch what they do not know.
    """

    def __init__(self, at_once: str = "") -> None:
        self.asked, self._at_once = False, at_once
        self._before: Any = None
        self._outer: Stop | None = None

    def __enter__(self) -> "Stop":
        try:
            self._before = signal.signal(signal.SIGTERM, self._ask)
        except ValueError:  # not in the main thread: someone else owns the signals
            self._before = None
        outer = getattr(self._before, "__self__", None)  # of a bound method
        self._outer = outer if isinstance(outer, Stop) else None
        self.asked = self.asked or (self._outer is not None and self._outer.asked)
        return self

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        if self._at_once:
            self.check(self._at_once)

    def check(self, kept: str) -> None:
        """Raise Preempted if SIGTERM came. kept: what is safe."""
        if self.asked:
            raise Preempted(f"SIGTERM: {kept}; repeat the command to go on")

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if self._outer is not None:
            self._outer.asked = self._outer.asked or self.asked
