"""Where a step's time goes, and how long a phase may last before it is a hang.

A process is in exactly one phase at a time. The timer costs one clock read a
change, so it is always on: it feeds the event log, the profile a plan is made
from, and the hang time-out max(floor, c × usual phase time) (DESIGN section 4).

Invariant: the phases of a step add up to the step. ``current`` may be read from
another thread: it is one reference, replaced as a whole.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

__all__ = ["IDLE", "Moment", "PhaseTimer"]

IDLE = "idle"
"""The phase between steps."""


@dataclass(frozen=True)
class Moment:
    """What a process is doing and since when (``time.monotonic_ns``)."""

    step: int
    phase: str
    since_ns: int

    def lasted_ns(self, now_ns: int | None = None) -> int:
        """Nanoseconds in this phase so far."""
        return (time.monotonic_ns() if now_ns is None else now_ns) - self.since_ns


class PhaseTimer:
    """Times phases of steps. ``on_change`` is called at each change (to publish it); keep it cheap.

    ``history`` is the number of past steps that a phase's usual time is taken from.
    """

    def __init__(self, on_change: Callable[[Moment], None] | None = None, history: int = 32) -> None:
        self._on_change = on_change
        self._history = history
        self._spent: dict[str, int] = {}
        self._past: dict[str, deque[int]] = {}
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

    def finish(self) -> dict[str, int]:
        """End the step: nanoseconds by phase, in order of first entry. They become part of the usual times."""
        self._move(self.current.step, IDLE)
        spent, self._spent = self._spent, {}
        for name, nanoseconds in spent.items():
            self._past.setdefault(name, deque(maxlen=self._history)).append(nanoseconds)
        return spent

    def usual_ns(self, phase: str) -> int | None:
        """Median over past finished steps; None before the first."""
        past = self._past.get(phase)
        return int(median(past)) if past else None

    def profile(self) -> Mapping[str, int]:
        """Usual nanoseconds of every phase seen."""
        return {name: int(median(past)) for name, past in self._past.items()}

    def allowance_ns(self, phase: str, floor_ns: int, factor: float) -> int:
        """How long ``phase`` may last before someone should be suspected."""
        return max(floor_ns, int(factor * (self.usual_ns(phase) or 0)))

    def overdue(self, floor_ns: int, factor: float) -> bool:
        """Whether the present phase has outlasted its allowance. For a watching thread."""
        now = self.current
        return now.phase != IDLE and now.lasted_ns() > self.allowance_ns(now.phase, floor_ns, factor)

    def _move(self, step: int, phase: str, count: bool = True) -> None:
        now = time.monotonic_ns()
        left = self.current
        if count and left.phase != IDLE:
            self._spent[left.phase] = self._spent.get(left.phase, 0) + now - left.since_ns
        self.current = Moment(step, phase, now)
        if self._on_change is not None:
            self._on_change(self.current)
