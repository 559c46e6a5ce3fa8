"""Restarts of a node's lost ranks, and the end of the job if a rank cannot be restarted.

A rank is started again when nothing is left of its former process and the other ranks of its node have recovered. They
come first, since the start of a program takes whole cores.

- A newcomer that ends before it takes part is started again after growing pauses, and then given up.
- If a rank ends before the first step, all ranks start anew.
- The ranks of a node in quarantine (:mod:`megatron.elastic.control.quarantine`) stay out until its time is over, or
  until the job cannot go on without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import Abandoned, Event, JobEnded, Lifted, Lost
from megatron.elastic.control.exits import Ending, ExitCode
from megatron.elastic.control.failures import Failures
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import WAITING_FOR_RANKS, Activity, Decision, Loss
from megatron.elastic.control.suspicion import Idle
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.losses import summarize
from megatron.elastic.launch.messages import say
from megatron.elastic.launch.workers.pool import Pool, Worker
from megatron.elastic.launch.workers.spawn import Spawner

__all__ = ["Respawn"]

_FALL_BACK_SECONDS = 2.0
_PAUSE_SECONDS = 0.02
"""Between two looks at whether a successor may start."""


class Respawn:
    """One agent's part. ``by_rank``: the workers that live here; ``failures``: counted alike by every agent."""

    def __init__(
        self,
        node: int,
        state: Generations,
        failures: Failures,
        by_rank: dict[int, Worker],
        loop: Loop,
        timing: Timing,
        clock: JobClock,
        pool: Pool,
        spawner: Spawner,
        append: Callable[[Event], None],
    ) -> None:
        self._node, self._state, self._failures, self._by_rank = node, state, failures, by_rank
        self._loop, self._timing, self._clock = loop, timing, clock
        self._pool, self._spawner, self._append = pool, spawner, append
        self._ranks = state.nodes[node].ranks
        self._out: frozenset[int] = frozenset()
        self._cut_short: dict[int, tuple[int, float]] = {}
        """Lost rank → newest step of a member here then, and the time until which the end of that step is awaited."""
        self._closed = False

    @property
    def _coordinates(self) -> bool:
        return self._state.coordinator() == self._node

    # -- starting -----------------------------------------------------------------------

    def start(self, rank: int, incarnation: int) -> None:
        """Start that life of ``rank``, unless it is not to be, or not to be any more."""
        state = self._state.ranks[rank]
        if self._state.preparing:  # the other ranks are about to end: it starts with them, not as a newcomer
            self._loop.after(self._timing.look, lambda: self.start(rank, incarnation))
            return
        wanted = self._state.returns(rank) or incarnation == 0
        late = state.standing == "lost" and incarnation <= state.incarnation
        if not wanted or late or self._closed or rank in self._by_rank:
            return
        if self._pool.keeps(rank) or self._in_the_way(rank):
            self._loop.after(_PAUSE_SECONDS, lambda: self.start(rank, incarnation))
            return
        self._cut_short.pop(rank, None)
        newcomer = rank >= self._state.nominal or not self._state.fresh
        self._by_rank[rank] = self._spawner.start(rank, incarnation, newcomer)

    def _in_the_way(self, rank: int) -> bool:
        """True while members here are still in the step that the loss of ``rank`` cut short."""
        step, until = self._cut_short.get(rank, (0, 0.0))
        if time.monotonic() >= until:
            return False
        doing = self._doing()
        return any(each.phase != WAITING_FOR_RANKS for each in doing) and all(each.step <= step for each in doing)

    def _doing(self) -> list[Activity]:
        """The activities of the members on this node."""
        state = self._state.ranks
        return [w.slot.look().activity for r, w in self._by_rank.items() if state[r].standing == "member"]

    def start_lost(self) -> None:
        """Start every rank of this node that is lost, and may come again."""
        for rank in self._ranks:
            if self._state.ranks[rank].standing == "lost":
                self.start(rank, self._state.ranks[rank].incarnation + 1)

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
            verdict = self._failures.record(loss.rank, loss.incarnation, step, own, event.at)
            if loss.ending is Ending.FALL_BACK:
                verdict = verdict or self._failures.fell_back(loss.rank, loss.incarnation, step)
            if verdict is not None and self._coordinates:
                self._append(JobEnded(ExitCode.DETERMINISTIC, "\n".join((verdict, *loss.last_lines))))
            if loss.rank in self._ranks:
                self._replace(loss, _FALL_BACK_SECONDS if loss.ending in (Ending.FALL_BACK, Ending.BEGIN_ANEW) else 0.0)
        self.start_anew_unless_begun(event.losses[0].rank)

    def _replace(self, loss: Loss, pause: float) -> None:
        state = self._state.ranks[loss.rank]
        if state.standing != "lost" or loss.incarnation != state.incarnation:
            return
        if self._failures.failed_to_join(loss.rank, loss.incarnation):
            why = "several starts in a row failed before the rank had joined the job"
            # Without it there would be no start; later, the others go on.
            if self._state.decided == 0:
                self._append(JobEnded(ExitCode.DETERMINISTIC, f"rank {loss.rank}: {why}"))
            else:
                self._append(Abandoned((loss.rank,), why))
        elif state.may_return:
            incarnation = loss.incarnation + 1
            step = max((0, *(each.step for each in self._doing())))
            self._cut_short[loss.rank] = step, time.monotonic() + self._timing.resumed
            # A rank that falls back is to find a job that starts anew: all others are ending, too.
            self._loop.after(self._failures.cool_down(loss.rank) + pause, lambda: self.start(loss.rank, incarnation))

    def end_newcomers(self) -> None:
        """No member is left that the waiting ranks could join: they begin anew with all others."""
        for rank in self._state.reports:
            if rank in self._by_rank:
                self._pool.kill(self._by_rank[rank], "the job that it was to join starts anew")

    def start_anew_unless_begun(self, lost: int) -> None:
        """Before the first step no rank holds state, and the others cannot begin without the lost one."""
        if self._state.preparing and not self._state.quiet:
            mine = [worker for rank, worker in self._by_rank.items() if self._state.ranks[rank].standing == "member"]
            if any(worker.killed_for is None for worker in mine):
                next_is = "all ranks are started again" if self._state.respawn else "the job ends"
                say(f"rank {lost} was lost before the first step, when no rank could go on without it: {next_is}")
            for worker in mine:
                self._pool.kill(worker, f"rank {lost} was lost before the first step")

    def admitted(self, decision: Decision) -> None:
        """These incarnations are members now."""
        for rank, address in decision.members.items():
            self._failures.admitted(rank, address.incarnation)
        verdict = self._failures.started_anew() if decision.reason == "start" and decision.generation > 1 else None
        if verdict is not None and self._coordinates:
            self._append(JobEnded(ExitCode.DETERMINISTIC, verdict))

    # -- nodes that are left out ----------------------------------------------------------

    def follow_quarantine(self, event: Event) -> None:
        """After each journal entry: report nodes that it put out or let in; start this node's ranks if it was out."""
        before, self._out = self._out, self._state.quarantine.out()
        for node in self._out - before:
            record = self._state.quarantine.nodes[node]
            if self._coordinates:
                say(
                    f"node {node} ({self._state.nodes[node].host}) lost ranks more often than the others, "
                    f"{len(record.losses)} times within an hour: its lost ranks are not started again for "
                    f"{record.until - record.losses[-1]:.0f} s (--elastic-quarantine-after; ctl admit starts them now)"
                )
        for node in before - self._out:
            why = event.why if isinstance(event, Lifted) else "asked for" if self._state.members else "no rank is left"
            if self._coordinates:
                say(f"node {node} ({self._state.nodes[node].host}): its lost ranks are started again: {why}")
        if self._node in before - self._out:
            self.start_lost()

    def consider_quarantine(self, table: Mapping[int, tuple[int, Idle]]) -> None:
        """On the coordinator, now and then: lift quarantines that are over or whose ranks others wait for."""
        state, quarantine = self._state, self._state.quarantine
        idle = [each for rank, (_, each) in table.items() if state.ranks[rank].standing == "member"]
        missed = {rank for each in idle if each.phase == WAITING_FOR_RANKS for rank in each.waiting_for}
        due = quarantine.due(self._clock.now())
        for node in sorted(quarantine.out()):
            needed = missed & set(state.nodes[node].ranks)
            if node in due or needed:
                why = f"ranks {sorted(needed)} are needed" if needed else "its time is over"
                self._append(Lifted(node, quarantine.nodes[node].level, why))
