"""Gradients whose sum has the same bits whoever computed which sample (docs/design.md §8).

Activations and input gradients of a sample do not depend on where or beside
which others it is computed; sums over samples do. So in exact mode a piece is
one sample, its parameter gradients are rounded once to 64-bit fixed point, and
everything after that is integer addition: over the samples of a rank, over the
ranks of a cell, over the cells of a unit group. Only the total becomes fp32 again.

Uses of a shared weight are contributions of their own: tied embeddings give the
same bits whether both ends lie on one cell or on two.

A contribution out of range, which the sum could not hold, is agreed on by all
ranks before any gradient is kept; the step is then computed again at a coarser
resolution. A function of the step's data alone, so every run does the same.
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
"""Gradients are rounded to 2^-36 at first (times the loss scale): fp32's own step at 2^-13."""
_COARSER = 8
_ATTEMPTS = 6
_CONVERTIBLE = 51
"""The native kernel converts magnitudes below 2^51."""
_OUT_OF_RANGE, _NOT_FINITE = 1, 2


class OutOfRange(RuntimeError):
    """Gradients so large that no resolution holds them; the same on every rank."""


def resolutions(loss_scale: float) -> list[int]:
    """Binary places behind the point to try, finest first: what the loss scale multiplies is taken off."""
    finest = _FINEST - math.floor(math.log2(loss_scale))
    return [finest - _COARSER * attempt for attempt in range(_ATTEMPTS)]


def one_sample_pieces(choice: Choice) -> Choice:
    """``choice`` on a grid of single samples."""

    def choose(topology: Topology, profile: Profile) -> Plan:
        grid = topology.grid
        single = Grid(grid.global_batch_size, 1, grid.data_parallel_size)
        return choice(replace(topology, grid=single), profile)

    return choose


class ExactGradients:
    """The sums of one rank, one int64 an element of the arena. ``uses``: of a weight in one model, at most."""

    def __init__(self, arena: Arena, samples: int, uses: int = 2) -> None:
        self._arena = arena
        # Sums of `samples · uses` contributions must stay below 2^62.
        self._limit = 2.0 ** min(_CONVERTIBLE, 62 - math.ceil(math.log2(samples * uses)))
        self._sums = torch.zeros(0, dtype=torch.int64)
        self._scale = 1.0
        self._flags = 0
        self._finite = True

    def begin(self, places: int) -> None:
        """Before a pass: sums are zero, contributions are rounded to ``2^-places``."""
        if self._sums.shape != self._arena.gradients.shape:
            self._sums = torch.zeros_like(self._arena.gradients, dtype=torch.int64)
        else:
            self._sums.zero_()
        self._scale, self._flags, self._finite = math.ldexp(1.0, places), 0, True

    def fold(self) -> None:
        """Take up what a backward pass left in the arena's gradients, which are zero afterwards."""
        self._fold(self._arena.gradients, self._sums)

    def contribute(self, unit: int, name: str, gradient: torch.Tensor) -> None:
        """Take up the gradient of one use of a parameter that has several."""
        where = self._arena.slices[unit]
        start = where.start + where.layout.slot(name).start
        flat = gradient.detach().to(torch.float32, copy=True).reshape(-1)
        self._fold(flat, self._sums[start : start + flat.numel()])

    def _fold(self, gradient: torch.Tensor, sums: torch.Tensor) -> None:
        count = gradient.numel()
        self._flags |= _state.fold(gradient.data_ptr(), sums.data_ptr(), count, self._scale, self._limit)

    def views(self) -> Mapping[int, Sequence[torch.Tensor]]:
        """Sums of each parameter, shaped like it, per unit: what a cell adds up among its ranks."""
        views: dict[int, list[torch.Tensor]] = {}
        for unit, gradients in self._arena.gradient_views().items():
            starts = [view.storage_offset() for view in gradients]
            views[unit] = [
                self._sums[start : start + view.numel()].view(view.shape)
                for start, view in zip(starts, gradients, strict=True)
            ]
        return views

    def agreed(self, everybody: dist.ProcessGroup) -> bool:
        """Whether every contribution of every rank was in range. Collective; before anything is kept."""
        flags = torch.tensor([self._flags & _OUT_OF_RANGE, self._flags & _NOT_FINITE])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=everybody)
        self._finite = not bool(flags[1])
        return not self._finite or not bool(flags[0])

    def reduce(self, start: int, stop: int, reduce_blocks: Callable[[torch.Tensor], None]) -> None:
        """Sum ``[start, stop)`` of the arena over a unit group, and write it as fp32 where gradients belong.

        A contribution that was not finite, anyone's, makes all of them not a number: the vote says so.
        """
        sums, gradients = self._sums[start:stop], self._arena.gradients[start:stop]
        reduce_blocks(sums)
        _state.unfold(sums.data_ptr(), gradients.data_ptr(), sums.numel(), self._scale)
        if not self._finite:
            gradients.fill_(math.nan)
