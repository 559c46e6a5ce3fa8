"""Messages between two ranks beside the step: what background transfers travel over.

One group of its own, so nothing here can meet a message of a step. Waits happen
on threads of their own and are not counted in what this process waits for: a
stream that has nothing to send is no hang.

A link is one queue, and so is a port of a switch: a step's message waits behind
whatever was handed over before it. Beside a step, long messages therefore go in
pieces, the next one when the receiver has confirmed the last: a step's message
waits for one piece of a stream at most (2 ms at 1 Gbit/s), and what is in nobody's
way still goes as fast as it can. The aim is that of LEDBAT (RFC 6817), a transport
for what has time; its means, measured delays, would be blurred here by busy
processors. Where everybody waits for the stream (:meth:`FabricChannel.hurry`) many
pieces are under way at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.transport import started

__all__ = ["BACKGROUND_ROLE", "FabricChannel"]

BACKGROUND_ROLE = "background"
_TAG, _CONFIRMED_TAG = 1 << 20, 3 << 20
_PIECE_BYTES = 256 << 10
_BESIDE_A_STEP, _AWAITED = 1, 16
"""Pieces under way to one peer."""


class FabricChannel:
    """:class:`megatron.elastic.state.transfer.Channel` over a fabric, within one generation.

    ``number`` tells transfers of one generation apart. ``given_up()`` turning true
    ends every wait with a ``CommError`` (where the transport allows; otherwise the
    next generation does). One thread at a time sends to a peer, one receives from it.
    Must be kept until the edit that follows: see ``_kept``.
    """

    def __init__(self, fabric: Fabric, number: int, given_up: Callable[[], bool]) -> None:
        self._fabric = fabric
        self._group = fabric.group(BACKGROUND_ROLE, range(fabric.slots))
        self._number = number & 0xFFFF
        self._given_up = given_up
        self._allowed = _BESIDE_A_STEP
        self._unconfirmed: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = {}
        """Peer → confirmations to come, and where to."""
        self._kept: list[tuple[dist.Work, torch.Tensor]] = []
        """Messages nobody waited for to the end: a peer may still write into them until the next edit."""

    def hurry(self) -> None:
        """From now on everybody waits for what is sent here."""
        self._allowed = _AWAITED

    def send(self, peer: int, tag: str, payload: torch.Tensor) -> None:
        """See ``Channel``."""
        pieces = _pieces(payload.reshape(-1))  # none of an empty message: there is nothing to wait for
        for piece in pieces:
            if len(pieces) > 1:
                self._confirmed(peer, self._allowed - 1)
                self._expect_confirmation(peer)
            self._settle(dist.isend(piece, dst=peer, group=self._group, tag=_TAG + self._number), piece)

    def recv(self, peer: int, tag: str, out: torch.Tensor) -> None:
        """See ``Channel``."""
        pieces = _pieces(out.view(-1))
        for piece in pieces:
            self._settle(dist.irecv(piece, src=peer, group=self._group, tag=_TAG + self._number), piece)
            if len(pieces) > 1:
                token = torch.zeros(1, dtype=torch.uint8)
                self._settle(dist.isend(token, dst=peer, group=self._group, tag=_CONFIRMED_TAG + self._number), token)

    def under_way(self, peer: int) -> int:
        """Pieces handed over that ``peer`` has not confirmed."""
        return len(self._unconfirmed.get(peer, ()))

    def drain(self, peer: int) -> None:
        """Wait until ``peer`` has confirmed everything: nothing of this channel is left on the way there."""
        self._confirmed(peer, 0)

    def _expect_confirmation(self, peer: int) -> None:
        token = torch.empty(1, dtype=torch.uint8)
        work = started(dist.irecv(token, src=peer, group=self._group, tag=_CONFIRMED_TAG + self._number))
        self._unconfirmed.setdefault(peer, deque()).append((work, token))

    def _confirmed(self, peer: int, left: int) -> None:
        """Wait until at most ``left`` pieces are unconfirmed."""
        expected = self._unconfirmed.setdefault(peer, deque())
        while len(expected) > left:
            work, token = expected[0]
            self._settle(work, token)
            expected.popleft()

    def _settle(self, posted: dist.Work | None, tensor: torch.Tensor) -> None:
        work = started(posted)
        try:
            self._fabric.settle(work, self._given_up)
        except CommError:
            self._kept.append((work, tensor))
            raise


def _pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    """The same on both sides, since both know the size."""
    length = _PIECE_BYTES // flat.element_size()
    return [flat[first : first + length] for first in range(0, flat.numel(), length)]
