"""One rank's copy of one block: its numbers, its version, and the gradients that it retains.

The pool (:mod:`pool`) changes copies and keeps their rules; other modules only read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron.elastic.state.layout import Run, StateBlock
from megatron.elastic.state.place import BlockStore, Place
from megatron.elastic.state.record import GradientKey
from megatron.elastic.state.retained import Lent, Retained

__all__ = ["SLOTS", "BlockCopy"]

SLOTS = 2
"""Gradients that a copy may retain."""


@dataclass
class BlockCopy:
    """This rank's copy of one block. ``store``: its numbers, fp32 [3, numel]: master, exp_avg, exp_avg_sq."""

    block: StateBlock
    runs: tuple[Run, ...]
    store: BlockStore
    version: int
    counted: bool = True
    lineage: str = ""
    """Hash chain over the copy's history: equal lineages mean equal bits (``hashing``)."""
    previous: tuple[int, BlockStore, str] | None = None
    """(version, numbers, lineage) before the last change, in ``state`` mode."""
    gradients: dict[GradientKey, Retained] = field(default_factory=dict)
    spare: list[torch.Tensor] = field(default_factory=list)
    """Host memory for the next gradients, fp32 [numel] each."""

    @property
    def place(self) -> Place:
        """The place of its numbers."""
        return self.store.place

    @property
    def state(self) -> torch.Tensor:
        """Its numbers, fp32 [3, numel], in its place."""
        return self.store.state

    @property
    def master(self) -> torch.Tensor:
        """Master parameters, fp32 [numel]."""
        return self.state[0]

    @property
    def exp_avg(self) -> torch.Tensor:
        """First moment, fp32 [numel]; the momentum under Lion, SGD and Muon."""
        return self.state[1]

    @property
    def exp_avg_sq(self) -> torch.Tensor:
        """Second moment, fp32 [numel]; unused under Lion, SGD and Muon."""
        return self.state[2]

    def host_gradient(self, key: GradientKey) -> torch.Tensor:
        """Return a retained gradient in host memory, only to be read. Raises ``KeyError``."""
        return self.gradients[key].on_host()

    def has_come(self, key: GradientKey) -> bool:
        """Return whether a gradient is retained and in host memory."""
        found = self.gradients.get(key)
        return found is not None and found.has_come()

    def gradient_hash(self, key: GradientKey) -> str:
        """Return the content hash of a retained gradient. Raises ``KeyError``."""
        return self.gradients[key].hash(self.block.key)

    def keep(self, key: GradientKey, values: torch.Tensor, lent: Lent | None) -> None:
        """Retain a gradient, fp32 [numel], in the host memory ``lent`` or in its own; it may be there already."""
        if lent is not None:
            memory = lent.values
        else:
            memory = self.spare.pop() if self.spare else torch.empty(self.block.numel, dtype=torch.float32)
        retained = Retained(memory, lent=lent)
        if not values.is_cpu:
            memory.copy_(values)
        elif memory is not values:
            retained.take_in(self.block.key, values)
        self.gradients[key] = retained

    def release(self, key: GradientKey) -> None:
        """Forget a gradient. Give its memory back to whom it belongs, or keep it for the next one."""
        gone = self.gradients.pop(key)
        if gone.lent is not None:
            gone.lent.give_back()
        elif gone.staged is None and len(self.spare) < SLOTS and _is_whole(gone.values):
            self.spare.append(gone.values)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes
