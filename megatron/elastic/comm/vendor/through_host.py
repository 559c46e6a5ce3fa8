"""The library of a device that has none: it takes no tensor, so all of them go through host memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.library import Edit, Share, VendorCommunicator, VendorError, never

__all__ = ["ThroughHost"]


class ThroughHost(VendorCommunicator):
    """See the module docstring. Never connected; each operation raises :class:`VendorError`."""

    def __init__(self) -> None:
        self.order = ()
        self.revoked = self.can_shrink = self.can_grow = False
        self.interrupted = never

    def takes(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType | None = None) -> bool:
        return False

    def broken(self) -> bool:
        return False

    def revoke(self) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """Nothing is connected."""

    def new_identity(self) -> bytes:
        _refuse()

    def start(self, members: Sequence[int], identity: bytes) -> None:
        _refuse()

    def join(self, order: Sequence[int], identity: bytes) -> None:
        _refuse()

    def edit(self, members: Sequence[int], share: Share, damaged: bool = False) -> Edit:
        _refuse()

    def batch(self) -> AbstractContextManager[None]:
        _refuse()

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        _refuse()

    def reduce(self, tensor: torch.Tensor, root: int, op: dist.ReduceOp.RedOpType) -> None:
        _refuse()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        _refuse()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        _refuse()

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        _refuse()


def _refuse() -> NoReturn:
    raise VendorError("this device has no library that moves its tensors")
