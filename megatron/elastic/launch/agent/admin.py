"""An agent's answers to ``megatron.elastic.ctl``: the state of the job, and requests to it."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron.elastic.control.answers import (
    Acceptance,
    Answer,
    GenerationStatus,
    JobStatus,
    NodeStatus,
    RankStatus,
    Refusal,
    ToleranceStatus,
    WorkerStatus,
)
from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import Event, Readmitted, Wanted
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.quarantine import NodeRecord
from megatron.elastic.control.requests import Admit, Command, Drain, Status
from megatron.elastic.launch.agent.node_leases import Table

__all__ = ["Admin"]


class Admin:
    """Serves one agent's console. ``table``: what the workers here do; ``pids``: their processes."""

    def __init__(
        self,
        run_id: str,
        state: Generations,
        clock: JobClock,
        table: Callable[[], Table],
        pids: Callable[[], dict[int, int]],
        append: Callable[[Event], None],
    ) -> None:
        self._run_id, self._state, self._clock = run_id, state, clock
        self._table, self._pids, self._append = table, pids, append
        self._since = time.monotonic()

    def handle(self, command: Command) -> Answer:
        """The answer to one command."""
        ranks = command.ranks if isinstance(command, Drain | Admit) else ()
        unknown = [rank for rank in ranks if rank not in self._state.ranks]
        if unknown:
            return Refusal(f"no such ranks: {unknown}; there are 0 … {len(self._state.ranks) - 1}")
        match command:
            case Status():
                return self._status()
            case Admit():
                self._append(Readmitted(ranks))
            case _:
                self._append(Wanted(command))
        return Acceptance(str(type(command).__struct_config__.tag), self._run_id, ranks)

    def _status(self) -> JobStatus:
        state, pids = self._state, self._pids()
        return JobStatus(
            run_id=self._run_id,
            up_s=round(time.monotonic() - self._since, 1),
            generation=GenerationStatus(state.decided, state.frozen, tuple(state.missing())),
            members=tuple(state.members),
            pending=tuple(state.pending().words()),
            tolerance=ToleranceStatus(*state.announced),
            ranks={
                rank: RankStatus(each.standing, each.incarnation, state.returns(rank))
                for rank, each in state.ranks.items()
            },
            nodes={number: self._node(number) for number in state.nodes},
            workers_here={
                rank: WorkerStatus(
                    pids.get(rank, 0), idle.step, idle.phase, tuple(idle.waiting_for), round(idle.seconds, 3)
                )
                for rank, (_, idle) in sorted(self._table().items())
            },
        )

    def _node(self, number: int) -> NodeStatus:
        node, now = self._state.nodes[number], self._clock.now()
        record = self._state.quarantine.nodes.get(number, NodeRecord())
        out = round(max(0.0, record.until - now), 1) if record.out else 0.0
        return NodeStatus(node.host, node.alive, len(record.recent(now)), out)
