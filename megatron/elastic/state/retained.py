"""A reduced gradient that a copy of a block retains until it is applied, and what is known of it.

Invariant: its values do not change while it is retained, so its hash and the sum of its squares hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.elastic.state.adam import sum_of_squares
from megatron.elastic.state.hashing import named_hash
from megatron.elastic.state.intake import digest_of, taken_in
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.place import Staged

__all__ = ["Lender", "Lent", "Part", "Retained"]


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


@dataclass(frozen=True)
class Lent:
    """Host memory of another owner, fp32 [numel], for a gradient. ``give_back``: to be called when it is released."""

    values: torch.Tensor
    give_back: Callable[[], None]
    elsewhere: bool = False
    """True if it is another process's."""


class Lender(Protocol):
    """The owner of memory in which gradients of some blocks may be retained."""

    def room(self, key: BlockKey) -> Lent | None:
        """Return memory for the gradient of ``key``; None if there is none."""


@dataclass(slots=True)
class Retained:
    """See the module docstring."""

    values: torch.Tensor
    """fp32 [numel], where it came in."""
    staged: Staged | None = None
    """Its copy in host memory, if it lies on a device."""
    lent: Lent | None = None
    """Its memory, if that is another's."""
    _hash: str = ""
    _squares: float | None = None

    def take_in(self, key: BlockKey, values: torch.Tensor) -> None:
        """Copy ``values`` into its memory, and hash and square them in the same pass. Both lie in host memory."""
        digest, self._squares = taken_in(values, self.values)
        self._hash = named_hash(key, digest)

    def on_host(self) -> torch.Tensor:
        """Return it in host memory, only to be read."""
        return self.values if self.staged is None else self.staged.wait()

    def has_come(self) -> bool:
        """Return whether it is in host memory."""
        return self.staged is None or self.staged.is_here()

    def hash(self, key: BlockKey) -> str:
        """Return its content hash as the gradient of the block ``key``."""
        if not self._hash:
            self._hash = named_hash(key, digest_of(self.on_host()))
        return self._hash

    def squares(self) -> float:
        """Return the sum of its squares, fp64 in a fixed order."""
        if self._squares is None:
            self._squares = sum_of_squares(self.on_host())
        return self._squares
