"""The coordinator's rulings: the ranks that are killed for suspicions and hangs.

Holds no facts of its own: rules are in :mod:`megatron.elastic.control.suspicion`,
facts in the journal's state and the idle table. It appends verdicts; the agent of
the condemned rank carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import Abandoned, Condemned, Event, JobEnded, Lost, Reformed, Suspected
from megatron.elastic.control.exits import Ending, ExitCode
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.suspicion import Accusation, Idle, Ruling, Suspicions, hang_verdict
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.loop import Timers

__all__ = ["HangArbiter"]


class HangArbiter:
    """Used on the coordinating agent only."""

    def __init__(
        self, state: Generations, timing: Timing, timers: Timers, clock: JobClock, append: Callable[[Event], None]
    ) -> None:
        self._state, self._timing, self._timers, self._clock, self._append = state, timing, timers, clock, append
        self._suspicions = Suspicions()
        self._ruled = 0
        """Newest generation in which a rank was condemned for a hang or a deadlock was broken up."""
        self._circle_at: int | None = None
        self._frozen, self._frozen_since = 0, 0.0

    # -- accusations ------------------------------------------------------------

    def hear(self, event: Suspected) -> None:
        """Take an accusation; the ruling follows after a grace in which a death, its usual cause, becomes known."""
        accusation = Accusation(event.by, event.rank, event.why, event.silent)
        if not self._state.quiet:
            return
        silence = self._suspicions.silence and self._suspicions.generation == event.generation
        first = self._suspicions.add(event.generation, accusation)
        if event.silent and not silence:  # other ranks may have found other hosts silent
            self._timers.after(self._timing.apart, lambda: self._decide_on(event.generation))
        elif first:
            self._timers.after(self._timing.grace, lambda: self._decide_unless_silent(event.generation))

    def _decide_unless_silent(self, generation: int) -> None:
        if not self._suspicions.silence:
            self._decide_on(generation)

    def _decide_on(self, generation: int) -> None:
        state = self._state
        if state.frozen != generation or state.ended is not None:
            return
        incarnations = {rank: state.ranks[rank].incarnation for rank in state.members}
        verdict = self._suspicions.verdict(incarnations, {rank: state.node_of(rank) for rank in state.ranks})
        if verdict is not None and verdict.kind == "reform":
            self._append(Reformed(generation, verdict.why))
        elif verdict is not None and verdict.kind == "cut off":
            self._give_up(verdict)
        elif verdict is not None:
            self._condemn(verdict)

    def _give_up(self, verdict: Ruling) -> None:
        """Lose the ranks of nodes that are cut off. All ranks would wait for each new start of one, so none is made."""
        state = self._state
        if state.preparing:  # no rank has state to go on from
            self._append(JobEnded(ExitCode.STATE_LOST, f"{verdict.why}: the job ends"))
            return
        gone = [rank for rank in state.members if state.node_of(rank) in verdict.nodes]
        self._append(Abandoned(tuple(gone), f"{verdict.why}; once it does, `ctl admit` starts them"))
        for rank in gone:
            self._append(Condemned(rank, state.ranks[rank].incarnation, verdict.why))

    def _condemn(self, verdict: Ruling) -> None:
        rank_state = self._state.ranks[verdict.rank]
        if rank_state.standing != "done":
            self._append(Condemned(verdict.rank, rank_state.incarnation, verdict.why))
        elif rank_state.announced:
            # Its end is no loss, so nothing would follow from one: the others would wait for ever.
            why = f"rank {verdict.rank} ended as it had announced, but the other ranks still wait for it: the job ends"
            self._append(JobEnded(ExitCode.DETERMINISTIC, why))
        else:  # it left without a word, and is missed
            host = self._state.nodes[self._state.node_of(verdict.rank)].host
            loss = Loss(verdict.rank, rank_state.incarnation, host, "exit code 0", ending=Ending.LEFT)
            self._append(Lost((loss,), (-1,), self._clock.now()))

    # -- hangs ----------------------------------------------------------------------

    def consider(self, table: Mapping[int, tuple[int, Idle]]) -> None:
        """Look at the activity of all ranks; called now and then."""
        state = self._state
        if state.fresh or state.ended is not None:
            return
        members = {
            rank: table[rank][1]
            for rank in state.members
            if rank in table and table[rank][0] == state.ranks[rank].incarnation
        }
        if not state.quiet:
            self._consider_recovery(members)
        elif len(members) == len(state.members) and self._ruled < state.decided:
            self._consider_step(members)

    def _consider_step(self, members: Mapping[int, Idle]) -> None:
        verdict = hang_verdict(members)
        if verdict is not None:
            self._ruled = self._state.decided
            self._condemn(verdict)
        elif all(idle.seconds > 2 * idle.limit for idle in members.values()):
            self._ruled = self._state.decided
            step = max(idle.step for idle in members.values())
            if self._circle_at == step:
                why = f"step {step}: no rank makes progress and none is at fault, for the second time"
                apart = self._nodes_apart(members)
                # Between nodes the network may be the cause, which another start may not find.
                code = ExitCode.STATE_LOST if apart else ExitCode.DETERMINISTIC
                named = f"; ranks of nodes {', '.join(map(str, apart))} wait for one another" if apart else ""
                self._append(JobEnded(code, why + named))
            else:
                self._circle_at = step
                self._append(Reformed(self._state.decided, "no rank makes progress and none is at fault"))

    def _nodes_apart(self, members: Mapping[int, Idle]) -> tuple[int, ...]:
        """Nodes whose ranks wait for ranks of other nodes, or are waited for there, ascending."""
        node_of = self._state.node_of
        pairs = {(node_of(rank), node_of(other)) for rank, idle in members.items() for other in idle.waiting_for}
        return tuple(sorted({node for pair in pairs if pair[0] != pair[1] for node in pair}))

    def _consider_recovery(self, members: Mapping[int, Idle]) -> None:
        """A member that neither reports for a frozen generation nor makes progress is hung."""
        state, now = self._state, self._timers.now()
        if self._frozen != state.frozen:
            self._frozen, self._frozen_since = state.frozen, now
        if now - self._frozen_since < self._timing.hang:
            return
        for rank in state.missing():
            idle = members.get(rank)
            if idle is not None and idle.seconds > self._timing.hang:
                self._frozen_since = now
                why = f"hung in {idle.phase!r}: no report for generation {state.frozen}"
                self._append(Condemned(rank, state.ranks[rank].incarnation, why))
