"""Messages to and from several peers that one thread waits for together.

A wait for one message after another sleeps and wakes for each. These sleep only while nothing new has come.

Invariant: the messages of one pair come in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["Loan", "PostedTransfers", "Transfers"]


class Loan(Protocol):
    """A message that its sender lends: it stays where the sender has it, who does not write there meanwhile."""

    @property
    def address(self) -> int:
        """Of the message in this process; the same for one that comes from the same memory again."""

    def values(self) -> torch.Tensor:
        """Return the message, fp32, only to be read."""

    def give_back(self) -> None:
        """End the loan, which ends with this object too. From any thread."""


class Transfers(Protocol):
    """Messages of one generation in contiguous host memory. Ranks are global. All raise ``CommError``.

    What is sent must not change until :meth:`wait` has returned nothing and, if it lies in memory that may be lent
    (``Fabric.lendable``), while a peer has it on loan. Nothing may use the memory of a receive until its number was
    returned. For one thread at a time.
    """

    def receive(self, into: Sequence[torch.Tensor], sources: Sequence[int]) -> None:
        """Post a receive for each of ``into``. All receives are numbered in the order in which they are posted."""

    def send(self, values: torch.Tensor, to: int) -> None:
        """Send ``values``."""

    def come(self) -> list[int]:
        """Return the numbers of the messages that have come since the last answer, ascending."""

    def wait(self) -> list[int]:
        """As :meth:`come`, but wait until there is one; empty when all have come and all that was sent has left."""

    def loan(self, number: int) -> Loan | None:
        """Return a message that has come as a loan, once; nothing was written to the memory of its receive then."""


class PostedTransfers:
    """:class:`Transfers` over works of any group: waits for receives one after another. Memory may be a device's."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group, self._tag = group, tag
        self._receives: list[dist.Work] = []
        self._sends: list[dist.Work] = []
        self._open: list[int] = []
        """Receives that were not returned yet."""

    def receive(self, into: Sequence[torch.Tensor], sources: Sequence[int]) -> None:
        for tensor, source in zip(into, sources, strict=True):
            self._open.append(len(self._receives))
            self._receives.append(self._group.recv([tensor], dist.get_group_rank(self._group, source), self._tag))

    def send(self, values: torch.Tensor, to: int) -> None:
        self._sends.append(self._group.send([values], dist.get_group_rank(self._group, to), self._tag))

    def come(self) -> list[int]:
        came = []
        for number in list(self._open):
            if self._receives[number].is_completed():
                self._end(number)  # at once: a later one of the same pair may be asked for its message only then
                came.append(number)
        return came

    def wait(self) -> list[int]:
        if self._open:
            first = self._open[0]
            self._end(first)
            return [first]
        for work in self._sends:
            work.wait()
        return []

    def loan(self, number: int) -> Loan | None:
        return None

    def _end(self, number: int) -> None:
        self._receives[number].wait()
        self._open.remove(number)
