"""A message of a device tensor over host links, under way while its rank goes on.

Schedules post a receive long before the message is sent, and begin a send before its receiver is there and before
the device has computed it. So neither may wait at the call: a send is left to the :class:`Outbox`, and
:class:`StagedMessage` waits for the host link in :meth:`~StagedMessage.wait`, and only there copies what came to the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.outbox import Outbox

__all__ = ["StagedMessage", "received", "sent"]

Move = Callable[[torch.Tensor], dist.Work]
"""Begins the transfer of a host tensor."""


class StagedMessage(dist.Work):
    """``work`` moves ``host``, which ``into`` receives on the stream that is current at the wait."""

    def __init__(self, work: dist.Work, host: torch.Tensor, into: torch.Tensor) -> None:
        super().__init__()
        self._work = work
        self._host = host
        self._into: torch.Tensor | None = into

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the host link; raises the communicator's typed errors. Later calls return at once."""
        self._work.wait() if timeout is None else self._work.wait(timeout)
        into, self._into = self._into, None
        if into is not None:
            into.detach().copy_(self._host, non_blocking=True)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()


def sent(tensor: torch.Tensor, move: Move, outbox: Outbox, generation: int) -> dist.Work:
    """Begin to send ``tensor`` in ``generation``, once its device has computed it: later work may change it."""
    host = _beside(tensor).copy_(tensor.detach(), non_blocking=True)
    return move(host) if tensor.device.type == "cpu" else outbox.post(generation, host, move)


def received(tensor: torch.Tensor, move: Move) -> StagedMessage:
    """Begin to receive into ``tensor``, which has the message after the wait."""
    host = _beside(tensor)
    return StagedMessage(move(host), host, tensor)


def _beside(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
