"""Messages between two ranks beside the step: what background transfers travel over.

One group of its own, so nothing here can meet a message of a step. Waits happen
on threads of their own and are not counted in what this process waits for: a
stream that has nothing to send is no hang.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.transport import started

__all__ = ["BACKGROUND_ROLE", "FabricChannel"]

BACKGROUND_ROLE = "background"
_TAG = 1 << 20


class FabricChannel:
    """:class:`megatron.elastic.state.transfer.Channel` over a fabric, within one generation.

    ``number`` tells transfers of one generation apart. ``given_up()`` turning true
    ends every wait with a ``CommError`` (where the transport allows; otherwise the
    next generation does).
    """

    def __init__(self, fabric: Fabric, number: int, given_up: Callable[[], bool]) -> None:
        self._fabric = fabric
        self._group = fabric.group(BACKGROUND_ROLE, range(fabric.slots))
        self._tag = _TAG + (number & 0xFFFF)
        self._given_up = given_up

    def send(self, peer: int, tag: str, payload: torch.Tensor) -> None:
        """See ``Channel``."""
        self._settle(dist.isend(payload.reshape(-1), dst=peer, group=self._group, tag=self._tag))

    def recv(self, peer: int, tag: str, out: torch.Tensor) -> None:
        """See ``Channel``."""
        self._settle(dist.irecv(out.view(-1), src=peer, group=self._group, tag=self._tag))

    def _settle(self, work: dist.Work | None) -> None:
        self._fabric.settle(started(work), self._given_up)
