"""Shapes measured by their tables: cuts that the bound allows, quotas moved until no move helps.

Idea: where pipelines compute fewer micro-batches than they have stages, neither work nor 1F1B's memory limits
a stage, but the time until a row returns (:mod:`bound`). So the middle of a pipeline may hold more units than
either end. The pipelines by which the bound meets a deadline are therefore candidates, for deadlines from the
bound upwards. The bound's conditions are necessary only. The tables of each candidate show its real time, and
micro-batches go from the slowest pipeline to another as long as the slower of the two gets faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from megatron.elastic.plan.dataflow import PlanError, microbatches
from megatron.elastic.plan.model import Profile, Segment, Topology
from megatron.elastic.plan.search.bound import Reach, schedule_bound
from megatron.elastic.plan.search.graph import Pipeline, Shape, ranks, seats

__all__ = ["bound_shapes", "few_microbatches", "move_quota"]

_ABOVE = (0, 2, 4, 7, 10, 14, 20, 30)
"""Deadlines tried, in percent above the bound."""


def few_microbatches(topology: Topology) -> bool:
    """True if pipelines compute fewer micro-batches than they have stages."""
    longest = max(len(replica.segments) for replica in topology.replicas)
    return microbatches(topology.grid) * longest < (longest - 1) * len(topology.cells)


def bound_shapes(topology: Topology, profile: Profile, split_backward: bool) -> list[Shape]:
    """Pipelines by which the bound meets deadlines at and above it; ``time_ns`` is the deadline.

    Empty when the model does not fit the cells' memory.
    """
    try:
        least = schedule_bound(topology, profile, split_backward)
    except PlanError:
        return []
    reach, total = Reach(topology, profile, split_backward), microbatches(topology.grid)
    holds: dict[int, tuple[tuple[int, int], ...]] = {}
    for replica in topology.replicas:
        for s in replica.segments:
            holds[s.cell] = (*holds.get(s.cell, ()), (s.first, s.end))
    cells = [cell.id for cell in topology.cells]
    order = ranks(cells, holds, topology.units)
    found: dict[tuple[Pipeline, ...], Shape] = {}
    for percent in _ABOVE:
        deadline = least * (100 + percent) // 100
        cuts, quotas = reach.pipelines(len(cells), total, deadline)
        excess = sum(quotas) - total
        if excess < 0:
            continue
        late = [reach.late_cuts(quota, deadline) or cut for cut, quota in zip(cuts, quotas, strict=True)]
        for some in (cuts, late):
            seated = seats(cells, [len(cut) - 1 for cut in some], order)
            pipelines = _pipelines(seated, some, quotas, excess)
            found.setdefault(pipelines, Shape(pipelines, deadline, "bound"))
    return list(found.values())


def _pipelines(
    seated: Sequence[Sequence[int]], cuts: Sequence[tuple[int, ...]], quotas: Sequence[int], excess: int
) -> tuple[Pipeline, ...]:
    """Pipelines with ``excess`` micro-batches fewer than ``quotas``, taken from the first ones."""
    pipelines = []
    for own, cut, quota in zip(seated, cuts, quotas, strict=True):
        less = min(excess, quota)
        excess -= less
        if quota > less:
            segments = tuple(Segment(cell, a, b) for cell, (a, b) in zip(own, pairwise(cut), strict=True))
            pipelines.append(Pipeline(segments, quota - less))
    return tuple(pipelines)


def move_quota(shape: Shape, source: int, target: int) -> Shape:
    """One micro-batch from pipeline ``source`` to pipeline ``target``."""
    pipelines = list(shape.pipelines)
    pipelines[source] = replace(pipelines[source], quota=pipelines[source].quota - 1)
    pipelines[target] = replace(pipelines[target], quota=pipelines[target].quota + 1)
    return replace(shape, pipelines=tuple(pipelines))
