"""Quarantines as one agent follows them: the ranks of a node that loses them again and again stay out for a time.

The rules are in :mod:`megatron.elastic.control.quarantine`, the facts in the journal's state. A quarantine ends when
its time is over, or when the job cannot go on without the ranks. A node whose hardware checks have a finding is left
out until they have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import Event, Examined, Lifted
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import WAITING_FOR_RANKS
from megatron.elastic.control.suspicion import Idle
from megatron.elastic.launch.messages import say

__all__ = ["Quarantines"]


@dataclass
class Quarantines:
    """One agent's part. ``let_in``: starts this node's lost ranks; ``append``: to the journal."""

    node: int
    state: Generations
    clock: JobClock
    let_in: Callable[[], None]
    append: Callable[[Event], None]
    _out: frozenset[int] = frozenset()

    def follow(self, event: Event) -> None:
        """After each journal entry: report nodes that it put out or let in; start this node's ranks if it was out."""
        before, self._out = self._out, self.state.quarantine.out()
        for node in self._out - before:
            if self.state.coordinator() == self.node:
                say(self._left_out(node))
        for node in before - self._out:
            why = self._why_in(event)
            if self.state.coordinator() == self.node:
                say(f"node {node} ({self.state.nodes[node].host}): its lost ranks are started again: {why}")
        if self.node in before - self._out:
            self.let_in()

    def _left_out(self, node: int) -> str:
        record, name = self.state.quarantine.nodes[node], f"node {node} ({self.state.nodes[node].host})"
        if record.finding:
            return (
                f"{name}: {record.finding}: its lost ranks are not started again until that is mended "
                "(--elastic-health; ctl admit starts them now)"
            )
        return (
            f"{name} lost ranks more often than the others, {len(record.losses)} times within an hour: its lost ranks "
            f"are not started again for {record.until - record.losses[-1]:.0f} s "
            "(--elastic-quarantine-after; ctl admit starts them now)"
        )

    def _why_in(self, event: Event) -> str:
        if isinstance(event, Lifted):
            return event.why
        if isinstance(event, Examined):
            return "its checks find nothing any more"
        return "asked for" if self.state.members else "no rank is left"

    def consider(self, table: Mapping[int, tuple[int, Idle]]) -> None:
        """On the coordinator, now and then: lift quarantines that are over or whose ranks others wait for."""
        state, quarantine = self.state, self.state.quarantine
        idle = [each for rank, (_, each) in table.items() if state.ranks[rank].standing == "member"]
        missed = {rank for each in idle if each.phase == WAITING_FOR_RANKS for rank in each.waiting_for}
        due = quarantine.due(self.clock.now())
        for node in sorted(quarantine.out()):
            needed = missed & set(state.nodes[node].ranks)
            if node in due or needed:
                why = f"ranks {sorted(needed)} are needed" if needed else "its time is over"
                self.append(Lifted(node, quarantine.nodes[node].level, why, needed=bool(needed)))
