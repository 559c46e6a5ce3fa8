"""The history of a job for its users: losses, recoveries, lost time. A pure function of the journal, like the state.

Every agent follows the same entries and so gives the same figures; a snapshot carries them to agents that come later.
Nothing acts on them.

Lost time is counted by cause. The phases of recoveries are causes: decide, edit, plan, settle. Others are: 'computed
again', the work of a step that was done twice because of a loss; 'restart', the time from the end of all ranks to the
next committed step.
"""

from __future__ import annotations

import msgspec

from megatron.elastic.comm.address import Rank
from megatron.elastic.control.events import Announced, Event, Lost, NodeLost
from megatron.elastic.control.exits import Ending
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.observations import (
    COMPUTED_AGAIN,
    RESTART,
    Protection,
    Recovered,
    Reprotected,
    Stepping,
)
from megatron.elastic.control.wire import Int64

__all__ = ["JobHistory", "LossNote"]

_KEPT = 32
"""Newest losses and recoveries that are kept one by one."""


class LossNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lost process. ``step``: the step under way there; −1: none, or not known. ``at``: seconds of the job."""

    at: float
    rank: Rank
    incarnation: Int64
    host: str
    cause: str
    step: Int64


class JobHistory(msgspec.Struct, forbid_unknown_fields=True):
    """See the module docstring. Call :meth:`follow` with each entry, after the state has taken it."""

    losses: Int64 = 0
    """Lost processes, those lost before they were members included."""
    recoveries: Int64 = 0
    """Changes of the generation because of losses, after which steps went on."""
    changes: Int64 = 0
    """The others: ranks that joined or left as asked."""
    lost_steps: Int64 = 0
    """Committed steps that were computed again."""
    recovery_s: float = 0.0
    """Seconds of all recoveries together."""
    lost_s: dict[str, float] = {}
    """Seconds by cause."""
    unprotected_s: float = 0.0
    """Seconds in which some state block was short of a mirror after a loss."""
    protection: Protection = Protection()
    first_step: Int64 = -1
    """The first step committed in this launch; −1: none yet."""
    began_at: float = 0.0
    """When it was committed."""
    last_losses: list[LossNote] = []
    """Newest last."""
    last_recoveries: list[Recovered] = []
    _noted: Int64 = 0
    """Losses of the generation being agreed that are noted already."""
    _down_at: float = -1.0
    """When all ranks had ended; −1: steps go on."""
    _reached: Int64 = -1
    """The highest step that was under way at a loss."""
    _told: bool = False
    """True if ranks that were left told that the job goes back to its checkpoint, and ended."""

    def follow(self, event: Event, state: Generations) -> None:
        """Take one entry; ``state`` has taken it."""
        match event:
            case Lost():
                ranks = [(loss.rank, loss.incarnation) for loss in event.losses]
                self._note(event.at, dict(zip(ranks, event.steps, strict=False)), state)
            case NodeLost():
                self._note(event.at, {}, state)
            case Announced():
                self.protection = event.protection
            case Stepping():
                self._step(event)
            case Recovered():
                self._recover(event)
            case Reprotected():
                self.unprotected_s += event.seconds
        self._noted = len(state.losses)

    @property
    def ended_in(self) -> int:
        """The step in which all ranks ended, if none was left to tell of it; −1 while steps go on."""
        return -1 if self._down_at < 0.0 or self._told else max(self.first_step, self._reached)

    def recovery_mean_s(self) -> float | None:
        """Mean time to recover (MTTR): from noticing a loss to being able to go on. None before the first recovery."""
        return self.recovery_s / self.recoveries if self.recoveries else None

    def goodput(self, now: float, step: int) -> float | None:
        """The share of the time since the first committed step that went into steps that count; None before it.

        ``now``: seconds of the job; ``step``: the newest committed one. Steps that are computed again count as lost at
        the mean duration of all computed steps.
        """
        elapsed = now - self.began_at
        if self.first_step < 0 or elapsed <= 0.0:
            return None
        useful = max(0.0, elapsed - sum(self.lost_s.values()))
        kept = max(1, step - self.first_step + 1)
        return useful / elapsed * kept / (kept + self.lost_steps)

    def _note(self, at: float, steps: dict[tuple[int, int], int], state: Generations) -> None:
        for loss in state.losses[self._noted :]:
            step = steps.get((loss.rank, loss.incarnation), -1)
            self.losses += 1
            self.last_losses.append(LossNote(at, loss.rank, loss.incarnation, loss.host, loss.cause, step))
            self._reached = max(self._reached, step)
            # a newcomer that was not admitted ends so too, but knows no step
            self._told |= step >= 0 and loss.ending in (Ending.FALL_BACK, Ending.BEGIN_ANEW)
        del self.last_losses[:-_KEPT]
        if state.fresh and self.first_step >= 0 and self._down_at < 0.0:
            self._down_at = at

    def _step(self, event: Stepping) -> None:
        if self.first_step < 0:
            self.first_step, self.began_at = event.step, event.at
        elif self._down_at >= 0.0:
            self._add(RESTART, event.at - self._down_at)
            self.lost_steps += max(0, self._reached - event.step)
        self._down_at, self._reached, self._told = -1.0, -1, False

    def _recover(self, event: Recovered) -> None:
        self.last_recoveries.append(event)
        del self.last_recoveries[:-_KEPT]
        self.lost_steps += event.lost_steps
        for phase, seconds in event.seconds.items():
            self._add(phase, seconds)
        if event.repeated_s:
            self._add(COMPUTED_AGAIN, event.repeated_s)
        if event.lost:
            self.recoveries += 1
            self.recovery_s += sum(event.seconds.values())
        else:
            self.changes += 1

    def _add(self, cause: str, seconds: float) -> None:
        self.lost_s[cause] = self.lost_s.get(cause, 0.0) + max(0.0, seconds)
