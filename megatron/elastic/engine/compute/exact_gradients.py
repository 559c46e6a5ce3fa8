"""Gradients whose sum has the same bits for any distribution of the micro-batches over ranks (docs/design.md §8).

The activations and gradients of one micro-batch do not depend on the rank that computes it:
it makes the same calls on tensors of the same shapes. Sums over micro-batches depend on their
order. In exact mode a piece is therefore a whole micro-batch of the launch's grid, whose rows
are the same for every data-parallel size. Its parameter gradients are rounded once to 64-bit
fixed point. Everything after that is integer addition: over the micro-batches of a rank, over
the ranks of a cell, over the cells of a unit group. Only the total is converted to fp32 again,
by the ranks that receive it.

A gradient is converted and added when autograd has it (:meth:`Arena.hand_over`): on a host it is then
still in the processor's caches, and no fp32 sum is written and read again. The first
contribution of a pass replaces the sum of the pass before, which is therefore not zeroed.
Sums lie where gradients do (:mod:`fixed_point`).

Each use of a shared weight is a contribution of its own: tied embeddings give the
same bits whether both ends are on one cell or on two.

If a contribution is out of the range of the sum, all ranks agree on that before any
gradient is kept and compute the step again at a coarser resolution. This depends on the
step's data alone, so every run does the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron.elastic.engine.compute.buffers import Arena, UnitSlice
from megatron.elastic.engine.compute.fixed_point import CONVERTIBLE, NOT_FINITE, OUT_OF_RANGE, fixed_point
from megatron.elastic.plan.dataflow import PlanError, microbatch_rows
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.policies.registry import Choice
from megatron.elastic.state.layout import UnitShard

__all__ = ["ExactGradients", "OutOfRange", "resolutions", "whole_microbatches"]

_FINEST = 36
"""Binary places of the first attempt, before the loss scale; 2^-36 is fp32's own step at 2^-13."""
_COARSER = 8
_ATTEMPTS = 6


class OutOfRange(RuntimeError):
    """Gradients are too large for every resolution; raised on every rank."""


def resolutions(loss_scale: float) -> list[int]:
    """Return the binary places to try, finest first, reduced by the exponent of the loss scale."""
    finest = _FINEST - math.floor(math.log2(loss_scale))
    return [finest - _COARSER * attempt for attempt in range(_ATTEMPTS)]


def whole_microbatches(choice: Choice) -> Choice:
    """Return ``choice``, which raises ``PlanError`` where a plan cuts or mixes micro-batches."""

    def choose(topology: Topology, profile: Profile) -> Plan:
        plan = choice(topology, profile)
        for piece in plan.pieces:
            if piece.rows != microbatch_rows(plan.grid, plan.grid.nominal_microbatch(piece.rows[0])):
                raise PlanError(f"--elastic-exact adds up whole micro-batches; a piece has rows {list(piece.rows)}")
        return plan

    return choose


class ExactGradients:
    """The sums of one rank, one int64 an element of the arena.

    ``microbatches``: most of them in a step; ``uses``: most uses of one weight in the model; ``parts``: ranks of a
    cell, each of which may have a part of a gradient (sequence parallelism adds those of norms).

    From now on the arena hands its gradients over to it.
    """

    def __init__(self, arena: Arena, microbatches: int, uses: int = 2, parts: int = 1) -> None:
        self._arena = arena
        # Sums of `microbatches · uses · parts` contributions must stay below 2^62.
        limit = 2.0 ** min(CONVERTIBLE, 62 - math.ceil(math.log2(microbatches * uses * parts)))
        self._arithmetic = fixed_point(limit, arena.device)
        self._sums = torch.zeros(0, dtype=torch.int64, device=arena.device)
        self._laid_out: Mapping[UnitShard, UnitSlice] | None = None
        self._stops: dict[int, int] = {}
        """Start → stop of the places of parameters."""
        self._unset: set[int] = set()
        """Starts of places without a contribution in this pass: their sums are still those of another pass."""
        self._finite = True
        arena.hand_over(self.add)

    def begin(self, places: int) -> None:
        """Begin a pass: forget all sums; contributions are rounded to ``2^-places``.

        Raises ``ValueError`` in a cell of another size than at the launch: its partial sums are other numbers.
        """
        if self._arena.has_local:
            raise ValueError("--elastic-exact cannot go on with another tensor-parallel size: it is part of the bits")
        if self._laid_out is not self._arena.slices:  # padding, which no contribution sets, must be zero
            self._laid_out = self._arena.slices
            self._sums = torch.zeros_like(self._arena.gradients, dtype=torch.int64)
            self._stops = dict(self._arena.places())
        self._unset = set(self._stops)
        self._arithmetic.begin(math.ldexp(1.0, places))
        self._finite = True

    def add(self, start: int, gradient: torch.Tensor) -> None:
        """Add a contribution to the place of a parameter that begins at ``start``; ``gradient`` is left as it is.

        Raises ``RuntimeError`` if the arena was laid out anew since the pass began, ``ValueError`` for another size.
        """
        if self._laid_out is not self._arena.slices:
            raise RuntimeError("a gradient was computed outside of a pass")
        stop = start + gradient.numel()
        if stop != self._stops[start]:
            raise ValueError(f"{gradient.numel()} gradients for elements [{start}, {self._stops[start]}) of the arena")
        self._arithmetic.fold(gradient.detach().reshape(-1), self._sums[start:stop], first=start in self._unset)
        self._unset.discard(start)

    def contribute(self, unit: int, name: str, gradient: torch.Tensor) -> None:
        """Add the gradient of one use of a parameter that has several uses."""
        self.add(self._arena.place_of(unit, name)[0], gradient)

    def spoil(self) -> None:
        """Act as if a contribution of this rank had not been finite (fault injection)."""
        self._finite = False

    def views(self) -> Mapping[int, Sequence[torch.Tensor]]:
        """Return the sums of each parameter, in its shape, per unit, for addition within a cell."""
        self._end()
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
        self._end()
        found = self._arithmetic.flags() | (0 if self._finite else NOT_FINITE)
        flags = torch.tensor([found & OUT_OF_RANGE, found & NOT_FINITE])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=world)
        self._finite = not bool(flags[1])
        return not self._finite or not bool(flags[0])

    def _end(self) -> None:
        """Set the sums of parameters without a contribution in this pass to zero."""
        for start in self._unset:
            self._sums[start : self._stops[start]].zero_()
        self._unset.clear()

    def withhold(self, start: int, stop: int) -> None:
        """Contribute nothing to the sums of ``[start, stop)`` of the arena: another rank of the cell does."""
        self._sums[start:stop].zero_()

    def sums(self, start: int, stop: int) -> torch.Tensor:
        """Return the sums of ``[start, stop)`` of the arena, a view, for addition over a unit group."""
        return self._sums[start:stop]

    def total(self, start: int, stop: int) -> None:
        """Write the sums of ``[start, stop)`` of the arena, which are those of all ranks now, to its gradients as fp32.

        If a contribution of any rank was not finite, these gradients become NaN, and the vote refuses the step.
        """
        gradients = self._arena.gradients[start:stop]
        if self._finite:
            self._arithmetic.unfold(self._sums[start:stop], gradients)
        else:
            gradients.fill_(math.nan)
