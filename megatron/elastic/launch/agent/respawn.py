"""Restarts of a node's lost ranks, and the end of the job if a rank cannot be restarted.

A rank is started again when nothing is left of its former process, its node's lease has been renewed, and the other
ranks of its node have recovered. They come first, since the start of a program takes whole cores.

- A newcomer that ends before it takes part is started again after growing pauses, and then given up.
- If a rank ends before the first step, all ranks start anew.
- The ranks of a node in quarantine stay out (:mod:`megatron.elastic.launch.agent.quarantines`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron.elastic.control.events import Abandoned, Event, JobEnded, Lost
from megatron.elastic.control.exits import Ending, ExitCode
from megatron.elastic.control.failures import Failures
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import WAITING_FOR_RANKS, Activity, Decision, Loss
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.loop import Timers
from megatron.elastic.launch.agent.losses import summarize
from megatron.elastic.launch.messages import say

__all__ = ["Processes", "Respawn"]

_FALL_BACK_SECONDS = 2.0
_PAUSE_SECONDS = 0.02
"""Between two looks at whether a successor may start."""


class Processes(Protocol):
    """The processes of one node's ranks."""

    def running(self) -> Collection[int]:
        """Ranks whose newest process has not ended."""

    def remains(self, rank: int) -> bool:
        """True while something is left of a process of ``rank``, also of one that has ended."""

    def lease_left(self) -> float:
        """Seconds for which a process that starts now may act before it ends itself."""

    def start(self, rank: int, incarnation: int, newcomer: bool) -> None:
        """Start that life of ``rank``. ``newcomer``: the job runs already, and the rank will have to be admitted."""

    def kill(self, rank: int, why: str) -> bool:
        """Kill the process of ``rank``, which runs; False if it was killed before."""

    def activity(self, rank: int) -> Activity:
        """The present activity of the process of ``rank``, which runs."""


@dataclass
class Respawn:
    """One agent's part."""

    node: int
    state: Generations
    """Of the job, as the journal has it."""
    failures: Failures
    """The losses so far; counted alike by every agent."""
    processes: Processes
    """Of this node."""
    timers: Timers
    timing: Timing
    append: Callable[[Event], None]
    """To the journal."""
    _cut_short: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Lost rank → newest step of a member here then, and the time until which the end of that step is awaited."""
    _closed: bool = False

    @property
    def _coordinates(self) -> bool:
        return self.state.coordinator() == self.node

    @property
    def _ranks(self) -> tuple[int, ...]:
        return self.state.nodes[self.node].ranks

    def _members_here(self) -> list[int]:
        """Members on this node whose processes have not ended."""
        return [rank for rank in self.processes.running() if self.state.ranks[rank].standing == "member"]

    # -- starting -----------------------------------------------------------------------

    def start(self, rank: int, incarnation: int) -> None:
        """Start that life of ``rank``, unless it is not to be, or not to be any more."""
        state = self.state.ranks[rank]
        if self.state.preparing:  # the other ranks are about to end: it starts with them, not as a newcomer
            self.timers.after(self.timing.look, lambda: self.start(rank, incarnation))
            return
        wanted = self.state.returns(rank) or incarnation == 0
        late = state.standing == "lost" and incarnation <= state.incarnation
        if not wanted or late or self._closed or rank in self.processes.running():
            return
        if not self._may_start(rank):
            self.timers.after(_PAUSE_SECONDS, lambda: self.start(rank, incarnation))
            return
        self._cut_short.pop(rank, None)
        self.processes.start(rank, incarnation, newcomer=rank >= self.state.nominal or not self.state.fresh)

    def _may_start(self, rank: int) -> bool:
        """True if nothing is left of the former process, the lease is fresh, and no member here is in its way."""
        # With a lease that is about to end the process would end before it joined, and count as a failed start.
        leased = self.processes.lease_left() > self.timing.fence / 2
        return leased and not self.processes.remains(rank) and not self._in_the_way(rank)

    def _in_the_way(self, rank: int) -> bool:
        """True while members here are still in the step that the loss of ``rank`` cut short."""
        step, until = self._cut_short.get(rank, (0, 0.0))
        if self.timers.now() >= until:
            return False
        doing = self._doing()
        return any(each.phase != WAITING_FOR_RANKS for each in doing) and all(each.step <= step for each in doing)

    def _doing(self) -> list[Activity]:
        """The activities of the members on this node."""
        return [self.processes.activity(rank) for rank in self._members_here()]

    def start_lost(self) -> None:
        """Start every rank of this node that is lost, and may come again."""
        for rank in self._ranks:
            if self.state.ranks[rank].standing == "lost":
                self.start(rank, self.state.ranks[rank].incarnation + 1)

    def close(self) -> None:
        """No rank is started any more."""
        self._closed = True

    # -- losses -------------------------------------------------------------------------

    def record_losses(self, event: Lost) -> None:
        """Count and report losses, and start the ranks again. Every agent keeps the same counts: any can coordinate."""
        for index, loss in enumerate(event.losses):
            step = event.steps[index] if index < len(event.steps) else -1
            if loss.rank in self._ranks:
                summarize(loss, step)
            own = loss.ending is Ending.ERROR
            verdict = self.failures.record(loss.rank, loss.incarnation, step, own, event.at)
            if loss.ending is Ending.FALL_BACK:
                verdict = verdict or self.failures.fell_back(loss.rank, loss.incarnation, step)
            if verdict is not None and self._coordinates:
                self.append(JobEnded(ExitCode.DETERMINISTIC, "\n".join((verdict, *loss.last_lines))))
            if loss.rank in self._ranks:
                self._replace(loss, _FALL_BACK_SECONDS if loss.ending in (Ending.FALL_BACK, Ending.BEGIN_ANEW) else 0.0)
        self.start_anew_unless_begun(event.losses[0].rank)

    def record_node(self, losses: Sequence[Loss], at: float) -> None:
        """Count the ranks that were lost with a node. An agent of that node starts them again, once there is one."""
        verdicts = [self.failures.record(loss.rank, loss.incarnation, -1, False, at) for loss in losses]
        verdict = next(filter(None, verdicts), None)
        if verdict is not None and self._coordinates:
            self.append(JobEnded(ExitCode.DETERMINISTIC, verdict))

    def _replace(self, loss: Loss, pause: float) -> None:
        state = self.state.ranks[loss.rank]
        if state.standing != "lost" or loss.incarnation != state.incarnation:
            return
        if self.failures.failed_to_join(loss.rank, loss.incarnation):
            why = "several starts in a row failed before the rank had joined the job"
            # Without it there would be no start; later, the others go on.
            if self.state.decided == 0:
                self.append(JobEnded(ExitCode.DETERMINISTIC, f"rank {loss.rank}: {why}"))
            else:
                self.append(Abandoned((loss.rank,), why))
        elif state.may_return:
            incarnation = loss.incarnation + 1
            step = max((0, *(each.step for each in self._doing())))
            self._cut_short[loss.rank] = step, self.timers.now() + self.timing.resumed
            # A rank that falls back is to find a job that starts anew: all others are ending, too.
            self.timers.after(self.failures.cool_down(loss.rank) + pause, lambda: self.start(loss.rank, incarnation))

    def end_newcomers(self) -> None:
        """No member is left that the waiting ranks could join: they begin anew with all others."""
        for rank in self.state.reports:
            if rank in self.processes.running():
                self.processes.kill(rank, "the job that it was to join starts anew")

    def start_anew_unless_begun(self, lost: int) -> None:
        """Before the first step no rank holds state, and the others cannot begin without the lost one."""
        if self.state.preparing and not self.state.quiet:
            why = f"rank {lost} was lost before the first step"
            if any([self.processes.kill(rank, why) for rank in self._members_here()]):  # noqa: C419 - kills them all
                next_is = "all ranks are started again" if self.state.respawn else "the job ends"
                say(f"{why}, when no rank could go on without it: {next_is}")

    def admitted(self, decision: Decision) -> None:
        """These incarnations are members now."""
        for rank, address in decision.members.items():
            self.failures.admitted(rank, address.incarnation)
        verdict = self.failures.started_anew() if decision.reason == "start" and decision.generation > 1 else None
        if verdict is not None and self._coordinates:
            self.append(JobEnded(ExitCode.DETERMINISTIC, verdict))
