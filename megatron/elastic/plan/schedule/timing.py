"""The time of a plan: its tables executed with costs instead of kernels.

Idea: the very tables the engine runs are walked cell by cell; a send starts its
transfer when its producer is done and costs the cell nothing (isend), a receive
waits for the arrival. The result is exact for these costs: no event queue is
needed, because with asynchronous sends every action's start depends only on the
cell's own previous action and on one arrival.

Costs are integers (ns), so the answer is the same on every process and may
choose between plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.elastic.plan.cost import Costs, PieceCost, plan_costs
from megatron.elastic.plan.model import Action, Op, Plan, Profile

__all__ = ["Interval", "TimedTables", "execute", "plan_time", "walk"]

_SENDS = {Op.SEND_FORWARD: Op.RECV_FORWARD, Op.SEND_BACKWARD: Op.RECV_BACKWARD}
_RECEIVES = frozenset(_SENDS.values())


@dataclass(frozen=True)
class Interval:
    """A compute action with its time, ns from the start of the step."""

    cell: int
    op: Op
    piece: int
    start: int
    end: int


@dataclass(frozen=True)
class TimedTables:
    """Execution of all tables: end of the last action, end and busy time per cell, intervals if asked for."""

    makespan: int
    ends: dict[int, int]
    busy: dict[int, int]
    intervals: tuple[Interval, ...] = ()

    def idle_share(self) -> float:
        """Part of cell-time spent waiting (bubbles), over the cells that have a table."""
        whole = self.makespan * len(self.busy)
        return 1 - sum(self.busy.values()) / whole if whole else 0.0


def duration(action: Action, cost: PieceCost) -> int:
    """Time of a compute action on its cell."""
    if action.op is Op.FORWARD:
        return cost.forward
    if action.op is Op.BACKWARD:
        return cost.backward
    return cost.weight if action.op is Op.BACKWARD_WEIGHT else cost.backward - cost.weight


def execute(plan: Plan, costs: Costs, record: bool = False) -> TimedTables:
    """Run all tables. Raises ``ValueError`` if they deadlock (a validated plan cannot)."""
    return walk(plan.tables, costs, record)


def walk(
    lines: Iterable[tuple[int, Sequence[Action]]],
    costs: Costs,
    record: bool = False,
    begins: Mapping[int, int] | None = None,
) -> TimedTables:
    """Run some (cell, table) lines that need no others, each from ``begins[cell]`` ns on (0 unless given).

    Raises ``ValueError`` if they deadlock.
    """
    tables = dict(lines)
    at = dict.fromkeys(tables, 0)
    now = {cell: begins[cell] for cell in tables} if begins else dict.fromkeys(tables, 0)
    busy = dict.fromkeys(tables, 0)
    arrival: dict[tuple[Op, int], int] = {}
    waiting: dict[tuple[Op, int], int] = {}
    intervals: list[Interval] = []
    ready = list(tables)
    pieces = costs.pieces
    while ready:
        cell = ready.pop()
        table, position, time = tables[cell], at[cell], now[cell]
        while position < len(table):
            action = table[position]
            op = action.op
            if op in _RECEIVES:
                arrived = arrival.get((op, action.edge))
                if arrived is None:
                    waiting[op, action.edge] = cell
                    break
                time = max(time, arrived)
            elif op in _SENDS:
                key = (_SENDS[op], action.edge)
                arrival[key] = time + costs.edges[action.edge]
                if key in waiting:
                    ready.append(waiting.pop(key))
            else:
                spent = duration(action, pieces[action.piece])
                if record:
                    intervals.append(Interval(cell, op, action.piece, time, time + spent))
                busy[cell] += spent
                time += spent
            position += 1
        at[cell], now[cell] = position, time
    stuck = [cell for cell in tables if at[cell] < len(tables[cell])]
    if stuck:
        raise ValueError(f"tables deadlock at cells {stuck[:8]}")
    intervals.sort(key=lambda i: (i.start, i.cell, i.end))
    return TimedTables(max(now.values(), default=0), now, busy, tuple(intervals))


def plan_time(plan: Plan, profile: Profile) -> int:
    """Makespan of the pipeline phase of one step, ns."""
    return execute(plan, plan_costs(plan.pieces, plan.edges, plan.cells, profile)).makespan
