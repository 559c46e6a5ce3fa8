"""The topology at launch, which stays part of the job for ever.

Ranks are numbered as Megatron does (tensor, then data, then pipeline):
``rank = t + TP · (d + DP · p)``. Cell ``d · PP + p`` is the tensor-parallel
group of stage ``p`` in replica ``d``; its id never changes, also when a new
incarnation takes a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.elastic.plan.model import Cell, Grid

__all__ = ["Nominal"]


@dataclass(frozen=True)
class Nominal:
    """Sizes and cuts at launch."""

    tensor: int
    pipeline: int
    data: int
    stages: tuple[tuple[int, int], ...]
    """Units ``[first, end)`` of each pipeline stage."""
    grid: Grid
    tied_unit: int | None = None
    """State-only unit shared by the first and last stage, if embeddings are tied."""

    @property
    def slots(self) -> int:
        """W: ranks at launch."""
        return self.tensor * self.pipeline * self.data

    @property
    def compute_units(self) -> int:
        """U."""
        return self.stages[-1][1]

    def rank(self, shard: int, replica: int, stage: int) -> int:
        """Global rank at a place."""
        return shard + self.tensor * (replica + self.data * stage)

    def place(self, rank: int) -> tuple[int, int, int]:
        """(tensor-parallel shard, replica, stage) of a rank."""
        rest, shard = divmod(rank, self.tensor)
        stage, replica = divmod(rest, self.data)
        return shard, replica, stage

    def cell(self, replica: int, stage: int) -> Cell:
        """The cell at (replica, stage)."""
        ranks = tuple(self.rank(shard, replica, stage) for shard in range(self.tensor))
        return Cell(replica * self.pipeline + stage, ranks)

    def cell_of(self, rank: int) -> Cell:
        """The nominal cell of a rank."""
        _, replica, stage = self.place(rank)
        return self.cell(replica, stage)
