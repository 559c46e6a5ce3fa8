"""One rank's place in the host's loop, and the actions outside a step that are repeated after a loss.

Each step and each fenced action is a *phase*. Its number is equal on all ranks at the same
place of the loop; :mod:`report` defines when a phase is over. A newcomer begins with the step
that the members are in or finished last, because the host's loop can begin only at a step. It
passes the phases that are already over with the results it received (:class:`EntryPoint`),
until it reaches the phase that the members are in.

Invariant: a fenced action ends alike on every rank, with equal results or with the same
failure. Therefore the host's loop takes the same branches on a newcomer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from megatron.elastic.comm.cut_off import as_interruption
from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.control.requests import Request
from megatron.elastic.engine.failures import ActionFailed

__all__ = ["EntryPoint", "Fence", "PhaseEnd", "Program", "Recovers"]

T = TypeVar("T")


Result = bool | int | float | str | dict[str, tuple[float, float]] | None
"""Types that a fenced action may return: newcomers receive the result in a message."""


@dataclass(frozen=True)
class PhaseEnd:
    """The end of a fenced action, equal on every rank."""

    result: Result = None
    failure: str = ""
    """Reason for which it failed on every rank; empty if it was done."""


@dataclass(frozen=True)
class EntryPoint:
    """The phase at which a newcomer begins, and the ends of the phases that are over since then."""

    phase: int
    """Number of the phase before its first."""
    inside: bool
    """True if its first phase is a step whose boundary the members have passed already."""
    first_open: int
    """The first phase in which it takes part; earlier ones are over."""
    ended: Mapping[int, PhaseEnd]
    """Ends of the fenced actions that are over, by number."""
    failures: Mapping[int, str]
    """:attr:`Program.failures` of the members."""


@dataclass
class Program:
    """One rank's place in the host's loop. Part of its report for a frozen generation."""

    phase: int = 0
    """Number of the phase entered last, equal on all ranks at the same place of the loop."""
    under_way: bool = False
    """True if that phase is still open, as far as this rank knows."""
    done: bool = False
    """True if this rank has done its part of a fenced action and waits for the other ranks."""
    reporter: int = -1
    """The rank that logs what was done last (:attr:`View.reporter`); it may be lost before it has."""
    failures: dict[int, str] = field(default_factory=dict)
    """Phase → why a fenced action failed on some rank, since the newest step. This rank may not have reached it yet.

    A rank reports all that it knows of. So the others fail too if they learn that the action is over only after a
    further loss, from a rank that has gone on.
    """
    inside: bool = False
    """Admitted while the members were in a step, whose boundary they have passed."""
    end_only: bool = False
    """Admitted at the end of a step that was already committed."""
    behind: bool = False
    """In a phase that was over when this rank was admitted."""
    _step: int = 0
    """Number of the newest step; 0 before the first."""
    _ended: dict[int, PhaseEnd] = field(default_factory=dict)
    """Ends of fenced actions since the newest step, done by this rank or received in its join state."""
    _first_open: int = 0
    """The first phase that was open when this rank was admitted."""

    def enter(self) -> None:
        """Begin the next fenced action."""
        self.phase += 1
        self.under_way, self.done = True, False
        self.behind = self.phase < self._first_open

    def enter_step(self) -> None:
        """Begin the next step."""
        self.enter()
        self._step = self.phase
        self._ended = {phase: ended for phase, ended in self._ended.items() if phase > self._step}
        self.failures = {phase: why for phase, why in self.failures.items() if phase > self._step}

    def known_end(self) -> PhaseEnd | None:
        """Return the end of the present fenced action if it was over before this rank was admitted, else None."""
        return self._ended[self.phase] if self.behind else None

    def did(self, result: Any, reporter: int) -> None:
        """Note that this rank has done its part of the present fenced action, with ``result``."""
        self.done, self.reporter = True, reporter
        self._ended[self.phase] = PhaseEnd(result)

    def over(self, failure: str = "") -> None:
        """Note that the present phase is over on every rank. ``failure``: why the fenced action failed."""
        self.under_way = False
        if failure:
            self._ended[self.phase] = PhaseEnd(failure=failure)

    def place(self, first_open: int) -> EntryPoint:
        """Return a newcomer's entry point. ``first_open``: the members' first open phase."""
        begun = self.under_way and self._step > 0
        before = max(0, self._step - 1) if self.under_way else self.phase  # with no step so far: from the start
        ended = {phase: ended for phase, ended in self._ended.items() if phase < first_open}
        return EntryPoint(before, begun, first_open, ended, self.failures)

    def take(self, place: EntryPoint) -> None:
        """Begin at the entry point ``place``."""
        self.phase, self.inside = place.phase, place.inside
        self.failures, self._ended = dict(place.failures), dict(place.ended)
        self._first_open = place.first_open
        self.behind = place.phase + 1 < place.first_open


class Recovers(Protocol):
    """The part of a recovery that a fence uses."""

    def recover(self, error: CommError) -> bool:
        """Recover in the next generation. Returns whether the present phase is over."""

    def ask(self, what: Request) -> bool:
        """Request a generation and recover in it. Returns whether the present phase is over."""


class Fence:
    """Runs collective actions outside a step."""

    def __init__(self, program: Program, fabric: Fabric, recovery: Recovers, reporter: Callable[[], int]) -> None:
        self._program = program
        self._fabric = fabric
        self._recovery = recovery
        self._reporter = reporter
        self._inside = False

    def run(self, body: Callable[[], T], together: bool = False) -> T:
        """Run a collective action; repeat it in the next generation if one begins before all have finished.

        ``body`` must be repeatable. Returns its last result on this rank. A call inside
        another fenced action is part of that action. ``together``: an ``OSError`` on any rank
        raises :class:`ActionFailed` on every rank. A newcomer may receive the result in a
        message, so the result must be equal on every rank, and small.
        """
        if self._inside:
            return body()
        self._program.enter()
        end = self._program.known_end()
        if end is not None:
            self._program.over(end.failure)
            if end.failure:
                raise ActionFailed(end.failure)
            return cast(T, end.result)
        self._inside = True
        try:
            return self._repeated(body, together)
        finally:
            self._inside = False

    def _repeated(self, body: Callable[[], T], together: bool) -> T:
        program = self._program
        result: T | None = None
        over = False
        while True:
            failure = program.failures.get(program.phase)
            if failure is not None or over:
                break
            try:
                if not program.done:
                    reporter = self._reporter()
                    with as_interruption(self._fabric):
                        result = body()
                    program.did(result, reporter)
                dist.barrier(group=self._fabric.world)
                over = True
            except CommError as error:
                over = self._recovery.recover(error)
            except OSError as error:
                # The other ranks wait inside the action. A new generation ends their wait; its reports give the reason.
                if not together:
                    raise
                program.failures[program.phase] = " ".join(str(error).split())
                over = self._recovery.ask(Request.REFORM)
            program.done = program.done and over
        program.over(failure or "")
        if failure is not None:
            raise ActionFailed(failure)
        return result  # type: ignore[return-value]
