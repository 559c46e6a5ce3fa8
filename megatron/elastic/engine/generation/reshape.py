"""The assignment of other parallel sizes over the ranks there are.

It follows from the launch, the sizes and the living ranks alone, not from the sizes before. So going through any
sizes and back gives the same assignment, and the launch's sizes give the launch's own.

*Which rank sits where.* Each place of the sizes covers some of the launch's state: its stage's units, in the shards
that its position computes (:mod:`~megatron.elastic.state.coverage`). The ranks are matched to the places such that the
elements which they covered at the launch and cover now are as many as possible. Of several such matchings the one is
taken that keeps the ranks closest to their order, so that a tensor-parallel group tends to stay within a node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megatron.elastic.control.requests import ParallelSizes
from megatron.elastic.engine.compute.model_interface import Covered
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.shape import GridShape, chunks_of
from megatron.elastic.plan.search.matching import matching_in_order
from megatron.elastic.state.layout import UnitShard

__all__ = ["covered_by", "reshaped"]

_Covered = tuple[frozenset[UnitShard], ...]
"""The (unit, shard)s of which each of some ranks computes a part."""


def reshaped(
    launch_topology: LaunchTopology,
    sizes: ParallelSizes,
    living: Collection[int],
    elements: Mapping[UnitShard, int],
    covered: Covered,
    whole_cells: bool = False,
) -> Assignment:
    """Return the assignment of ``sizes`` over ``living``; ``elements``: length of the flat space of each (unit, shard).

    ``whole_cells``: the ranks of a cell at launch stay together, in cells of the same size. The ranks that the sizes
    leave over, and those that are missing now, form waiting cells in ascending order. Raises ``ValueError`` if there
    are too few ranks, or if the model cannot be cut so.
    """
    slots = range(launch_topology.slots + launch_topology.extra)
    at_launch = Assignment.at_launch(launch_topology)
    if sizes == at_launch.base.sizes and all(rank in living for rank in range(launch_topology.slots)):
        return at_launch
    movable = [cell.ranks for cell in launch_topology.cells] if whole_cells else [(rank,) for rank in slots]
    present = [ranks for ranks in movable if all(rank in living for rank in ranks)]
    there = tuple(rank for ranks in present for rank in ranks)
    if len(there) < sizes.ranks:
        raise ValueError(f"{sizes} is {sizes.ranks} ranks; there are {len(there)}")
    seats, places = _assignment_of(launch_topology, sizes, there), present[: sizes.ranks // len(present[0])]
    was = [tuple(covered_by(at_launch, rank, covered) for rank in ranks) for ranks in present]
    now = [tuple(covered_by(seats, rank, covered) for rank in ranks) for ranks in places]
    ranks = [rank for taker in _takers(was, now, elements) for rank in present[taker]]
    taken = frozenset(ranks)
    return _assignment_of(launch_topology, sizes, (*ranks, *(rank for rank in slots if rank not in taken)))


def _takers(was: Sequence[_Covered], now: Sequence[_Covered], elements: Mapping[UnitShard, int]) -> Sequence[int]:
    """Return, for each place, which of those that covered ``was`` takes it; a place covers ``now`` (module docstring).

    A place, and those that may take it, are as many ranks.
    """

    def kept(before: _Covered, after: _Covered) -> int:
        common = (one & other for one, other in zip(before, after, strict=True))
        return sum(elements.get(space, 0) for spaces in common for space in spaces)

    of_ranks, of_places = (list(dict.fromkeys(covered)) for covered in (was, now))
    weights = [[kept(before, after) for before in of_ranks] for after in of_places]
    kinds, wanted = ({one: kind for kind, one in enumerate(some)} for some in (of_ranks, of_places))
    return matching_in_order(weights, [wanted[one] for one in now], [kinds[one] for one in was])


def covered_by(assignment: Assignment, rank: int, covered: Covered) -> frozenset[UnitShard]:
    """Return the (unit, shard)s of which ``rank`` computes a part, the common ones included."""
    return frozenset(assignment.held_by(rank, covered).spaces)


def _assignment_of(launch_topology: LaunchTopology, sizes: ParallelSizes, order: tuple[int, ...]) -> Assignment:
    """Return the assignment whose places (replica, stage, position in the cell) have the ranks of ``order``."""
    size = sizes.cell
    cells = tuple(order[at : at + size] for at in range(0, len(order) - size + 1, size))
    return Assignment.regular(launch_topology, GridShape(sizes, cells, chunks_of(launch_topology, sizes.pipeline)))
