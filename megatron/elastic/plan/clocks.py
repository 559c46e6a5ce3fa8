"""Clocks for a plan: the slack of its tables, turned into lower clocks (or a boost of the busiest cells).

Idea: ``frequency.balance_clocks`` levels how long cells are busy, but in a
pipeline a cell that waits is also passed through by every fill and drain, so
levelling alone would lengthen the step. Pipeline by pipeline, the clocks at
which cells would be busy until the deadline are therefore approached from the
present ones by bisection, each try timed by running that pipeline's own tables.

The result goes into ``Plan.frequencies_khz``; whether it can be set is the
platform's answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron.elastic.plan.cost import PPM, Costs, piece_costs, plan_costs
from megatron.elastic.plan.frequency import ClockFit, ClockRange, top_clock
from megatron.elastic.plan.model import Action, Cell, Piece, Plan, Profile
from megatron.elastic.plan.schedule.table import components
from megatron.elastic.plan.schedule.timing import walk

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
    return max(one.time_ns(profile, fits, ranges, clocks) for one in _pipelines(plan, profile))


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
    pipelines = _pipelines(plan, profile)
    limit = max(one.time_ns(profile, fits, ranges, clocks) for one in pipelines)
    limit += limit * tolerance_ppm // PPM
    for one in pipelines:
        top = {cell.id: clocks[cell.id] for cell in one.cells if cell.id in clocks}
        floors = {}
        for cell in sorted(top):
            wanted = fits[cell].clock_khz(limit // rows[cell])
            floors[cell] = top[cell] if wanted is None else min(top[cell], ranges[cell].at_least(wanted))
        clocks |= _lowest(one, profile, fits, ranges, top, floors, limit)
    return replace(plan, frequencies_khz=tuple(sorted(clocks.items())))


@dataclass(frozen=True)
class _Pipeline:
    """Cells that depend on each other, and on no others: their part of a plan, which is timed alone."""

    cells: tuple[Cell, ...]
    pieces: tuple[Piece, ...]
    tables: tuple[tuple[int, tuple[Action, ...]], ...]
    edges: tuple[int, ...]
    """Times of all transfers of the plan, ns."""

    def time_ns(
        self,
        profile: Profile,
        fits: Mapping[int, ClockFit],
        ranges: Mapping[int, ClockRange],
        clocks: Mapping[int, int],
    ) -> int:
        """Return the time of the tables with ``clocks`` (kHz by cell; absent: the nominal clock)."""
        cells = []
        for cell in self.cells:
            khz = clocks.get(cell.id)
            if khz is None or cell.id not in fits:
                cells.append(cell)
                continue
            fit = fits[cell.id]
            nominal, spent = fit.time_ns(ranges[cell.id].nominal_khz), max(1, fit.time_ns(khz))
            cells.append(replace(cell, speed_ppm=max(1, cell.speed_ppm * nominal // spent)))
        costs = piece_costs(self.pieces, cells, profile)
        by_piece = {piece.id: cost for piece, cost in zip(self.pieces, costs, strict=True)}
        return walk(self.tables, Costs(by_piece, self.edges)).makespan


def _pipelines(plan: Plan, profile: Profile) -> list[_Pipeline]:
    """The plan's parts that share no edge."""
    cells, tables = {cell.id: cell for cell in plan.cells}, dict(plan.tables)
    edges = plan_costs(plan.pieces, plan.edges, plan.cells, profile).edges
    found = []
    for group in components(plan.pieces, plan.edges):
        pieces = tuple(plan.pieces[number] for number in group)
        own = sorted({piece.cell for piece in pieces})
        lines = tuple((cell, tables[cell]) for cell in own if cell in tables)
        found.append(_Pipeline(tuple(cells[cell] for cell in own), pieces, lines, edges))
    return found


def _lowest(
    pipeline: _Pipeline,
    profile: Profile,
    fits: Mapping[int, ClockFit],
    ranges: Mapping[int, ClockRange],
    clocks: dict[int, int],
    floors: Mapping[int, int],
    limit: int,
) -> dict[int, int]:
    """``clocks`` of one pipeline, as far down towards ``floors`` as the step time allows."""
    best, low, high = clocks, 1, 1 << ROUNDS
    while low <= high:
        middle = (low + high) // 2
        tried = {
            cell: ranges[cell].at_least(clocks[cell] - ((clocks[cell] - floor) * middle >> ROUNDS))
            for cell, floor in floors.items()
        }
        if pipeline.time_ns(profile, fits, ranges, tried) <= limit:
            best, low = tried, middle + 1
        else:
            high = middle - 1
    return best
