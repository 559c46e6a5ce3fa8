"""Where one rank is in the host's loop, and the actions outside a step that are repeated after a loss.

Each step and each fenced action ('phase') has a number, equal on all ranks that stand at
the same place (:mod:`report` says when a phase is over). A rank that joins begins with the
step the members are in, or did last: the host's loop knows no other place to begin at. What
they have done since it runs through with the results it is told (:class:`EntryPoint`), until it
comes to the phase they are in.

Invariant: a fenced action ends alike on every rank, with equal results or with the same
failure; so the host's loop goes the same way wherever it is told them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.control.requests import Request
from megatron.elastic.engine.failures import ActionFailed

__all__ = ["EntryPoint", "Fence", "PhaseEnd", "Program", "Recovers"]

T = TypeVar("T")


Result = bool | int | float | str | dict[str, tuple[float, float]] | None
"""What a fenced action may return: a newcomer is told it."""


@dataclass(frozen=True)
class PhaseEnd:
    """How a fenced action ended on every rank."""

    result: Result = None
    failure: str = ""
    """Why nobody did it; empty when all did."""


@dataclass(frozen=True)
class EntryPoint:
    """Where a newcomer begins, and what it is told of the phases from there on."""

    phase: int
    """Number of the phase before its first."""
    inside: bool
    """Whether its first is the step that the members are in, or did last: they have passed the boundary before it."""
    first_open: int
    """The first phase in which it is needed; those before are over."""
    ended: Mapping[int, PhaseEnd]
    """Fenced actions among them, by number."""
    hopeless: tuple[int, str] | None


@dataclass
class Program:
    """Position in the host's program; reported at FREEZE."""

    phase: int = 0
    """Number of the phase entered last, equal on all ranks that stand at the same place of the program."""
    under_way: bool = False
    """Whether that phase is not over yet, as far as this rank knows."""
    done: bool = False
    """Whether this rank has done its part of a fenced action and waits for the others."""
    failure: str = ""
    """Why the present fenced action could not be done here."""
    hopeless: tuple[int, str] | None = None
    """(phase, why) of a fenced action that failed on some rank: perhaps one this rank has yet to reach."""
    inside: bool = False
    """Let in while the members were in a step: they have passed the boundary before it."""
    end_only: bool = False
    """Let in at the end of a step that was committed before."""
    behind: bool = False
    """Running through what was over when this rank was let in."""
    _step: int = 0
    """Number of the newest step; 0 before the first."""
    _ended: dict[int, PhaseEnd] = field(default_factory=dict)
    """Fenced actions since the newest step that this rank has done or was told of."""
    _first_open: int = 0
    """The first phase that was not over when this rank was let in."""

    def enter(self) -> None:
        """The next fenced action begins."""
        self.phase += 1
        self.under_way, self.done = True, False
        self.failure = ""
        self.behind = self.phase < self._first_open

    def enter_step(self) -> None:
        """The next step begins."""
        self.enter()
        self._step = self.phase
        self._ended = {phase: ended for phase, ended in self._ended.items() if phase > self._step}

    def told(self) -> PhaseEnd | None:
        """How the present fenced action ended before this rank was let in; None when it is yet to be done."""
        return self._ended[self.phase] if self.behind else None

    def did(self, result: Any) -> None:
        """This rank has done its part of the present fenced action."""
        self.done = True
        self._ended[self.phase] = PhaseEnd(result)

    def over(self, failure: str = "") -> None:
        """The present phase is over on every rank. ``failure``: why nobody does the fenced action."""
        self.under_way = False
        if failure:
            self._ended[self.phase] = PhaseEnd(failure=failure)

    def place(self, first_open: int) -> EntryPoint:
        """For a newcomer, where phase ``first_open`` is the first that is not over among the members."""
        begun = self.under_way and self._step > 0
        before = max(0, self._step - 1) if self.under_way else self.phase  # with no step so far: from the start
        ended = {phase: ended for phase, ended in self._ended.items() if phase < first_open}
        return EntryPoint(before, begun, first_open, ended, self.hopeless)

    def take(self, place: EntryPoint) -> None:
        """Begin there."""
        self.phase, self.inside, self.hopeless = place.phase, place.inside, place.hopeless
        self._first_open, self._ended = place.first_open, dict(place.ended)
        self.behind = place.phase + 1 < place.first_open


class Recovers(Protocol):
    """What a fence needs of a recovery."""

    def recover(self, error: CommError) -> bool:
        """Settle in the next generation; whether the present phase is over."""

    def ask(self, what: Request) -> bool:
        """Have a generation begin and settle in it; whether the present phase is over."""


class Fence:
    """Collective actions outside a step."""

    def __init__(self, program: Program, fabric: Fabric, recovery: Recovers) -> None:
        self._program = program
        self._fabric = fabric
        self._recovery = recovery
        self._inside = False

    def run(self, body: Callable[[], T], together: bool = False) -> T:
        """Run a collective action; repeat it in the next generation if one begins before all have finished.

        ``body`` must be repeatable. Returns its last result on this rank. Inside
        another fenced action it is part of that one. ``together``: an ``OSError`` in it
        on any rank is :class:`ActionFailed` on every rank. A newcomer for which it was over
        before is told the result, so that it has to be the same on every rank, and small.
        """
        if self._inside:
            return body()
        self._program.enter()
        told = self._program.told()
        if told is not None:
            self._program.over(told.failure)
            if told.failure:
                raise ActionFailed(told.failure)
            return cast(T, told.result)
        self._inside = True
        try:
            return self._repeated(body, together)
        finally:
            self._inside = False

    def _repeated(self, body: Callable[[], T], together: bool) -> T:
        program = self._program
        result: T | None = None
        over = False
        while not over:
            if program.hopeless is not None and program.hopeless[0] == program.phase:
                program.over(program.hopeless[1])
                raise ActionFailed(program.hopeless[1])
            try:
                if not program.done:
                    result = body()
                    program.did(result)
                dist.barrier(group=self._fabric.world)
                over = True
            except CommError as error:
                over = self._recovery.recover(error)
            except OSError as error:
                # The others wait inside the action: a generation ends that, and its reports tell them why.
                if not together:
                    raise
                program.failure = " ".join(str(error).split())
                over = self._recovery.ask(Request.REFORM)
            program.done = program.done and over
        program.over()
        return result  # type: ignore[return-value]
