"""A plan's tables run for real, with timed waits instead of kernels: the simulator's yardstick.

Idea: one thread a cell walks its table; compute actions sleep for their cost,
sends hand over a message that may be taken once its transfer time has passed,
receives wait. Nothing is shared with the simulator but the tables and costs, so
the difference between both makespans is the simulator's error plus what the
machine adds. That addition is measured too: *dilation* is the time slept over
the time asked for; above ``max_dilation`` the run says nothing and is refused.

Threads suffice because waits release the interpreter lock. Waits should be long
against the scheduler's tick (the unit of ``scale`` is wall ns per cost ns).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from megatron.elastic.plan.cost import Costs, plan_costs
from megatron.elastic.plan.model import Action, Op, Plan, Profile
from megatron.elastic.plan.schedule.timing import duration, execute

__all__ = ["Emulation", "MachineTooBusy", "emulate"]

_SENDS = {Op.SEND_FORWARD: Op.RECV_FORWARD, Op.SEND_BACKWARD: Op.RECV_BACKWARD}


class MachineTooBusy(RuntimeError):
    """Waits took so much longer than asked for that the result would say nothing."""


@dataclass(frozen=True)
class Emulation:
    """Measured and simulated makespan (cost ns), and how much longer waits took than asked for."""

    measured_ns: float
    simulated_ns: int
    dilation: float

    @property
    def error(self) -> float:
        """Measured over simulated, less one."""
        return self.measured_ns / self.simulated_ns - 1


@dataclass
class _Wire:
    """Messages under way: key → wall time from which they may be taken."""

    ready: dict[tuple[Op, int], float] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def send(self, key: tuple[Op, int], at: float) -> None:
        with self.changed:
            self.ready[key] = at
            self.changed.notify_all()

    def receive(self, key: tuple[Op, int], deadline: float) -> None:
        with self.changed:
            while key not in self.ready:
                if not self.changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"{key[0].value} of edge {key[1]} never came")
            at = self.ready[key]
        time.sleep(max(0.0, at - time.monotonic()))


@dataclass
class _Walker:
    """One cell's thread."""

    table: tuple[Action, ...]
    costs: Costs
    scale: float
    wire: _Wire
    deadline: float
    asked: float = 0.0
    slept: float = 0.0
    ended: float = 0.0
    failure: BaseException | None = None

    def run(self, start: threading.Barrier) -> None:
        start.wait()
        try:
            for action in self.table:
                self._perform(action)
        except BaseException as failure:
            self.failure = failure
        self.ended = time.monotonic()

    def _perform(self, action: Action) -> None:
        if action.op in _SENDS:
            delay = self.costs.edges[action.edge] * self.scale / 1e9
            self.wire.send((_SENDS[action.op], action.edge), time.monotonic() + delay)
        elif action.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD):
            self.wire.receive((action.op, action.edge), self.deadline)
        else:
            asked = duration(action, self.costs.pieces[action.piece]) * self.scale / 1e9
            before = time.monotonic()
            time.sleep(asked)
            self.slept += time.monotonic() - before
            self.asked += asked


def emulate(
    plan: Plan, profile: Profile, scale: float, max_dilation: float = 0.02, timeout: float = 120.0
) -> Emulation:
    """Run ``plan`` once. Raises :class:`MachineTooBusy`, or what a cell's thread raised."""
    costs = plan_costs(plan.pieces, plan.edges, plan.cells, profile)
    wire, deadline = _Wire(), time.monotonic() + timeout
    walkers = [_Walker(table, costs, scale, wire, deadline) for _, table in plan.tables]
    start = threading.Barrier(len(walkers) + 1)
    threads = [threading.Thread(target=walker.run, args=(start,), daemon=True) for walker in walkers]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.monotonic()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()) + 1.0)
    for walker in walkers:
        if walker.failure is not None:
            raise walker.failure
    asked = sum(walker.asked for walker in walkers)
    dilation = sum(walker.slept for walker in walkers) / asked - 1 if asked else 0.0
    if dilation > max_dilation:
        raise MachineTooBusy(f"waits took {dilation:.1%} longer than asked for (limit {max_dilation:.1%})")
    measured = (max(walker.ended for walker in walkers) - began) * 1e9 / scale
    return Emulation(measured, execute(plan, costs).makespan, dilation)
