"""The assignment of other parallel sizes over the ranks there are.

It follows from the launch, the sizes and the living ranks alone, not from the sizes before. So going through any
sizes and back gives the same assignment, and the launch's sizes give the launch's own.

*Which rank sits where.* Each place of the sizes covers some of the launch's state: its stage's units, in the shards
that its position computes (:mod:`~megatron.elastic.state.coverage`). The ranks are matched to the places such that the
elements which they covered at the launch and cover now are as many as possible. Of several such matchings the one is
taken that keeps the ranks closest to their order, so that a tensor-parallel group tends to stay within a node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product

from megatron.elastic.control.requests import ParallelSizes
from megatron.elastic.engine.compute.model_interface import Covered
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.shape import GridShape, chunks_of
from megatron.elastic.plan.search.matching import best_matching
from megatron.elastic.state.layout import UnitShard

__all__ = ["covered_by", "reshaped"]


def reshaped(
    launch_topology: LaunchTopology,
    sizes: ParallelSizes,
    living: Collection[int],
    elements: Mapping[UnitShard, int],
    covered: Covered,
) -> Assignment:
    """Return the assignment of ``sizes`` over ``living``; ``elements``: length of the flat space of each (unit, shard).

    The ranks that the sizes leave over, and those that are missing now, form waiting cells in ascending order. Raises
    ``ValueError`` if there are too few ranks, or if the model cannot be cut so.
    """
    slots = range(launch_topology.slots + launch_topology.extra)
    present = [rank for rank in slots if rank in living]
    at_launch = Assignment.at_launch(launch_topology)
    if sizes == at_launch.base.sizes and present[: launch_topology.slots] == list(range(launch_topology.slots)):
        return at_launch
    if len(present) < sizes.ranks:
        raise ValueError(f"{sizes} is {sizes.ranks} ranks; there are {len(present)}")
    seats = _assignment_of(launch_topology, sizes, tuple(present))
    was = [covered_by(at_launch, rank, covered) for rank in present]
    now = [covered_by(seats, rank, covered) for rank in present[: sizes.ranks]]
    kept = {pair: sum(elements.get(space, 0) for space in pair[0] & pair[1]) for pair in product(set(was), set(now))}
    more_than_all_distances = len(present) ** 3
    chosen = best_matching(
        [
            [more_than_all_distances * kept[before, after] - (place - order) ** 2 for order, before in enumerate(was)]
            for place, after in enumerate(now)
        ]
    )
    ranks = [present[taker] for taker in chosen]
    return _assignment_of(launch_topology, sizes, (*ranks, *(rank for rank in slots if rank not in ranks)))


def covered_by(assignment: Assignment, rank: int, covered: Covered) -> frozenset[UnitShard]:
    """Return the (unit, shard)s of which ``rank`` computes a part, the common ones included."""
    return frozenset(assignment.held_by(rank, covered).spaces)


def _assignment_of(launch_topology: LaunchTopology, sizes: ParallelSizes, order: tuple[int, ...]) -> Assignment:
    """Return the assignment whose places (replica, stage, position in the cell) have the ranks of ``order``."""
    size = sizes.cell
    cells = tuple(order[at : at + size] for at in range(0, len(order) - size + 1, size))
    return Assignment.regular(launch_topology, GridShape(sizes, cells, chunks_of(launch_topology, sizes.pipeline)))
