"""Where a step's time goes.

A process is in exactly one phase at a time. The timer costs one clock read a
change, so it is always on: it feeds the event log and the trace.

Invariant: the phases of a step add up to the step. ``current`` may be read from
another thread: it is one reference, replaced as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["IDLE", "RECOVER", "Moment", "PhaseTimer"]

IDLE = "idle"
"""The phase between steps."""
RECOVER = "recover"
"""The phase from the notice of a loss until steps go on."""


@dataclass(frozen=True)
class Moment:
    """The activity of a process and its begin (``time.monotonic_ns``)."""

    step: int
    phase: str
    since_ns: int


class PhaseTimer:
    """Times phases of steps. ``on_change`` is called at each change (to publish it); keep it cheap."""

    def __init__(self, on_change: Callable[[Moment], None] | None = None) -> None:
        self._on_change = on_change
        self._spent: dict[str, int] = {}
        self.current = Moment(0, IDLE, time.monotonic_ns())

    def begin(self, step: int, phase: str) -> None:
        """Start timing ``step``; what an abandoned attempt at it spent is forgotten."""
        self._spent = {}
        self._move(step, phase, count=False)

    def enter(self, phase: str) -> None:
        """Leave the present phase for ``phase``."""
        self._move(self.current.step, phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """``name`` for the length of a block, then the phase before it; its time is not counted there."""
        before = self.current.phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def worked_ns(self) -> int:
        """Nanoseconds that the present step has spent in phases that are over, recoveries left out."""
        return sum(spent for phase, spent in self._spent.items() if phase != RECOVER)

    def finish(self) -> dict[str, int]:
        """End the step: nanoseconds by phase, in order of first entry."""
        self._move(self.current.step, IDLE)
        spent, self._spent = self._spent, {}
        return spent

    def _move(self, step: int, phase: str, count: bool = True) -> None:
        now = time.monotonic_ns()
        left = self.current
        if count and left.phase != IDLE:
            self._spent[left.phase] = self._spent.get(left.phase, 0) + now - left.since_ns
        self.current = Moment(step, phase, now)
        if self._on_change is not None:
            self._on_change(self.current)
