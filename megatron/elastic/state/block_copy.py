"""One rank's copy of one block: its numbers, its version, and the gradients that it retains.

The pool (:mod:`pool`) changes copies and keeps their rules; other modules only read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron.elastic.state.adam import sum_of_squares
from megatron.elastic.state.hashing import named_hash
from megatron.elastic.state.intake import digest_of, taken_in
from megatron.elastic.state.layout import Run, StateBlock
from megatron.elastic.state.place import BlockStore, Place, Staged
from megatron.elastic.state.record import GradientKey

__all__ = ["SLOTS", "BlockCopy", "Lent", "Part"]

SLOTS = 2
"""Gradients that a copy may retain."""


@dataclass(frozen=True)
class Part:
    """Elements ``[start, stop)`` of a larger tensor that goes to host memory in one piece."""

    whole: Staged
    start: int
    stop: int

    def wait(self) -> torch.Tensor:
        """See :meth:`Staged.wait`."""
        return self.whole.wait()[self.start : self.stop]

    def is_here(self) -> bool:
        """See :meth:`Staged.is_here`."""
        return self.whole.is_here()


@dataclass
class Lent:
    """Host memory of another owner, fp32 [numel], for a gradient. ``give_back``: to be called when it is released."""

    values: torch.Tensor
    give_back: Callable[[], None]


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
    gradients: dict[GradientKey, torch.Tensor] = field(default_factory=dict)
    """Retained gradients, fp32 [numel], where they came in."""
    staged: dict[GradientKey, Staged] = field(default_factory=dict)
    """Host copies of those gradients that lie on a device."""
    lent: dict[GradientKey, Lent] = field(default_factory=dict)
    """The memory of those gradients that lie in another's."""
    hashes: dict[GradientKey, str] = field(default_factory=dict)
    """Content hashes of those gradients, from their arrival or first use on."""
    squares: dict[GradientKey, float] = field(default_factory=dict)
    """Sums of their squares, as far as they were needed."""
    spare: list[torch.Tensor] = field(default_factory=list)

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
        staged = self.staged.get(key)
        return self.gradients[key] if staged is None else staged.wait()

    def has_come(self, key: GradientKey) -> bool:
        """Return whether a gradient is retained and in host memory."""
        staged = self.staged.get(key)
        return key in self.gradients and (staged is None or staged.is_here())

    def gradient_hash(self, key: GradientKey) -> str:
        """Return the content hash of a retained gradient. Raises ``KeyError``."""
        if key not in self.hashes:
            self.hashes[key] = named_hash(self.block.key, digest_of(self.host_gradient(key)))
        return self.hashes[key]

    def gradient_squares(self, key: GradientKey) -> float:
        """Return the sum of squares of a retained gradient, fp64 in a fixed order. Raises ``KeyError``."""
        if key not in self.squares:
            self.squares[key] = sum_of_squares(self.host_gradient(key))
        return self.squares[key]

    def keep(self, key: GradientKey, values: torch.Tensor, lent: Lent | None) -> None:
        """Retain a gradient, fp32 [numel], in the host memory ``lent`` or in its own.

        ``values`` may be in that memory already. Those of elsewhere in host memory are copied, hashed and squared in
        one pass.
        """
        if lent is None:
            memory = self.spare.pop() if self.spare else torch.empty(self.block.numel, dtype=torch.float32)
        else:
            memory, self.lent[key] = lent.values, lent
        if not values.is_cpu:
            memory.copy_(values)
        elif memory is not values:
            digest, self.squares[key] = taken_in(values, memory)
            self.hashes[key] = named_hash(self.block.key, digest)
        self.gradients[key] = memory

    def release(self, key: GradientKey) -> None:
        """Forget a gradient. Give its memory back to whom it belongs, or keep it for the next one."""
        tensor, lent = self.gradients.pop(key), self.lent.pop(key, None)
        self.hashes.pop(key, None)
        self.squares.pop(key, None)
        if lent is not None:
            lent.give_back()
            return
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        if self.staged.pop(key, None) is None and whole and len(self.spare) < SLOTS:
            self.spare.append(tensor)
