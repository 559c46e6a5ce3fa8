"""Messages beside the step over gloo: the protocol of ``csrc/comm/side_channel.cpp``, in Python.

A piece is a message of the group, a confirmation one byte back. Each takes a turn of a
Python thread, beside a step that wants the processor too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.side_channel import AWAITED, BESIDE_A_STEP, PIECE_BYTES

__all__ = ["GlooSideChannel"]

_TAG, _CONFIRMED_TAG = 1 << 20, 3 << 20


class GlooSideChannel:
    """See :class:`~megatron.elastic.comm.side_channel.SideChannel`. ``settle`` waits for one message."""

    def __init__(self, group: dist.ProcessGroup, number: int, settle: Callable[[dist.Work], None]) -> None:
        self._group = group
        self._number = number & 0xFFFF
        self._settle = settle
        self._allowed = BESIDE_A_STEP
        self._given_up = False
        self._unconfirmed: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = {}
        """Peer → confirmations to come, and where to."""
        self._kept: list[tuple[dist.Work, torch.Tensor]] = []
        """Messages that no thread waited for to the end: a peer may still write into them until the next edit."""

    def hurry(self) -> None:
        """See ``SideChannel``."""
        self._allowed = AWAITED

    def give_up(self) -> None:
        """See ``SideChannel``: gloo's messages cannot be left before they end."""
        self._given_up = True

    def send(self, peer: int, payload: torch.Tensor) -> None:
        """See ``SideChannel``."""
        pieces = _pieces(payload.reshape(-1))  # none of an empty message: there is nothing to wait for
        for piece in pieces:
            if len(pieces) > 1:
                self._confirmed(peer, self._allowed - 1)
                self._expect_confirmation(peer)
            self._wait(dist.isend(piece, dst=peer, group=self._group, tag=_TAG + self._number), piece)

    def recv(self, peer: int, out: torch.Tensor) -> None:
        """See ``SideChannel``."""
        pieces = _pieces(out.view(-1))
        for piece in pieces:
            self._wait(dist.irecv(piece, src=peer, group=self._group, tag=_TAG + self._number), piece)
            if len(pieces) > 1:
                token = torch.zeros(1, dtype=torch.uint8)
                self._wait(dist.isend(token, dst=peer, group=self._group, tag=_CONFIRMED_TAG + self._number), token)

    def under_way(self, peer: int) -> int:
        """See ``SideChannel``."""
        return len(self._unconfirmed.get(peer, ()))

    def drain(self, peer: int) -> None:
        """See ``SideChannel``."""
        self._confirmed(peer, 0)

    def _expect_confirmation(self, peer: int) -> None:
        token = torch.empty(1, dtype=torch.uint8)
        work = _begun(dist.irecv(token, src=peer, group=self._group, tag=_CONFIRMED_TAG + self._number))
        self._unconfirmed.setdefault(peer, deque()).append((work, token))

    def _confirmed(self, peer: int, left: int) -> None:
        """Wait until at most ``left`` pieces are unconfirmed."""
        expected = self._unconfirmed.setdefault(peer, deque())
        while len(expected) > left:
            self._wait(*expected[0])
            expected.popleft()

    def _wait(self, posted: dist.Work | None, tensor: torch.Tensor) -> None:
        work = _begun(posted)
        try:
            if self._given_up:
                raise CommError("the side channel was closed")
            self._settle(work)
        except CommError:
            self._kept.append((work, tensor))
            raise


def _begun(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise CommError("this rank is not a member of the group for background messages")
    return work


def _pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    """The same on both sides, since both know the size."""
    length = PIECE_BYTES // flat.element_size()
    return [flat[first : first + length] for first in range(0, flat.numel(), length)]
