"""A model whose cells share the positions of each sample, as with context parallelism; the weights are whole.

Each unit is ``tanh(W x + b + m)``, where m is the mean of x over the positions up to this one. So a position needs
those before it, wherever they are, as under a causal mask. Each tensor-parallel group of a cell has one part of the
sequence.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.compute.model_interface import CellPlace
from megatron.elastic.engine.compute.sequence_cut import Run, SequenceCut, length_of, taken
from megatron.elastic.state.coverage import Position
from megatron.elastic.state.layout import ParamSpec
from tests.cluster.cut_model import Mapped
from tests.cluster.model import LENGTH, WIDTH, TinyModel, UnitChain

__all__ = ["SharedModel", "SharedSequence", "longest_part"]

CUT = SequenceCut(LENGTH, tensor=1)


def longest_part(parts: int) -> int:
    """Number of positions of the longest of ``parts`` parts."""
    return max(length_of(CUT.held(index, parts)) for index in range(parts))


class SharedSequence(UnitChain):
    """The positions of one rank, and the means over those before them; a base of models."""

    _place: CellPlace
    _fabric: Fabric

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        """See :class:`ModelInterface`."""
        return torch.Size((length_of(self._runs), rows, WIDTH)), torch.float32

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        return taken(whole, self._runs, 0)

    def _compared(self, target: torch.Tensor) -> torch.Tensor:
        return taken(target, self._runs, 0)

    @property
    def _runs(self) -> tuple[Run, ...]:
        """The positions that this rank holds."""
        part = self._place.part
        return CUT.held(part.index, part.count)

    def _means(self, x: torch.Tensor) -> torch.Tensor:
        """For each position held: the mean of x over the positions up to it."""
        whole = Mapped.apply(x, self._all, lambda gradient: taken(self._over_parts(gradient), self._runs, 0))
        return taken(whole.cumsum(0) / torch.arange(1, LENGTH + 1).view(-1, 1, 1), self._runs, 0)

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        """All positions: parts of other ranks are added to zeros."""
        whole, at = x.new_zeros((LENGTH, *x.shape[1:])), 0
        for start, stop in self._runs:
            whole[start:stop] = x[at : at + stop - start]
            at += stop - start
        return self._over_parts(whole)

    def _over_parts(self, sums: torch.Tensor) -> torch.Tensor:
        total, ranks = sums.clone(), self._place.context_ranks
        if len(ranks) > 1:
            dist.all_reduce(total, group=self._fabric.group("context", ranks))
        return total


class SharedModel(SharedSequence, TinyModel):
    """Implements :class:`ModelInterface` for ``units`` layers, at any place of a cell. ``place``: at the launch."""

    def __init__(self, units: int, held: Collection[int], place: CellPlace, fabric: Fabric) -> None:
        super().__init__(units, held)
        self._place, self._fabric = place, fabric

    def hold(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """See :class:`ModelInterface`."""
        super().hold(units, place)
        self._place = place or self._place

    def covered(self, unit: int, position: Position) -> tuple[int, ...]:
        """See :class:`ModelInterface`."""
        return (0,)

    def largest_part(self, tensor: int, parts: int, parameters: Collection[ParamSpec]) -> int | None:
        """See :class:`ModelInterface`."""
        return None if tensor > 1 or parts > LENGTH else longest_part(parts) * 1_000_000 // LENGTH

    def cut_sequence(self) -> SequenceCut | None:
        """See :class:`ModelInterface`."""
        return CUT

    def _run(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self._layers[unit](x) + self._means(x))
