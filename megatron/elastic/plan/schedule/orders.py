"""Compute orders: a fixed generator where the plan is regular, list scheduling elsewhere.

Idea: plain pipelines get Megatron's 1F1B (or, with a split backward, ZB-H1 as far as memory goes),
regular interleaved ones Megatron's interleaved order, so that an undisturbed
job runs what Megatron runs. Anything else is list-scheduled with several
memory caps and preferences, and the fastest result is kept (ties: the first,
which holds least). Deterministic.

Which is fastest is asked of one step from a common beginning; a caller that judges orders
otherwise (``policy``: steps that overlap) tries them all (:data:`ORDERINGS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megatron.elastic import _plan
from megatron.elastic.plan.cost import Costs, held_bytes, unit_sums
from megatron.elastic.plan.model import Edge, Piece, Profile, Topology
from megatron.elastic.plan.schedule.listing import Listing, Scheduler
from megatron.elastic.plan.schedule.table import (
    EdgeIndex,
    Step,
    interleaved,
    is_interleaved,
    is_pipeline,
    one_f_one_b,
    tables_from_orders,
    zero_bubble_h1,
)
from megatron.elastic.plan.schedule.timing import walk
from megatron.elastic.plan.topology import living_replicas

__all__ = ["ORDERINGS", "OrderInput", "Ordered", "Ordering", "compute_orders", "memory_rows", "row_caps"]


@dataclass(frozen=True)
class OrderInput:
    """Everything a compute order follows from. ``limit[cell]``: rows whose activations fit."""

    pieces: Sequence[Piece]
    edges: Sequence[Edge]
    index: EdgeIndex
    waves: Sequence[int]
    costs: Costs
    limit: Mapping[int, int]


@dataclass(frozen=True)
class Ordered:
    """Compute orders of a group's cells and, where finding them told, how long their tables take (ns)."""

    found: Mapping[int, list[Step]] | Listing
    makespan: int | None = None

    @property
    def cells(self) -> frozenset[int]:
        """The cells of the group."""
        return frozenset(self.found.cells if isinstance(self.found, Listing) else self.found)

    def orders(self) -> Mapping[int, list[Step]]:
        """By cell."""
        return self.found.orders() if isinstance(self.found, Listing) else self.found


def compute_orders(group: Sequence[int], work: OrderInput, split_backward: bool) -> Ordered:
    """Compute orders of ``group``, pieces that share neither cell nor edge with others."""
    stages = is_pipeline(group, work.pieces)
    if stages is not None and not split_backward:
        order = {cell: one_f_one_b(own, at, len(stages)) for at, (cell, own) in enumerate(stages)}
        return Ordered(order, _time_of_pipeline(stages, work))
    late: dict[int, list[Step]] | None = None
    least = 0
    if stages is not None and (delays := _weight_delays(stages, work)) is not None:
        late = {cell: zero_bubble_h1(own, at, len(stages), delays[at]) for at, (cell, own) in enumerate(stages)}
        if delays == list(range(len(stages))) and _even(stages, work.costs):
            return Ordered(late)
        least = walk(tables_from_orders(late, work.index), work.costs).makespan
    chunked = is_interleaved(group, work.pieces)
    if chunked is not None and not split_backward:
        return Ordered({cell: interleaved(chunks, at, len(chunked)) for at, (cell, chunks) in enumerate(chunked)})
    scheduler = Scheduler(group, work.pieces, work.edges, work.index, work.waves, work.costs)
    found = [
        scheduler.run(caps, split_backward, forward_first)
        for caps in row_caps(group, work)
        for forward_first in ((True, False) if split_backward else (True,))
    ]
    best = min(found, key=lambda listing: listing.makespan)
    if late is not None and least <= best.makespan:
        return Ordered(late, least)
    return Ordered(best, None if best.forced else best.makespan)


def _time_of_pipeline(stages: Sequence[tuple[int, list[int]]], work: OrderInput) -> int | None:
    """Return how long 1F1B takes (ns); None where the micro-batches of a stage are not alike."""
    pieces, costs, alike = work.costs.pieces, list[tuple[int, int, int, int, int]](), True
    for _, own in stages:
        cost, behind = pieces[own[0]], work.index.outgoing[own[0]]
        alike = alike and all(pieces[number] is cost for number in own)  # one object for all of one size on a cell
        costs.append((cost.forward, cost.backward, cost.weight, work.costs.edges[behind[0]] if behind else 0, 0))
    return _plan.pipeline_time(costs, len(stages[0][1]), 1, False) if alike else None


def _listed(group: Sequence[int], work: OrderInput, split_backward: bool, *, cap: int, forward_first: bool) -> Ordered:
    """Return a list schedule under caps 0 or 1, the two of :func:`row_caps`, or 2: all the rows that fit memory."""
    scheduler = Scheduler(group, work.pieces, work.edges, work.index, work.waves, work.costs)
    caps = row_caps(group, work)
    full = {cell: max(1, work.limit[cell]) for cell in caps[0]}
    found = scheduler.run((caps[0], caps[-1], full)[cap], split_backward, forward_first)
    return Ordered(found, None if found.forced else found.makespan)


Ordering = Callable[[Sequence[int], OrderInput, bool], Ordered]
"""(group, work, split the backward) → compute orders of the group's cells."""

ORDERINGS: tuple[Ordering, ...] = (
    compute_orders,
    *(partial(_listed, cap=cap, forward_first=first) for cap in range(3) for first in (True, False)),
)
"""Every way to order a group, the one for single steps first."""


def _even(stages: Sequence[tuple[int, list[int]]], costs: Costs) -> bool:
    """True if all stages take equally long: then no order is faster than ZB-H1's."""
    return len({(costs.pieces[own[0]].forward, costs.pieces[own[0]].backward) for _, own in stages}) == 1


def row_caps(group: Sequence[int], work: OrderInput) -> list[dict[int, int]]:
    """Candidate bounds on the rows each cell of a group may hold at once, the thriftiest first.

    1F1B holds (stages from here to the end) micro-batches; a cell that computes
    for several pipelines holds that for each of them. The second candidate gives
    every cell what the first gives the neediest (ZB-H1's reading of "1F1B's
    memory"). Both are cut to what the cell's memory leaves.
    """
    depth: dict[int, int] = {}
    for number in sorted(group, key=lambda n: -work.pieces[n].first):
        after = [depth[work.edges[e].target] for e in work.index.outgoing[number]]
        depth[number] = 1 + max(after, default=0)
    per_wave: dict[int, dict[int, int]] = {}
    deepest: dict[int, int] = {}
    for number in group:
        piece = work.pieces[number]
        rows = per_wave.setdefault(piece.cell, {})
        rows[work.waves[number]] = rows.get(work.waves[number], 0) + len(piece.rows)
        deepest[piece.cell] = max(deepest.get(piece.cell, 0), depth[number])
    thrifty = {cell: deepest[cell] * max(rows.values()) for cell, rows in per_wave.items()}
    even = dict.fromkeys(thrifty, max(thrifty.values()))
    caps = [{cell: max(1, min(rows, work.limit[cell])) for cell, rows in wanted.items()} for wanted in (thrifty, even)]
    return caps if caps[0] != caps[1] else caps[:1]


def memory_rows(pieces: Sequence[Piece], topology: Topology, profile: Profile) -> dict[int, int]:
    """Rows per cell whose activations fit beside what it holds (its largest piece's units count for each row)."""
    fixed = held_bytes(living_replicas(topology), profile, topology.tied, topology.grid.data_parallel_size)
    sums = unit_sums(unit.activation_bytes for unit in profile.units)
    widest: dict[int, int] = {}
    for piece in pieces:
        widest[piece.cell] = max(widest.get(piece.cell, 1), sums[piece.end] - sums[piece.first])
    memory = {cell.id: cell.memory_bytes for cell in topology.cells}
    return {cell: (memory[cell] - fixed.get(cell, 0)) // size for cell, size in widest.items()}


def _weight_delays(stages: Sequence[tuple[int, list[int]]], work: OrderInput) -> list[int] | None:
    """The delay of each stage's weight gradients in micro-batches; None if not even 1F1B fits."""
    delays = []
    for at, (cell, own) in enumerate(stages):
        capacity = work.limit[cell] // max(len(work.pieces[number].rows) for number in own)
        held = min(len(stages) - at, len(own))
        if held > capacity:
            return None
        delays.append(at if capacity >= len(own) else min(at, capacity - held))
    return delays
