"""Topologies from a launch's sizes, and their rest after losses.

Idea: one place builds the nominal topology (places of ranks), so that launch,
simulator and tests mean the same thing by "DP 2 x PP 8". Cells are numbered
replica by replica; rank numbers are the cell's TP slice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from megatron.elastic.plan.model import Cell, Grid, Replica, Segment, Topology

__all__ = [
    "even_cuts",
    "is_whole",
    "living_replicas",
    "regular_topology",
    "with_speeds",
    "without_cells",
    "without_ranks",
]


def even_cuts(units: int, stages: int) -> tuple[int, ...]:
    """``stages + 1`` cut points of an almost even contiguous split."""
    return tuple(stage * units // stages for stage in range(stages + 1))


def regular_topology(
    dp: int,
    pp: int,
    units: int,
    micro_batch_size: int = 1,
    waves: int = 1,
    tp: int = 1,
    node_cells: int = 1,
    cuts: Sequence[int] | None = None,
    memory_bytes: int = 1 << 62,
) -> Topology:
    """``dp`` equal pipelines of ``pp`` cells, ``waves`` micro-batches each; ``node_cells`` cells share a node."""
    cuts = tuple(cuts) if cuts is not None else even_cuts(units, pp)
    cells = tuple(
        Cell(number, tuple(range(number * tp, (number + 1) * tp)), number // node_cells, memory_bytes=memory_bytes)
        for number in range(dp * pp)
    )
    replicas = tuple(Replica(tuple(Segment(r * pp + s, cuts[s], cuts[s + 1]) for s in range(pp))) for r in range(dp))
    grid = Grid(micro_batch_size * dp * waves, micro_batch_size, dp)
    return Topology(grid, units, cells, replicas)


def without_cells(topology: Topology, lost: Collection[int]) -> Topology:
    """The topology after cells ``lost`` stopped computing; their ranks count as dead."""
    gone = set(lost)
    return replace(topology, cells=tuple(cell for cell in topology.cells if cell.id not in gone))


def without_ranks(topology: Topology, lost: Collection[int]) -> Topology:
    """The topology after ranks died: their cells stop computing, the cells' other ranks are parked."""
    gone = set(lost)
    broken = [cell for cell in topology.cells if gone.intersection(cell.ranks)]
    parked = sorted({*topology.parked, *(rank for cell in broken for rank in cell.ranks)} - gone)
    left = without_cells(topology, [cell.id for cell in broken])
    return replace(left, parked=tuple(parked))


def living_replicas(topology: Topology) -> tuple[Replica, ...]:
    """Replicas with only the segments of living cells: the holders after the loss."""
    alive = {cell.id for cell in topology.cells}
    kept = (Replica(tuple(s for s in r.segments if s.cell in alive)) for r in topology.replicas)
    return tuple(replica for replica in kept if replica.segments)


def is_whole(replica: Replica, units: int) -> bool:
    """True if the replica's segments hold every unit once, in order (dead cells' segments count as listed)."""
    at = 0
    for segment in replica.segments:
        if segment.first != at:
            return False
        at = segment.end
    return at == units


def with_speeds(topology: Topology, speeds_ppm: dict[int, int]) -> Topology:
    """The topology with measured speeds (parts per million of nominal) of some cells."""
    cells = tuple(replace(cell, speed_ppm=speeds_ppm.get(cell.id, cell.speed_ppm)) for cell in topology.cells)
    return replace(topology, cells=cells)
