"""An agent's answers to ``megatron.elastic.ctl``: the state of the job, and requests to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

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

    def handle(self, command: Command) -> dict[str, Any]:
        """The answer to one command; ``error`` says why it is refused."""
        ranks = command.ranks if isinstance(command, Drain | Admit) else ()
        unknown = [rank for rank in ranks if rank not in self._state.ranks]
        if unknown:
            return {"error": f"no such ranks: {unknown}; there are 0 … {len(self._state.ranks) - 1}"}
        match command:
            case Status():
                return self._status()
            case Admit():
                self._append(Readmitted(ranks))
            case _:
                self._append(Wanted(command))
        return {"accepted": type(command).__struct_config__.tag, "run_id": self._run_id, "ranks": list(ranks)}

    def _status(self) -> dict[str, Any]:
        state, pids = self._state, self._pids()
        rows = {}
        for rank, (_, idle) in sorted(self._table().items()):
            rows[str(rank)] = {
                "pid": pids.get(rank, 0),
                "step": idle.step,
                "phase": idle.phase,
                "waiting_for": list(idle.waiting_for),
                "idle_s": round(idle.seconds, 3),
            }
        return {
            "run_id": self._run_id,
            "up_s": round(time.monotonic() - self._since, 1),
            "generation": {"decided": state.decided, "frozen": state.frozen, "missing": list(state.missing())},
            "members": list(state.members),
            "pending": state.pending().words(),
            "tolerance": {"generation": state.announced[0], "text": state.announced[1]},
            "ranks": {
                str(rank): {"standing": each.standing, "incarnation": each.incarnation, "returns": state.returns(rank)}
                for rank, each in state.ranks.items()
            },
            "nodes": {str(n): self._node(n) for n in state.nodes},
            "workers_here": rows,
        }

    def _node(self, number: int) -> dict[str, Any]:
        """``out_s``: for how long its lost ranks are not started again."""
        node, now = self._state.nodes[number], self._clock.now()
        record = self._state.quarantine.nodes.get(number, NodeRecord())
        out = round(max(0.0, record.until - now), 1) if record.out else 0.0
        return {"host": node.host, "alive": node.alive, "losses_in_1h": len(record.recent(now)), "out_s": out}
