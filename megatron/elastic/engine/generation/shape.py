"""The sizes in force: the cut of a cell, stages, replicas; and which ranks and units these are.

At the launch they are Megatron's (:class:`LaunchTopology`). A reshape replaces them for all later generations. Cells
are numbered as at the launch: cell ``d · PP + p`` is stage ``p`` of replica ``d``. Behind them come waiting cells, of
ranks that the sizes leave over.

A cell cuts the weights over its tensor-parallel groups, and the sequence over the groups. While some ranks are missing
it has another cut: where the sizes have context parallelism, of fewer groups of the same size, else of a smaller group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from megatron.elastic.control.requests import ParallelSizes
from megatron.elastic.engine.generation.expert_deal import ExpertDeal
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.plan.model import Cell, Replica, Segment

__all__ = ["CellCut", "GridShape", "chunks_of"]


class CellCut(NamedTuple):
    """The cut of a cell's work over its ranks."""

    tensor: int
    """Ranks of a tensor-parallel group."""
    parts: int = 1
    """Such groups, each with one part of the sequence."""


@dataclass(frozen=True)
class GridShape:
    """Sizes with the ranks of each cell and the units of each stage."""

    sizes: ParallelSizes
    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each cell by number, in order; behind those of the sizes the waiting cells."""
    chunks: tuple[tuple[int, int], ...]
    """Units ``[first, end)`` of each model chunk; chunk ``k`` is on stage ``k % PP``."""

    @classmethod
    def of_launch(cls, launch_topology: LaunchTopology) -> GridShape:
        """Return Megatron's own sizes and cut."""
        launch = launch_topology
        experts = launch.expert_homes if launch.experts else 1
        sizes = ParallelSizes(launch.tensor, launch.pipeline, launch.data, launch.context, experts)
        return cls(sizes, tuple(cell.ranks for cell in launch.cells), launch.chunks)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All cells by number."""
        return tuple(Cell(number, ranks) for number, ranks in enumerate(self.ranks))

    @property
    def cell_size(self) -> int:
        """Number of ranks of a cell while no rank is missing."""
        return len(self.ranks[0])

    @property
    def team(self) -> int | None:
        """Number of ranks of each tensor-parallel group in cells that share the sequence; None: a cell is one group."""
        return self.sizes.tensor if self.sizes.context > 1 else None

    def cut(self, count: int) -> CellCut:
        """Return the cut of a cell that has ``count`` ranks."""
        return CellCut(count) if self.team is None else CellCut(self.team, count // self.team)

    @property
    def computing(self) -> int:
        """Number of cells that hold units while no rank is missing."""
        return self.sizes.pipeline * self.sizes.data

    def deal(self, launched: ExpertDeal) -> ExpertDeal:
        """Return how the ranks of these sizes share the experts of a job that was ``launched`` so."""
        return launched.over(self.sizes.experts, self.sizes.cell) if launched.experts else launched

    def place(self, rank: int) -> tuple[tuple[int, ...], int | None, int | None]:
        """Return the ranks of the cell that has ``rank``, and its replica and stage; None where it waits."""
        number, ranks = next((pair for pair in enumerate(self.ranks) if rank in pair[1]), (self.computing, (rank,)))
        if number >= self.computing:
            return ranks, None, None
        return ranks, *divmod(number, self.sizes.pipeline)

    def replicas(self) -> tuple[Replica, ...]:
        """Return the pipelines while no rank is missing."""
        stages = self.sizes.pipeline
        return tuple(
            Replica(
                tuple(
                    Segment(replica * stages + chunk % stages, first, end)
                    for chunk, (first, end) in enumerate(self.chunks)
                )
            )
            for replica in range(self.sizes.data)
        )


def chunks_of(launch_topology: LaunchTopology, pipeline: int) -> tuple[tuple[int, int], ...]:
    """Return the units of each chunk of a pipeline of ``pipeline`` stages: the launch's own cut, or an even one.

    The first and the last unit (embedding and head) belong to the stages of the first and the last layer, as in
    Megatron. With more stages than layers every unit counts alike. Raises ``ValueError`` for more stages than units.
    """
    if pipeline == launch_topology.pipeline:
        return launch_topology.chunks
    units = launch_topology.compute_units
    if pipeline > units:
        raise ValueError(f"{pipeline} stages for {units} units")
    ends = 1 if units - 2 >= pipeline else 0
    each, more = divmod(units - 2 * ends, pipeline)
    cuts = [0]
    for stage in range(pipeline):
        cuts.append(cuts[-1] + each + (stage < more) + (ends if stage == 0 else 0))
    cuts[-1] = units
    return tuple(pairwise(cuts))
