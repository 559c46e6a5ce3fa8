"""Clocks for a plan: the slack of its tables, turned into lower clocks (or a boost of the busiest cells).

Idea: ``frequency.balance_clocks`` levels how long cells are busy, but in a
pipeline a cell that waits is also passed through by every fill and drain, so
levelling alone would lengthen the step. Pipeline by pipeline, the clocks at
which cells would be busy until the deadline are therefore approached from the
present ones by bisection, each try timed by running the plan's own tables.

The result goes into ``Plan.frequencies_khz``; whether it can be set is the
platform's answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron.elastic.plan.cost import PPM, plan_costs
from megatron.elastic.plan.frequency import ClockFit, ClockRange, top_clock
from megatron.elastic.plan.model import Plan, Profile
from megatron.elastic.plan.schedule.table import components
from megatron.elastic.plan.schedule.timing import execute

__all__ = ["clocked_time", "with_clocks"]

ROUNDS = 8


def clocked_time(
    plan: Plan,
    profile: Profile,
    fits: Mapping[int, ClockFit],
    ranges: Mapping[int, ClockRange],
    clocks: Mapping[int, int],
) -> int:
    """Step time (ns) of the plan's tables with ``clocks`` (kHz by cell; absent: the nominal clock)."""
    cells = []
    for cell in plan.cells:
        khz = clocks.get(cell.id)
        if khz is None or cell.id not in fits:
            cells.append(cell)
            continue
        nominal = fits[cell.id].time_ns(ranges[cell.id].nominal_khz)
        cells.append(replace(cell, speed_ppm=max(1, cell.speed_ppm * nominal // max(1, fits[cell.id].time_ns(khz)))))
    return execute(plan, plan_costs(plan.pieces, plan.edges, cells, profile)).makespan


def with_clocks(
    plan: Plan,
    profile: Profile,
    fits: Mapping[int, ClockFit],
    ranges: Mapping[int, ClockRange],
    boost: bool = False,
    tolerance_ppm: int = 0,
) -> Plan:
    """The plan with clocks that make it no slower than at nominal clocks (plus ``tolerance_ppm``).

    ``fits[cell]``: time of one row through the cell's units. With ``boost`` the
    deadline is that of the highest allowed clocks. Cells without fit or range keep
    their clock.
    """
    rows: dict[int, int] = {}
    for piece in plan.pieces:
        rows[piece.cell] = rows.get(piece.cell, 0) + len(piece.rows)
    cells = [cell for cell in sorted(rows) if cell in fits and cell in ranges]
    if not cells:
        return plan
    clocks = {cell: top_clock(ranges[cell], boost) for cell in cells}
    limit = clocked_time(plan, profile, fits, ranges, clocks)
    limit += limit * tolerance_ppm // PPM
    for group in _pipelines(plan):
        floors = {}
        for cell in sorted(group.intersection(cells)):
            wanted = fits[cell].clock_khz(limit // rows[cell])
            floors[cell] = clocks[cell] if wanted is None else min(clocks[cell], ranges[cell].at_least(wanted))
        clocks = _lowest(plan, profile, fits, ranges, clocks, floors, limit)
    return replace(plan, frequencies_khz=tuple(sorted(clocks.items())))


def _pipelines(plan: Plan) -> list[set[int]]:
    """Cells that depend on each other, group by group."""
    return [{plan.pieces[number].cell for number in group} for group in components(plan.pieces, plan.edges)]


def _lowest(
    plan: Plan,
    profile: Profile,
    fits: Mapping[int, ClockFit],
    ranges: Mapping[int, ClockRange],
    clocks: dict[int, int],
    floors: Mapping[int, int],
    limit: int,
) -> dict[int, int]:
    """``clocks`` with those of ``floors`` as far down towards them as the step time allows."""
    best, low, high = clocks, 1, 1 << ROUNDS
    while low <= high:
        middle = (low + high) // 2
        tried = dict(clocks)
        for cell, floor in floors.items():
            tried[cell] = ranges[cell].at_least(clocks[cell] - ((clocks[cell] - floor) * middle >> ROUNDS))
        if clocked_time(plan, profile, fits, ranges, tried) <= limit:
            best, low = tried, middle + 1
        else:
            high = middle - 1
    return best
