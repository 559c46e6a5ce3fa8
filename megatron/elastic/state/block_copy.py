"""One rank's copy of one block: its numbers, its version, and the gradients that it retains.

The pool (:mod:`pool`) changes copies and keeps their rules; other modules only read them.

An update takes as long as its memory: it reads and writes 24 bytes a parameter, and the gradient's 4. So a copy whose
numbers nothing reads, a mirror, may make two updates in one pass. Its version counts an update as soon as it is
accepted, since all that the update needs is here.

Invariants
- The numbers that the training thread reads (:attr:`BlockCopy.store`) are those of the copy's version.
- Only a mirror in the pool has accepted updates, and only the training thread makes them. A copy that arrives is
  updated at once by the thread that receives it: a thread that reads its numbers meanwhile makes no update.
- Another thread may go on for a moment after its guard has been taken off, as in a transfer that was given up: what it
  reads then is used for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megatron.elastic.state.layout import Run, StateBlock
from megatron.elastic.state.place import BlockStore, Place
from megatron.elastic.state.record import GradientKey
from megatron.elastic.state.retained import Lent, Retained
from megatron.elastic.state.step_scalars import Scalars

__all__ = ["SLOTS", "TOGETHER", "TORN", "BlockCopy"]

SLOTS = 2
"""Gradients that a copy may retain for steps to come."""
TOGETHER = 2
"""Updates that a mirror makes in one pass: those of this many versions, up to one that it divides."""
TORN = -2
"""Version of a copy while its numbers change, and of one whose update was interrupted."""


class _Update(NamedTuple):
    """An update that a copy's version counts and its numbers lack."""

    gradient: Retained
    scalars: Sequence[Scalars]
    """Of each run."""


@dataclass
class BlockCopy:
    """This rank's copy of one block. See the module docstring."""

    block: StateBlock
    runs: tuple[Run, ...]
    made: BlockStore
    """Its numbers without the updates that it has only accepted, fp32 [3, numel]: master, exp_avg, exp_avg_sq.

    Other threads than the training thread read these: while a guard of theirs is on the pool, they lack nothing.
    """
    version: int
    counted: bool = True
    lineage: str = ""
    """Hash chain over the copy's history: equal lineages mean equal bits (``hashing``)."""
    previous: tuple[int, BlockStore, str] | None = None
    """(version, numbers, lineage) before the last change, in ``state`` mode."""
    gradients: dict[GradientKey, Retained] = field(default_factory=dict)
    spare: list[torch.Tensor] = field(default_factory=list)
    """Host memory for the next gradients, fp32 [numel] each."""
    origin: int = -1
    """Rank from whose copy this one was made since the contents of the copies were last compared; -1: none."""
    doubted_by: int = -1
    """Owner whose copy had other contents when they were last compared, until one of the two is repaired; -1: none."""
    accepted: list[_Update] = field(default_factory=list)
    """Updates that its version counts and :attr:`made` lacks, oldest first."""

    @property
    def place(self) -> Place:
        """The place of its numbers."""
        return self.made.place

    @property
    def store(self) -> BlockStore:
        """Its numbers at its version; on the training thread, which makes the accepted updates for it."""
        if self.accepted:
            self.catch_up()
        return self.made

    @store.setter
    def store(self, store: BlockStore) -> None:
        self.made = store

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

    def accept(self, key: GradientKey, scalars: Sequence[Scalars]) -> None:
        """Count the update by a retained gradient from now on; it is made with the next one. Raises ``KeyError``."""
        self.accepted.append(_Update(self.gradients.pop(key), scalars))

    def update(self, key: GradientKey, scalars: Sequence[Scalars]) -> None:
        """Make the update by a retained gradient, behind those that were accepted. Raises ``KeyError``."""
        self._make([*self.accepted, _Update(self.gradients.pop(key), scalars)])

    def catch_up(self) -> None:
        """Make the accepted updates."""
        if self.accepted:
            self._make(self.accepted)

    def _make(self, updates: Sequence[_Update]) -> None:
        """Make ``updates``, the accepted ones first. The copy is torn meanwhile, and if it does not get through."""
        version, self.version = self.version, TORN
        place = self.made.place
        due = [(place.bring(by.values if place.on_device else by.on_host()), to) for by, to in updates]
        place.update(self.made.state, self.block.start, self.runs, due)
        self.version, self.accepted = version, []
        for gradient, _ in updates:
            self._let_go(gradient)

    def release(self, key: GradientKey) -> None:
        """Forget a gradient. Give its memory back to whom it belongs, or keep it for the next one."""
        self._let_go(self.gradients.pop(key))

    def _let_go(self, gone: Retained) -> None:
        if gone.lent is not None:
            gone.lent.give_back()
        elif gone.staged is None and len(self.spare) < SLOTS and _is_whole(gone.values):
            self.spare.append(gone.values)

    def bytes_held(self) -> int:
        """Return the bytes of its numbers, before the last change too, and of gradients that no other process has."""
        retained = [*self.gradients.values(), *(one.gradient for one in self.accepted)]
        tensors = [one.values for one in retained if one.lent is None or not one.lent.elsewhere]
        tensors += [self.made.state, *self.spare]
        if self.previous is not None:
            tensors.append(self.previous[1].state)
        return sum(tensor.nbytes for tensor in tensors)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes
