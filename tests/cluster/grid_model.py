"""A model whose cells cut the weights over tensor-parallel groups, and the sequence over these groups, in any sizes.

A unit is that of :mod:`cut_model`, applied to x + m: m is the mean of x over the positions up to this one, as in
:mod:`shared_model`. So a position needs those before it, wherever they are.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from megatron.elastic.engine.compute.sequence_cut import Run, SequenceCut, length_of, taken
from megatron.elastic.state.layout import ParamSpec
from tests.cluster.cut_model import CutModel, Mapped
from tests.cluster.model import LENGTH, WIDTH

__all__ = ["GridModel"]


class GridModel(CutModel):
    """Implements :class:`ModelInterface` for ``units`` units, at any place of a cell of any sizes."""

    def largest_part(self, tensor: int, parts: int, parameters: Collection[ParamSpec]) -> int | None:
        """See :class:`ModelInterface`."""
        whole = super().largest_part(tensor, 1, parameters)
        if whole is None or parts > LENGTH:
            return None
        longest = max(length_of(SequenceCut(LENGTH, tensor=1).held(index, parts)) for index in range(parts))
        return whole * longest // LENGTH

    def refusal(self, tensor: int, parts: int) -> str:
        """See :class:`ModelInterface`: the chunks of two parts are of one length, as in Megatron."""
        uneven = parts > 1 and LENGTH % (2 * parts)
        return f"CP {parts} takes a length that is a multiple of {2 * parts}, and it is {LENGTH}" if uneven else ""

    def cut_sequence(self) -> SequenceCut | None:
        """See :class:`ModelInterface`."""
        return None if self._place.team is None else SequenceCut(LENGTH, tensor=self._place.team)

    @property
    def _runs(self) -> tuple[Run, ...]:
        """The positions that this rank holds."""
        part = self._place.part
        return SequenceCut(LENGTH, tensor=1).held(part.index, part.count)

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        """See :class:`ModelInterface`."""
        return torch.Size((length_of(self._runs), rows, WIDTH)), torch.float32

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        return taken(whole, self._runs, 0)

    def _compared(self, target: torch.Tensor) -> torch.Tensor:
        return taken(target, self._runs, 0)

    def _run(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        gathered = Mapped.apply(x, self._all, lambda gradient: taken(self._over_parts(gradient), self._runs, 0))
        means = gathered.cumsum(0) / torch.arange(1, LENGTH + 1).view(-1, 1, 1)
        return super()._run(unit, x + taken(means, self._runs, 0))

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
