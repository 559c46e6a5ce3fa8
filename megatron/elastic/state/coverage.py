"""The parts of a cell's state that one of its ranks computes with: boxes of local parameters and of launch shards.

State stays cut as at the launch: unit, shard, block. A cell may go on with another number of ranks than the launch's
tensor-parallel size T. A rank's parameters then lie in several shards, or in parts of them. Each local parameter is
described by its name and by overlaps; an overlap names equal boxes of the local tensor and of one shard's tensor.

Invariants
- The overlaps of one local parameter fill it exactly once.
- Over all positions of a cell, the overlaps of a name cover every element of every shard at least once.
- With T ranks each sharded parameter is one overlap: the shard is the position, and both boxes are whole.
- If several positions cover an element, its gradient is the sum of their contributions (a key and value group that
  several ranks compute). Of a parameter that is replicated over the cell only position 0 contributes; all receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Box", "Overlap", "Position", "add", "common_shard", "read"]

Box = tuple[tuple[int, int], ...]
"""``[start, stop)`` in each dimension of a tensor."""


@dataclass(frozen=True)
class Position:
    """A rank's place in its cell's tensor-parallel group: ``index`` of ``count``."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"position {self.index} of {self.count}")


@dataclass(frozen=True)
class Overlap:
    """A box of a local parameter and the equal box of one launch shard's parameter."""

    shard: int
    """0 … T - 1; replicated parameters are in :func:`common_shard`."""
    local: Box
    """In the local tensor."""
    remote: Box
    """In the tensor of (unit, shard, name) as it was cut at the launch."""

    def __post_init__(self) -> None:
        if [stop - start for start, stop in self.local] != [stop - start for start, stop in self.remote]:
            raise ValueError(f"boxes of one overlap differ in shape: {self.local} and {self.remote}")


def common_shard(tensor: int) -> int:
    """Return the shard of parameters that are replicated over a tensor-parallel group of ``tensor`` launch ranks."""
    return tensor if tensor > 1 else 0


def read(overlaps: Sequence[Overlap], local: torch.Tensor, remote_of_shard: Callable[[int], torch.Tensor]) -> None:
    """Fill the local tensor from the shards' tensors, which ``remote_of_shard`` returns in the launch's shape."""
    with torch.no_grad():
        for overlap in overlaps:
            _box(local, overlap.local).copy_(_box(remote_of_shard(overlap.shard), overlap.remote))


def add(overlaps: Sequence[Overlap], local: torch.Tensor, remote_of_shard: Callable[[int], torch.Tensor]) -> None:
    """Add the local tensor (a gradient) to the shards' tensors, which :func:`read` describes."""
    with torch.no_grad():
        for overlap in overlaps:
            _box(remote_of_shard(overlap.shard), overlap.remote).add_(_box(local, overlap.local))


def _box(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of a box. Raises ``ValueError`` if the tensor does not contain it."""
    if len(box) != tensor.dim() or any(stop > size for (_, stop), size in zip(box, tensor.shape, strict=False)):
        raise ValueError(f"the box {box} lies outside a tensor of shape {tuple(tensor.shape)}")
    return tensor[tuple(slice(start, stop) for start, stop in box)]
