"""The whole sequence of a tensor of which each rank of a context-parallel group has one part.

Forward gathers the parts, and puts their positions in the order of the sequence. Backward is the adjoint: the gradient
of a position is the sum over the ranks, and each receives it for its own positions. Parts may have different lengths;
they travel with the length of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.engine.compute.sequence_cut import Run, SequenceCut, length_of, part_runs
from megatron.elastic.state.coverage import Position

__all__ = ["GroupOf", "SequencePart", "gathered"]

GroupOf = Callable[[tuple[int, ...]], dist.ProcessGroup]
"""Returns the context-parallel group of some ranks."""


@dataclass(frozen=True)
class SequencePart:
    """The part of the sequence of one rank: which of how many, and the group of the ranks that have the others."""

    cut: SequenceCut
    part: Position
    group: dist.ProcessGroup | None
    """None on a rank that does not compute."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """The positions of this part."""
        return self.of(self.part.index)

    @property
    def longest(self) -> int:
        """Number of positions of the longest part."""
        return max(length_of(self.of(index)) for index in range(self.part.count))

    def of(self, index: int) -> tuple[Run, ...]:
        """Return the positions of part ``index``."""
        count = self.part.count
        return part_runs(self.cut.length, index, count, self.cut.grain(count * self.cut.size(1)))


def gathered(part: SequencePart, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[length of the sequence, ...]`` of ``tensor``, this part's positions in dimension 0.

    Collective in the part's group, in forward and in backward. Raises ``ValueError`` for another number of positions.
    """
    if tensor.shape[0] != length_of(part.runs):
        raise ValueError(f"{tensor.shape[0]} positions for {part.part}, which has {length_of(part.runs)}")
    if part.part.count == 1:
        return tensor
    whole: torch.Tensor = _Gathered.apply(tensor, part)  # type: ignore[no-untyped-call]
    return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, part: SequencePart) -> torch.Tensor:
        ctx.part = part
        own = tensor.new_zeros((part.longest, *tensor.shape[1:]))
        own[: tensor.shape[0]] = tensor
        padded = own.new_empty((part.part.count, *own.shape))
        dist.all_gather_into_tensor(padded.flatten(0, 1), own, group=part.group)
        whole = tensor.new_empty((part.cut.length, *tensor.shape[1:]))
        for source, (start, stop), at in _placed(part):
            whole[start:stop] = padded[source, at : at + stop - start]
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,), part = grads, ctx.part
        padded = grad.new_zeros((part.part.count, part.longest, *grad.shape[1:]))
        for source, (start, stop), at in _placed(part):
            padded[source, at : at + stop - start] = grad[start:stop]
        own = padded.new_empty(padded.shape[1:])
        dist.reduce_scatter_tensor(own, padded.flatten(0, 1), group=part.group)
        return own[: length_of(part.runs)].contiguous(), None


def _placed(part: SequencePart) -> Iterable[tuple[int, Run, int]]:
    """Yield (part, run, first place in that part) of every run of the sequence."""
    for index in range(part.part.count):
        at = 0
        for run in part.of(index):
            yield index, run, at
            at += run[1] - run[0]
