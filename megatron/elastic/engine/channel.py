"""Messages between two ranks beside the step: what background transfers travel over.

One group of its own, so nothing here can meet a message of a step. Waits happen
on threads of their own and are not counted in what this process waits for: a
stream that has nothing to send is no hang.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.transport import started

__all__ = ["BACKGROUND_ROLE", "FabricChannel"]

BACKGROUND_ROLE = "background"
_TAG = 1 << 20


class FabricChannel:
    """:class:`megatron.elastic.state.transfer.Channel` over a fabric, within one generation.

    ``number`` tells transfers of one generation apart. ``given_up()`` turning true
    ends every wait with a ``CommError`` (where the transport allows; otherwise the
    next generation does). Must be kept until the edit that follows: see ``_kept``.
    """

    def __init__(self, fabric: Fabric, number: int, given_up: Callable[[], bool]) -> None:
        self._fabric = fabric
        self._group = fabric.group(BACKGROUND_ROLE, range(fabric.slots))
        self._tag = _TAG + (number & 0xFFFF)
        self._given_up = given_up
        self._kept: list[tuple[dist.Work, torch.Tensor]] = []
        """Messages nobody waited for to the end: a peer may still write into them until the next edit."""

    def send(self, peer: int, tag: str, payload: torch.Tensor) -> None:
        """See ``Channel``."""
        flat = payload.reshape(-1)
        self._settle(dist.isend(flat, dst=peer, group=self._group, tag=self._tag), flat)

    def recv(self, peer: int, tag: str, out: torch.Tensor) -> None:
        """See ``Channel``."""
        flat = out.view(-1)
        self._settle(dist.irecv(flat, src=peer, group=self._group, tag=self._tag), flat)

    def _settle(self, posted: dist.Work | None, tensor: torch.Tensor) -> None:
        work = started(posted)
        try:
            self._fabric.settle(work, self._given_up)
        except CommError:
            self._kept.append((work, tensor))
            raise
