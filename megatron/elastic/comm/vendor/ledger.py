"""One number for each member of a communicator, which tell together whether all have begun the same operations.

An interruption can come between two members. The root of a broadcast, or a sender, is done as soon as its bytes are in
the memory of its neighbour; that neighbour may be told of the interruption before it begins to receive. Nothing is in
flight then on either side, but the bytes are still there, and the next operation of the communicator would take them
for its own. So a communicator outlives a generation only if its members have begun the same operations.

Invariant: the numbers of all members add up to zero, modulo 2^64, if each collective was begun by all of them and each
message by both of its ends; otherwise they do not, but for one case in 2^64.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["BYTES", "Ledger", "balanced"]

BYTES = 8
_MODULUS = 1 << (8 * BYTES)


@dataclass
class Ledger:
    """The operations that member ``rank`` has begun. A new communicator has a new ledger."""

    rank: int
    balance: int = 0
    _begun: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Kind of operation, or direction and peer of a message → how many were begun."""

    def collective(self, members: Iterable[int]) -> None:
        """Enter one that all ``members`` (global ranks) take part in: each but the first pays what the first is due."""
        order = sorted(members)
        worth = self._worth()
        self.balance += worth * (len(order) - 1) if self.rank == order[0] else -worth

    def sent(self, to: int) -> None:
        """Enter a message to another member."""
        self.balance += self._worth(self.rank, to)

    def received(self, source: int) -> None:
        """Enter a message from another member."""
        self.balance -= self._worth(source, self.rank)

    def _worth(self, *way: int) -> int:
        """Return a number that belongs to the next operation of this kind, the same on every member."""
        self._begun[way] += 1
        text = repr((way, self._begun[way])).encode()
        return int.from_bytes(hashlib.blake2s(text, digest_size=BYTES).digest(), "little")

    def to_bytes(self) -> bytes:
        """Return the number for :func:`balanced`."""
        return (self.balance % _MODULUS).to_bytes(BYTES, "little")


def balanced(numbers: Iterable[bytes]) -> bool:
    """Return whether members with these numbers (:meth:`Ledger.to_bytes`) have begun the same operations."""
    return sum(int.from_bytes(number, "little") for number in numbers) % _MODULUS == 0
