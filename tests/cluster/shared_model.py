"""A model whose cells share the positions of each sample, as with context parallelism; the weights are whole.

Each unit is ``tanh(W x + b + m)``, where m is the mean of x over the positions up to this one. So a position needs
those before it, wherever they are, as under a causal mask. The ranks of a cell have one part of the sequence each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.compute.model_interface import ROW_DIM, CellPlace, ForwardStep, LossOutput
from megatron.elastic.engine.compute.sequence_cut import Run, SequenceCut, length_of, taken
from megatron.elastic.plan.model import Piece
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

    def largest_part(self, count: int, parameters: Collection[ParamSpec]) -> int | None:
        """See :class:`ModelInterface`."""
        longest = max(length_of(CUT.held(index, count)) for index in range(count))
        return longest * 1_000_000 // LENGTH if count <= LENGTH else None

    def cut_sequence(self) -> SequenceCut | None:
        """See :class:`ModelInterface`."""
        return CUT

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        """See :class:`ModelInterface`."""
        return torch.Size((length_of(self._runs), rows, WIDTH)), torch.float32

    def forward(
        self,
        step: ForwardStep,
        piece: Piece,
        place: tuple[int, int],
        source: torch.Tensor | None,
        batches: Iterator[Any],
    ) -> torch.Tensor | LossOutput:
        """See :class:`ModelInterface`."""
        first, last = piece.first == 0, piece.end == self.compute_units
        batch = next(batches) if first or last else {}
        x = taken(batch["input"].transpose(0, ROW_DIM), self._runs, 0) if source is None else source
        for unit in range(piece.first, piece.end):
            x = self._run(unit, x)
        if not last:
            return x
        target = taken(batch["target"].transpose(0, ROW_DIM), self._runs, 0)
        loss = (x - target).square().mean(-1).sum()
        sums = self._added(torch.tensor([float(loss.detach()), float(x.shape[0] * x.shape[1])], dtype=torch.float64))
        return LossOutput(loss, sums[1], {"loss": sums.float()})

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
