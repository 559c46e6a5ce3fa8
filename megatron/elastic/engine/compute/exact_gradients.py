"""Gradients whose sum has the same bits for any distribution of the samples over ranks (docs/design.md §8).

Activations and input gradients of a sample do not depend on the rank or on the other
samples of the piece; sums over samples do. In exact mode a piece is therefore one sample. Its
parameter gradients are rounded once to 64-bit fixed point. Everything after that is
integer addition: over the samples of a rank, over the ranks of a cell, over the cells of
a unit group. Only the total is converted to fp32 again.

Each use of a shared weight is a contribution of its own: tied embeddings give the
same bits whether both ends are on one cell or on two.

If a contribution is out of the range of the sum, all ranks agree on that before any
gradient is kept and compute the step again at a coarser resolution. This depends on the
step's data alone, so every run does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron.elastic import _state
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.plan.model import Grid, Plan, Profile, Topology
from megatron.elastic.plan.policies.registry import Choice

__all__ = ["ExactGradients", "OutOfRange", "one_sample_pieces", "resolutions"]

_FINEST = 36
"""Binary places of the first attempt, before the loss scale; 2^-36 is fp32's own step at 2^-13."""
_COARSER = 8
_ATTEMPTS = 6
_CONVERTIBLE = 51
"""The native kernel converts magnitudes below 2^51."""
_OUT_OF_RANGE, _NOT_FINITE = 1, 2


class OutOfRange(RuntimeError):
    """Gradients are too large for every resolution; raised on every rank."""


def resolutions(loss_scale: float) -> list[int]:
    """Return the binary places to try, finest first, reduced by the exponent of the loss scale."""
    finest = _FINEST - math.floor(math.log2(loss_scale))
    return [finest - _COARSER * attempt for attempt in range(_ATTEMPTS)]


def one_sample_pieces(choice: Choice) -> Choice:
    """Return ``choice`` on a grid of single samples."""

    def choose(topology: Topology, profile: Profile) -> Plan:
        grid = topology.grid
        single = Grid(grid.global_batch_size, 1, grid.data_parallel_size)
        return choice(replace(topology, grid=single), profile)

    return choose


class ExactGradients:
    """The sums of one rank, one int64 an element of the arena. ``uses``: most uses of one weight in the model.

    They are kept and added on the host, also where the arena is on a device.
    """

    def __init__(self, arena: Arena, samples: int, uses: int = 2) -> None:
        self._arena = arena
        # Sums of `samples · uses` contributions must stay below 2^62.
        self._limit = 2.0 ** min(_CONVERTIBLE, 62 - math.ceil(math.log2(samples * uses)))
        self._sums = torch.zeros(0, dtype=torch.int64)
        self._scale = 1.0
        self._flags = 0
        self._finite = True

    def begin(self, places: int) -> None:
        """Begin a pass: set sums to zero; contributions are rounded to ``2^-places``.

        Raises ``ValueError`` in a cell of another size than at the launch: its partial sums are other numbers.
        """
        if self._arena.has_local:
            raise ValueError("--elastic-exact cannot go on with another tensor-parallel size: it is part of the bits")
        if self._sums.shape != self._arena.gradients.shape:
            self._sums = torch.zeros(self._arena.gradients.shape, dtype=torch.int64)
        else:
            self._sums.zero_()
        self._scale, self._flags, self._finite = math.ldexp(1.0, places), 0, True

    def fold(self) -> None:
        """Add the arena's gradients of a backward pass to the sums, and set them to zero."""
        gradients = self._arena.gradients
        self._fold(gradients.cpu(), self._sums)  # on a CPU the same tensor, which the fold sets to zero
        if gradients.device.type != "cpu":
            gradients.zero_()

    def contribute(self, unit: int, name: str, gradient: torch.Tensor) -> None:
        """Add the gradient of one use of a parameter that has several uses."""
        start, stop = self._arena.place_of(unit, name)
        self._fold(gradient.detach().to("cpu", torch.float32, copy=True).reshape(-1), self._sums[start:stop])

    def _fold(self, gradient: torch.Tensor, sums: torch.Tensor) -> None:
        count = gradient.numel()
        self._flags |= _state.fold(gradient.data_ptr(), sums.data_ptr(), count, self._scale, self._limit)

    def views(self) -> Mapping[int, Sequence[torch.Tensor]]:
        """Return the sums of each parameter, in its shape, per unit, for addition within a cell."""
        views: dict[int, list[torch.Tensor]] = {}
        for unit, gradients in self._arena.gradient_views().items():
            starts = [view.storage_offset() for view in gradients]
            views[unit] = [
                self._sums[start : start + view.numel()].view(view.shape)
                for start, view in zip(starts, gradients, strict=True)
            ]
        return views

    def agreed(self, world: dist.ProcessGroup) -> bool:
        """Return whether all contributions of all ranks were in range. Collective; call before gradients are kept."""
        flags = torch.tensor([self._flags & _OUT_OF_RANGE, self._flags & _NOT_FINITE])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=world)
        self._finite = not bool(flags[1])
        return not self._finite or not bool(flags[0])

    def withhold(self, start: int, stop: int) -> None:
        """Contribute nothing to the sums of ``[start, stop)`` of the arena: another rank of the cell does."""
        self._sums[start:stop].zero_()

    def reduce(self, start: int, stop: int, reduce_blocks: Callable[[torch.Tensor], None]) -> None:
        """Sum ``[start, stop)`` of the arena over a unit group, and write the sum as fp32 to the arena's gradients.

        If a contribution of any rank was not finite, all gradients become NaN, and the vote refuses the step.
        """
        sums, gradients = self._sums[start:stop], self._arena.gradients[start:stop]
        reduce_blocks(sums)
        on_host = gradients.device.type == "cpu"
        summed = gradients if on_host else torch.empty(gradients.shape, dtype=torch.float32)
        _state.unfold(sums.data_ptr(), summed.data_ptr(), sums.numel(), self._scale)
        if not on_host:
            gradients.copy_(summed)
        if not self._finite:
            gradients.fill_(math.nan)
