"""The part of the model that one rank trains, under each layout: its groups, its gradients, its checkpoints.

Invariant: after :func:`backward` the gradients are those of the whole global batch, averaged over replicas and complete
within each, and clipped by the norm of the whole model. So all layouts make the same steps but for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tools.bench.peers_programs import common, pipeline, tensor
from tools.bench.peers_programs.layouts import Layout

__all__ = ["Checkpoints", "Part", "Place", "backward", "groups_of", "part_of"]


@dataclass(frozen=True)
class Place:
    """The place of ``rank`` among ``world`` ranks."""

    layout: Layout
    rank: int
    world: int

    @property
    def part(self) -> int:
        """Number of the part of the model within its replica."""
        return self.rank % self.layout.parts

    @property
    def replica(self) -> int:
        return self.rank // self.layout.parts

    @property
    def replicas(self) -> int:
        return self.world // self.layout.parts


@dataclass(frozen=True)
class Part:
    """A rank's part of the model."""

    model: nn.Module
    inside: dist.ProcessGroup | None = None
    """The ranks of this replica; None where one rank holds the whole model."""
    counted: tuple[nn.Parameter, ...] = ()
    """Parameters whose gradients this rank counts for the norm: over a replica, each one once."""
    added: tuple[nn.Parameter, ...] = ()
    """Parameters with a copy on each rank of the replica, whose gradients are added up."""
    has_loss: bool = True
    """True if its model returns the loss."""

    def finish_gradients(self) -> None:
        """Complete the gradients within the replica and clip them."""
        if self.inside is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), common.CLIP)
            return
        for parameter in self.added:
            dist.all_reduce(parameter.grad, group=self.inside)
        squares = torch.zeros(())
        for parameter in self.counted:
            if parameter.grad is not None:
                squares += parameter.grad.square().sum()
        dist.all_reduce(squares, group=self.inside)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), common.CLIP, squares.sqrt())


def groups_of(place: Place, timeout: timedelta | None) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Make the groups of all ranks; return those of this rank: its replica, and its part over all replicas.

    Both are None where a replica is one rank: the group of the whole world serves.
    """
    size = place.layout.parts
    if size == 1:
        return None, None
    inside = [dist.new_group(range(first, first + size), timeout=timeout) for first in range(0, place.world, size)]
    across = [dist.new_group(range(part, place.world, size), timeout=timeout) for part in range(size)]
    return inside[place.replica], across[place.part]


def part_of(place: Place, inside: dist.ProcessGroup | None) -> Part:
    """Build the part of ``place``, with the same initial weights under all layouts."""
    whole = common.Gpt()
    if inside is None:
        return Part(whole)
    if place.layout.tensor > 1:
        tensor.cut(whole, place.part, place.layout.tensor, inside)
        counted = tensor.shards_of(whole) if place.part else list(whole.parameters())
        return Part(whole, inside, tuple(counted))
    tied = next(whole.tokens.parameters())
    stage = pipeline.Last(whole, inside) if place.part else pipeline.First(whole, inside)
    counted = [p for p in stage.parameters() if p is not tied or not place.part]
    return Part(stage, inside, tuple(counted), (tied,), has_loss=bool(place.part))


def backward(part: Part, parallel: nn.Module, samples: torch.Tensor, replicas: int) -> float:
    """Compute gradients, averaged over the global batch also where replicas have unequal numbers of samples; clip them.

    Return the mean loss of ``samples``. ``parallel`` is the model as the peer wraps it; it averages over ``replicas``.
    """
    loss = parallel(samples)
    (loss * (len(samples) * replicas / common.ROWS)).backward()
    part.finish_gradients()
    return float(loss.detach())


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of one part, each in a file that is whole or absent; the two newest are kept.

    A kill can leave one part a step ahead of another. Both then have the older step.
    """

    folder: Path
    place: Place

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Write the checkpoint of ``step``, on the ranks of the first replica."""
        partial = self._path(step).with_suffix(".partial")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
        partial.replace(self._path(step))
        self._path(step - 2).unlink(missing_ok=True)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Read the newest step that all parts have, if any; return the step to go on with. All ranks call it."""
        names = self.folder.glob(f"checkpoint{self.place.part}.*.pt")
        newest = torch.tensor(max((int(path.suffixes[-2][1:]) for path in names), default=0))
        dist.all_reduce(newest, dist.ReduceOp.MIN)
        step = int(newest)
        if step:
            kept = torch.load(self._path(step), weights_only=True)
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
        return step

    def _path(self, step: int) -> Path:
        return self.folder / f"checkpoint{self.place.part}.{step}.pt"
