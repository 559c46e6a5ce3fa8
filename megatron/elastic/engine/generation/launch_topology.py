"""The topology at launch, constant for the whole job.

Ranks are numbered as Megatron does (tensor, then context, data, pipeline):
``rank = t + TP · (c + CP · (d + DP · p))``. With ``--use-tp-pp-dp-mapping`` replicas count
last: ``rank = t + TP · (c + CP · (p + PP · d))``. Cell ``d · PP + p`` has the ranks of
stage ``p`` in replica ``d``: CP tensor-parallel groups, each of which has its part of the
sequence. Its id never changes, also when a new incarnation takes a rank, or when the cell
goes on with other ranks (:mod:`assignment`).

Ranks from W on are *extra*: they are started beside those of the launch to replace lost
ranks or to add replicas. Each ``TP · CP`` of them, in order, form a cell, with
numbers from ``DP · PP`` on. They belong to no replica and no stage until an assignment
gives them units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.elastic.engine.compute.model_interface import Crew
from megatron.elastic.engine.generation.expert_deal import ExpertDeal
from megatron.elastic.plan.model import Cell, Grid
from megatron.elastic.state.layout import ParamSpec

__all__ = ["LaunchTopology"]


@dataclass(frozen=True)
class LaunchTopology:
    """Sizes and cuts at launch."""

    tensor: int
    pipeline: int
    data: int
    chunks: tuple[tuple[int, int], ...]
    """Units ``[first, end)`` of each model chunk, in the model's order; chunk ``k`` is on stage ``k % pipeline``.

    As many as stages, or with Megatron's interleaved schedule a multiple of them.
    """
    grid: Grid
    tied_unit: int | None = None
    """State-only unit shared by the first and last stage, if embeddings are tied."""
    extra: int = 0
    """Number of possible ranks beyond those of the launch, a multiple of :attr:`cell_size`."""
    experts: int = 0
    """Number of experts of a layer, where ranks share them; 0: each rank of a stage has all experts of its layers."""
    expert_homes: int = 1
    """Into how many sets the experts of a layer are dealt: Megatron's expert-parallel size."""
    expert_parts: int = 1
    """Number of adjacent ranks of a cell with parts of the same experts: Megatron's expert-tensor-parallel size."""
    context: int = 1
    """Number of parts of the sequence in a cell: Megatron's context-parallel size."""
    expert_replicas: int = 0
    """Number of experts that a rank may have beyond its share (``--elastic-expert-replicas``); 0: no replicas."""
    replicas_last: bool = False
    """Ranks of a replica are adjacent (Megatron's order tensor, pipeline, data), else ranks of a stage."""

    @property
    def slots(self) -> int:
        """W, the number of ranks at launch."""
        return self.cell_size * self.pipeline * self.data

    @property
    def cell_size(self) -> int:
        """Number of ranks of a cell."""
        return self.tensor * self.context

    @property
    def expert_ranks(self) -> int:
        """Number of adjacent ranks that have all experts together."""
        return self.deal.ranks

    @property
    def deal(self) -> ExpertDeal:
        """The experts of each rank."""
        return ExpertDeal(self.experts, self.expert_homes, self.expert_parts, self.cell_size, self.expert_replicas)

    @property
    def compute_units(self) -> int:
        """U, the number of units that compute."""
        return self.chunks[-1][1]

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All cells by number: those of the launch, then the extra ones."""
        places = ((replica, stage) for replica in range(self.data) for stage in range(self.pipeline))
        beyond = (self.cell_of(rank) for rank in range(self.slots, self.slots + self.extra, self.cell_size))
        return (*(self.cell(*place) for place in places), *beyond)

    @property
    def common(self) -> int | None:
        """The shard number of the common part: parameters that are replicated over a tensor-parallel group.

        ``None`` at tensor-parallel size 1: shard 0 then has all parameters.
        """
        return self.tensor if self.tensor > 1 else None

    @property
    def shards(self) -> tuple[int, ...]:
        """Shard numbers of a unit's state, the common part's last."""
        return tuple(range(self.tensor)) if self.common is None else (*range(self.tensor), self.common)

    def expert_shard(self, expert: int, index: int = 0) -> int:
        """Return the shard number of the part of an expert that the ``index``-th rank of a cell has.

        They are behind those of :attr:`shards`.
        """
        return len(self.shards) + expert * self.expert_parts + index % self.expert_parts

    def expert_spaces(self, crew: Crew, rank: int) -> tuple[int, ...]:
        """Return the shard numbers of the experts that ``rank`` has in ``crew``, in the parts in which state has them.

        Ascending for each expert.
        """
        each, part = self.expert_parts // crew.cut, crew.part_of(rank).index
        launched = range(part * each, (part + 1) * each)
        return tuple(self.expert_shard(expert, one) for expert in crew.experts_of(rank) for one in launched)

    def rank(self, index: int, replica: int, stage: int) -> int:
        """Return the global rank at a place of the launch; ``index``: in its cell."""
        cell = stage + self.pipeline * replica if self.replicas_last else replica + self.data * stage
        return index + self.cell_size * cell

    def expert_seat(self, rank: int) -> int:
        """Return the place of a rank of the launch among :attr:`expert_ranks`: Megatron's rank in that group."""
        place = self.place(rank)
        assert place is not None, f"rank {rank} is beyond those of the launch"
        return (place[1] % self.deal.crew_size * self.cell_size + rank % self.cell_size) % self.expert_ranks

    def experts_of_seat(self, seat: int) -> tuple[int, ...]:
        """Return the experts of a place among :attr:`expert_ranks` at launch."""
        each, home = self.experts // self.expert_homes, seat // self.expert_parts
        return tuple(range(home * each, (home + 1) * each))

    def shard(self, rank: int) -> int:
        """Return the tensor-parallel rank of any rank at launch: the shard that it then computes."""
        return rank % self.tensor

    def shard_of(self, rank: int, spec: ParamSpec) -> int:
        """Return the shard number under which state has a parameter of ``rank`` at launch."""
        if spec.expert is not None:
            return self.expert_shard(spec.expert, rank % self.cell_size)
        return self.shard(rank) if spec.sharded or self.common is None else self.common

    def place(self, rank: int) -> tuple[int, int, int] | None:
        """Return (tensor-parallel rank, replica, stage) of a rank of the launch; ``None`` for an extra rank."""
        if rank >= self.slots:
            return None
        number = rank // self.cell_size
        if self.replicas_last:
            replica, stage = divmod(number, self.pipeline)
        else:
            stage, replica = divmod(number, self.data)
        return self.shard(rank), replica, stage

    def cell(self, replica: int, stage: int) -> Cell:
        """Return the cell of the launch at (replica, stage)."""
        ranks = tuple(self.rank(index, replica, stage) for index in range(self.cell_size))
        return Cell(replica * self.pipeline + stage, ranks)

    def cell_of(self, rank: int) -> Cell:
        """Return the cell that a rank belongs to at launch."""
        place = self.place(rank)
        if place is not None:
            return self.cell(*place[1:])
        number = (rank - self.slots) // self.cell_size
        first = self.slots + number * self.cell_size
        return Cell(self.data * self.pipeline + number, tuple(range(first, first + self.cell_size)))
