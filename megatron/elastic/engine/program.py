"""Where one rank is in the host's loop, and the actions outside a step that are repeated after a loss.

Each step and each fenced action has a number, equal on all ranks that stand at the same
place (:mod:`report` says when a phase is over). A rank that joins is told the number, and
where in a step the members are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch.distributed as dist

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.failures import ActionFailed

__all__ = ["Fence", "Program", "Regroups"]

T = TypeVar("T")


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
    after_step: bool = False
    """In the fenced action that follows each step."""
    inside: bool = False
    """Let in while the members were in a step: they have passed the boundary before it."""
    end_only: bool = False
    """Let in at the end of a step that was committed before."""

    def enter(self) -> None:
        """The next step or fenced action begins."""
        self.phase += 1
        self.under_way, self.done = True, False
        self.failure = ""


class Regroups(Protocol):
    """What a fence needs of a recovery."""

    def recover(self, error: CommError) -> bool:
        """Settle in the next generation; whether the present phase is over."""

    def ask(self, what: str) -> bool:
        """Have a generation begin and settle in it; whether the present phase is over."""


class Fence:
    """Collective actions outside a step."""

    def __init__(self, program: Program, fabric: Fabric, regroup: Regroups) -> None:
        self._program = program
        self._fabric = fabric
        self._regroup = regroup
        self._inside = False

    def run(self, body: Callable[[], T], together: bool = False, after_step: bool = False) -> T:
        """Run a collective action; repeat it in the next generation if one begins before all have finished.

        ``body`` must be repeatable. Returns its last result on this rank. Inside
        another fenced action it is part of that one. ``together``: an ``OSError`` in it
        on any rank is :class:`ActionFailed` on every rank. ``after_step``: the host does
        this right after each step, so that whoever begins with the end of a step gets here.
        """
        if self._inside:
            return body()
        self._inside, self._program.after_step = True, after_step
        try:
            return self._repeated(body, together)
        finally:
            self._inside = self._program.after_step = False

    def _repeated(self, body: Callable[[], T], together: bool) -> T:
        program = self._program
        program.enter()
        result: T | None = None
        over = False
        while not over:
            if program.hopeless is not None and program.hopeless[0] == program.phase:
                raise ActionFailed(program.hopeless[1])
            try:
                if not program.done:
                    result = body()
                    program.done = True
                dist.barrier(group=self._fabric.world)
                over = True
            except CommError as error:
                over = self._regroup.recover(error)
            except OSError as error:
                # The others wait inside the action: a generation ends that, and its reports tell them why.
                if not together:
                    raise
                program.failure = " ".join(str(error).split())
                over = self._regroup.ask("reform")
            program.done = program.done and over
        program.under_way = False
        return result  # type: ignore[return-value]
