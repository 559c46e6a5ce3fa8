"""Messages between two ranks beside the step, for background transfers.

The side channel has a group of its own, so its messages are never taken for those of a step. It waits on threads of
its own, and these waits do not count as waits of the process: a stream that has nothing to send is no hang.

A link is a queue: a message of a step waits until all data before it has been sent. While a step runs, long messages
are therefore cut into pieces, and each piece waits until the receiver has confirmed the one before. So a step's
message waits for at most one piece of a stream (1 ms at 1 Gbit/s). If no step runs, messages go at full speed.
LEDBAT (RFC 6817) has the same aim, transfers in the background; it measures delays, which busy processors would blur
here. If all ranks wait for the stream (:meth:`SideChannel.hurry`), many pieces are under way at once.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["AWAITED", "BACKGROUND_ROLE", "BESIDE_A_STEP", "PIECE_BYTES", "SideChannel"]

BACKGROUND_ROLE = "background"
PIECE_BYTES = 128 << 10
BESIDE_A_STEP, AWAITED = 1, 16
"""Pieces under way to one peer."""


class SideChannel(Protocol):
    """Within one generation; ``peer`` is a global rank. One thread at a time sends to a peer, one receives from it.

    Must be kept until the edit that follows: a transport may still use its messages.
    """

    def send(self, peer: int, payload: torch.Tensor) -> None:
        """Send a contiguous host tensor; it may be reused when this returns. Raises ``CommError``."""

    def recv(self, peer: int, out: torch.Tensor) -> None:
        """Receive the next message of ``peer`` into ``out``, of the sender's size. Raises ``CommError``."""

    def drain(self, peer: int) -> None:
        """Wait until ``peer`` has confirmed everything: nothing of this channel is left on the way there."""

    def hurry(self) -> None:
        """Declare that all ranks wait for these messages from now on. Raises ``CommError``."""

    def give_up(self) -> None:
        """End every wait here with a ``CommError``, where the transport allows; otherwise the next generation does."""

    def under_way(self, peer: int) -> int:
        """Pieces handed over that ``peer`` has not confirmed."""
