"""Nominal and instant plans.

The *nominal* plan is Megatron's: micro-batch ``q`` runs through replica
``q % DP``, 1F1B on every cell. The *instant* plan keeps every unit where it is
and hands the rows of lost cells to living cells that hold the same units
(docs/design.md §7). Both are pure functions of integers.

:func:`assemble` builds a plan from shares. It numbers the pieces and derives edges from the overlaps of their rows.
Each independent group of pieces gets its own tables: the fixed 1F1B order for a plain pipeline, otherwise a list
schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megatron.elastic.plan.cost import plan_costs
from megatron.elastic.plan.dataflow import (
    PlanError,
    Share,
    home_rows,
    microbatches,
    number_pieces,
    piece_edges,
    reroute,
    resize,
    split_rows,
)
from megatron.elastic.plan.model import Action, Plan, Profile, Topology, UnitCost
from megatron.elastic.plan.schedule.orders import Ordered, Ordering, OrderInput, compute_orders, memory_rows
from megatron.elastic.plan.schedule.table import EdgeIndex, Step, components, index_edges, tables_from_orders
from megatron.elastic.plan.schedule.timing import walk
from megatron.elastic.plan.search.partition import CellCapacity, Model, PipelineTime, share_out
from megatron.elastic.plan.topology import is_whole, living_replicas

__all__ = [
    "Dataflow",
    "Draft",
    "assemble",
    "draft_instant",
    "instant_plan",
    "nominal_plan",
    "replica_times",
    "speed_quotas",
    "uniform_profile",
]

Dataflow = Literal["reroute", "resize"]
NEVER = 1 << 60
"""Time (ns) of a pipeline that cannot compute."""


def uniform_profile(units: int) -> Profile:
    """The profile before any measurement: every unit alike, backward twice the forward."""
    unit = UnitCost(1_000_000, 2_000_000, 1_000_000, 0, 0, 1, 0)
    return Profile((unit,) * units, latency_ns=0)


def nominal_plan(topology: Topology, profile: Profile | None = None) -> Plan:
    """The plan at launch: Megatron's sample grid, 1F1B (interleaved replicas: list schedule).

    Raises :class:`PlanError` when a cell is missing or the replicas are not the nominal ones.
    """
    alive = {cell.id for cell in topology.cells}
    missing = sorted({s.cell for r in topology.replicas for s in r.segments} - alive)
    if missing:
        raise PlanError(f"nominal plan with lost cells {missing}: use instant_plan")
    if len(topology.replicas) != topology.grid.data_parallel_size:
        raise PlanError(f"{len(topology.replicas)} replicas, data-parallel size {topology.grid.data_parallel_size}")
    profile = profile or uniform_profile(topology.units)
    _check_topology(topology, profile)
    return assemble(topology, profile, reroute(topology, _work(profile), home_rows(topology)), labels=("nominal",))


def instant_plan(
    topology: Topology,
    profile: Profile | None = None,
    dataflow: Dataflow = "reroute",
    mix_microbatches: bool = False,
    split_backward: bool = False,
    cut_microbatches: bool = False,
) -> Plan:
    """The plan right after a change: units stay where they are.

    Replicas with slow cells get fewer nominal micro-batches (:func:`speed_quotas`);
    rows of lost cells go to living holders, least loaded first. With ``cut_microbatches``
    (where every row's loss counts by itself) shares are exact to a row.

    Raises :class:`PlanError` when a unit has no living holder (then units must
    move first, see ``graph``) or rows do not fit the nominal grid.
    """
    profile = profile or uniform_profile(topology.units)
    return draft_instant(topology, profile, dataflow, mix_microbatches, split_backward, cut_microbatches).plan


def draft_instant(
    topology: Topology,
    profile: Profile,
    dataflow: Dataflow,
    mix_microbatches: bool = False,
    split_backward: bool = False,
    cut_microbatches: bool = False,
    ordering: Ordering = compute_orders,
) -> Draft:
    """:func:`instant_plan` with its time, before its tables are written; another ``ordering``, other tables."""
    _check_topology(topology, profile)
    work, quotas = _work(profile), speed_quotas(topology, profile, cut_microbatches)
    if quotas is not None and cut_microbatches:
        homes = split_rows(topology.grid, quotas)
    else:
        homes = home_rows(topology, quotas)
    if dataflow == "reroute":
        shares = reroute(topology, work, homes)
    else:
        shares = resize(topology, work, homes, mix_microbatches)
    return _drafted(topology, profile, shares, split_backward, (dataflow,), ordering)


def _work(profile: Profile) -> list[int]:
    return [unit.forward_ns + unit.backward_ns for unit in profile.units]


def speed_quotas(topology: Topology, profile: Profile, by_rows: bool = False) -> tuple[int, ...] | None:
    """Nominal micro-batches (or rows) per replica that even out how fast replicas are; None for Megatron's equal grid.

    Replicas differ by measured speed or, after earlier changes, by length. Lost
    stages count as nominally fast: peers serve them, and dealing rows evens out
    their load. Replicas that are not whole hold state and compute nothing.
    """
    times = replica_times(topology, profile, 1 if by_rows else topology.grid.micro_batch_size)
    if len(times) == topology.grid.data_parallel_size and len(set(times)) == 1:
        return None
    return share_out(topology.grid.global_batch_size if by_rows else microbatches(topology.grid), times)[0]


def replica_times(topology: Topology, profile: Profile, rows: int) -> list[PipelineTime]:
    """Time of each replica as it stands, for micro-batches of ``rows`` rows; lost stages count as nominally fast."""
    places = {cell.id: CellCapacity(cell.rate_ppm) for cell in topology.cells}
    model = Model(profile, rows, topology.grid.data_parallel_size)
    times = []
    for replica in topology.replicas:
        if not is_whole(replica, topology.units):
            times.append(PipelineTime(NEVER, NEVER))
            continue
        stages: dict[int, int] = {}
        for s in replica.segments:
            spent = model.stage_time(s.first, s.end, places.get(s.cell, CellCapacity()))
            stages[s.cell] = stages.get(s.cell, 0) + spent
        slowest = max(stages.values())
        times.append(PipelineTime(sum(stages.values()) - slowest, slowest))
    return times


def _check_topology(topology: Topology, profile: Profile) -> None:
    if len(profile.units) != topology.units:
        raise PlanError(f"profile of {len(profile.units)} units for a model of {topology.units}")
    for number, replica in enumerate(topology.replicas):
        for segment in replica.segments:
            if not 0 <= segment.first < segment.end <= topology.units:
                raise PlanError(f"replica {number}: {segment} is no range of {topology.units} units")
    if not any(is_whole(replica, topology.units) for replica in topology.replicas):
        raise PlanError("no replica lists every unit: units must move first")


def assemble(
    topology: Topology,
    profile: Profile,
    shares: Iterable[Share],
    split_backward: bool = False,
    labels: tuple[str, ...] = (),
) -> Plan:
    """Shares → plan: numbers, edges, tables. Raises :class:`PlanError` when shares do not fit together."""
    return _drafted(topology, profile, shares, split_backward, labels).plan


@dataclass(frozen=True, eq=False)
class Draft:
    """A plan that is settled and timed; its tables are written when they are asked for."""

    bare: Plan
    index: EdgeIndex
    groups: tuple[Ordered, ...]
    time_ns: int

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        return replace(self.bare, tables=_tables(self.groups, self.index))

    def beside(self, cells: Collection[int]) -> Plan:
        """Return the plan with no other tables than those of ``cells`` and of the cells that work with them."""
        groups = (group for group in self.groups if not group.cells.isdisjoint(cells))
        return replace(self.bare, tables=_tables(groups, self.index))


def _tables(groups: Iterable[Ordered], index: EdgeIndex) -> tuple[tuple[int, tuple[Action, ...]], ...]:
    orders: dict[int, list[Step]] = {}
    for group in groups:
        orders.update(group.orders())
    return tables_from_orders(orders, index)


def _drafted(
    topology: Topology,
    profile: Profile,
    shares: Iterable[Share],
    split_backward: bool,
    labels: tuple[str, ...],
    ordering: Ordering = compute_orders,
) -> Draft:
    pieces, waves = number_pieces(shares)
    edges = piece_edges(pieces)
    index = index_edges(pieces, edges)
    costs = plan_costs(pieces, edges, topology.cells, profile)
    work = OrderInput(pieces, edges, index, waves, costs, memory_rows(pieces, topology, profile))
    groups = tuple(ordering(group, work, split_backward) for group in components(pieces, edges))
    known = max((group.makespan for group in groups if group.makespan is not None), default=0)
    untimed = _tables((group for group in groups if group.makespan is None), index)
    replicas = living_replicas(topology)
    bare = Plan(topology.grid, topology.cells, replicas, pieces, edges, (), (), topology.parked, labels)
    return Draft(bare, index, groups, max(known, walk(untimed, costs).makespan))
