"""A model whose cells share the positions of each sample, as with context parallelism; the weights are whole.

Each unit is ``tanh(W x + b + m)``, where m is the mean of x over the positions up to this one. So a position needs
those before it, wherever they are, as under a causal mask. The ranks of a cell have one part of the sequence each.
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
from tests.cluster.model import LENGTH, WIDTH, TinyModel

__all__ = ["SharedModel"]

CUT = SequenceCut(LENGTH, tensor=1)


class SharedModel(TinyModel):
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
        if tensor > 1 or parts > LENGTH:
            return None
        return max(length_of(CUT.held(index, parts)) for index in range(parts)) * 1_000_000 // LENGTH

    def cut_sequence(self) -> SequenceCut | None:
        """See :class:`ModelInterface`."""
        return CUT

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        """See :class:`ModelInterface`."""
        return torch.Size((length_of(self._runs), rows, WIDTH)), torch.float32

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        return taken(whole, self._runs, 0)

    def _compared(self, target: torch.Tensor) -> torch.Tensor:
        return taken(target, self._runs, 0)

    def _over_parts(self, sums: torch.Tensor) -> torch.Tensor:
        return self._added(sums)

    @property
    def _runs(self) -> tuple[Run, ...]:
        """The positions that this rank holds."""
        return CUT.held(self._place.index, len(self._place.ranks))

    def _run(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        whole = Mapped.apply(x, self._gathered, lambda gradient: taken(self._added(gradient), self._runs, 0))
        means = whole.cumsum(0) / torch.arange(1, LENGTH + 1).view(-1, 1, 1)
        return torch.tanh(self._layers[unit](x) + taken(means, self._runs, 0))

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """All positions: parts of other ranks are added to zeros."""
        whole, at = x.new_zeros((LENGTH, *x.shape[1:])), 0
        for start, stop in self._runs:
            whole[start:stop] = x[at : at + stop - start]
            at += stop - start
        return self._added(whole)

    def _added(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of the cell."""
        total, ranks = values.clone(), self._place.ranks
        if len(ranks) > 1:
            dist.all_reduce(total, group=self._fabric.group("context", ranks))
        return total
