"""The memory that a copy of a block lies in, and the way in which it is stepped there.

A copy's numbers are one :class:`BlockStore`: a tensor and its :class:`Place`. There are two places. The
host's steps with the native kernel. A device's (:mod:`device_place`) steps with kernels of its own, which are queued
on a stream as all work of the device is.

Invariants
- The same step leads to the same bits in either place, or ``state`` mode is used (:mod:`step_selftest`, Muon).
- Host code reads a copy by :meth:`Place.to_host` alone, which is finished when it returns.
- A copy changes its place by a new store, put in one assignment. So a thread that reads the store once has a tensor
  and the place that belongs to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch

from megatron.elastic.state.adam import (
    AdamScalars,
    LionScalars,
    SgdScalars,
    adam_step,
    adam_step_runs,
    lion_step,
    round_to_bf16,
    sgd_step,
)
from megatron.elastic.state.layout import Matrix, Run
from megatron.elastic.state.muon_step import MuonScalars, muon_step
from megatron.elastic.state.step_scalars import Scalars

__all__ = ["HOST", "BlockStore", "HostPlace", "Place", "Staged", "StagedTensor", "Update", "read_together"]

Update = tuple[torch.Tensor, Sequence[Scalars]]
"""The gradient of one step of a block, fp32 [n], and the scalars of each of its runs."""


class Staged(Protocol):
    """A copy in host memory of a device's tensor, possibly on its way."""

    def wait(self) -> torch.Tensor:
        """Return it when it is complete. On any thread, as often as wanted."""

    def is_here(self) -> bool:
        """Return whether :meth:`wait` would return at once."""


@dataclass(frozen=True)
class StagedTensor:
    """A tensor that is in host memory already."""

    values: torch.Tensor

    def wait(self) -> torch.Tensor:
        """See :meth:`Staged.wait`."""
        return self.values

    def is_here(self) -> bool:
        """See :meth:`Staged.is_here`."""
        return True


class Place(ABC):
    """See the module docstring. The tensors of one call lie in this place, are fp32 and of one length."""

    on_device: bool
    """True if the host cannot read its memory."""

    @abstractmethod
    def empty(self, *shape: int) -> torch.Tensor:
        """Return memory for fp32 values, undefined so far."""

    @abstractmethod
    def bring(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` of any place in this one: the same tensor if it lies here."""

    @abstractmethod
    def stage(self, values: torch.Tensor) -> Staged:
        """Begin to copy ``values``, which lie here, to host memory."""

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values``, which lie here, in host memory: the same tensor if this is the host's."""
        return self.stage(values).wait()

    def update(self, state: torch.Tensor, start: int, runs: Sequence[Run], updates: Sequence[Update]) -> None:
        """Step ``runs`` of one block in place, by one update after another.

        ``state``: fp32 [3, n], from element ``start`` of its layout on.
        """
        for gradient, scalars in updates:
            numbers = (*state.unbind(), gradient)
            for run, by in zip(runs, scalars, strict=True):
                self._step(run, tuple(row[run.start - start : run.stop - start] for row in numbers), by)

    def _step(self, run: Run, numbers: tuple[torch.Tensor, ...], scalars: Scalars) -> None:
        master, first, second, grad = numbers
        if isinstance(scalars, AdamScalars):
            self.adam(master, first, second, grad, scalars)
            for moment, kind in zip((first, second), scalars.moments, strict=True):
                if kind == "bf16":
                    self.keep_in_bf16(moment)
        elif isinstance(scalars, LionScalars):
            self.lion(master, first, grad, scalars)
        elif isinstance(scalars, SgdScalars):
            self.sgd(master, first, grad, scalars)
        else:
            assert run.matrix is not None, "only matrices are stepped by Muon"
            self.muon(master, first, grad, run.matrix, scalars)

    @abstractmethod
    def adam(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        scalars: AdamScalars,
    ) -> None:
        """Update ``master``, ``exp_avg`` and ``exp_avg_sq`` in place."""

    @abstractmethod
    def lion(self, master: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor, scalars: LionScalars) -> None:
        """Update ``master`` and ``momentum`` in place."""

    @abstractmethod
    def sgd(self, master: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor, scalars: SgdScalars) -> None:
        """Update ``master`` and ``momentum`` in place."""

    def muon(
        self, master: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor, matrix: Matrix, scalars: MuonScalars
    ) -> None:
        """Update ``master`` and ``momentum`` of one matrix in place. The bits may differ between places."""
        muon_step(master, momentum, grad, matrix, scalars)

    @abstractmethod
    def round_to_bf16(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Write ``source`` into the bf16 tensor ``target``, to nearest even."""

    def keep_in_bf16(self, values: torch.Tensor) -> None:
        """Round ``values`` in place to values of bf16, to nearest even."""
        rounded = torch.empty_like(values, dtype=torch.bfloat16)
        self.round_to_bf16(values, rounded)
        values.copy_(rounded)


def _is_plain_adam(scalars: Scalars) -> TypeGuard[AdamScalars]:
    return isinstance(scalars, AdamScalars) and scalars.fp32


class HostPlace(Place):
    """Host memory. Mirrors lie here on every platform."""

    on_device = False

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32)

    def bring(self, values: torch.Tensor) -> torch.Tensor:
        return values if values.is_cpu else values.cpu()

    def stage(self, values: torch.Tensor) -> Staged:
        return StagedTensor(values)

    def update(self, state: torch.Tensor, start: int, runs: Sequence[Run], updates: Sequence[Update]) -> None:
        plain = [(gradient, [one for one in scalars if _is_plain_adam(one)]) for gradient, scalars in updates]
        if len(plain) <= 2 and all(len(scalars) == len(runs) for _, scalars in plain):
            adam_step_runs(state, [(run.start - start, run.stop - start) for run in runs], plain)
        else:
            super().update(state, start, runs, updates)

    def adam(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        scalars: AdamScalars,
    ) -> None:
        adam_step(master, exp_avg, exp_avg_sq, grad, scalars)

    def lion(self, master: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor, scalars: LionScalars) -> None:
        lion_step(master, momentum, grad, scalars)

    def sgd(self, master: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor, scalars: SgdScalars) -> None:
        sgd_step(master, momentum, grad, scalars)

    def round_to_bf16(self, source: torch.Tensor, target: torch.Tensor) -> None:
        round_to_bf16(source, target)


HOST = HostPlace()
"""The place of the host; it has no state."""


@dataclass(frozen=True)
class BlockStore:
    """The numbers of one copy. ``state``: fp32 [3, numel]: master, exp_avg, exp_avg_sq."""

    place: Place
    state: torch.Tensor

    def on_host(self) -> torch.Tensor:
        """Return the numbers in host memory; only to be read."""
        return self.place.to_host(self.state)

    def host_clone(self) -> torch.Tensor:
        """Return a copy of the numbers in host memory."""
        found = self.on_host()
        return found.clone() if found is self.state else found

    def clone(self) -> BlockStore:
        """Return a copy in the same place."""
        return BlockStore(self.place, self.state.clone())


def read_together(stores: Sequence[BlockStore]) -> list[torch.Tensor]:
    """Return the numbers of each store in host memory. Those of a device come in one piece."""
    away: dict[Place, list[int]] = {}
    for number, store in enumerate(stores):
        away.setdefault(store.place, []).append(number)
    found: dict[int, torch.Tensor] = {}
    for place, numbers in away.items():
        if place.on_device and len(numbers) > 1:
            states = [stores[number].state for number in numbers]
            whole = place.to_host(torch.cat([state.reshape(-1) for state in states]))
            parts = whole.split([state.numel() for state in states])
            found |= {n: part.view(3, -1) for n, part in zip(numbers, parts, strict=True)}
        else:
            found |= {n: stores[n].on_host() for n in numbers}
    return [found[number] for number in range(len(stores))]
