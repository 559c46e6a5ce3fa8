"""HCCL (Ascend) behind the same interface, by torch_npu.

HCCL cannot shrink or grow: an edit stops what is in flight and makes the group's
links anew, under a name that its first survivor hands round. It is local to the
groups a change touches.

Names used are checked against a torch-npu wheel by
``tests/unit/comm/test_hccl.py``. No Ascend device has run this file.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.library import Edit, VendorCommunicator, bounded

__all__ = ["BACKEND_NAMES", "HcclCommunicator"]

BACKEND_NAMES = ("abort_hccl_comm",)
"""Methods used of ``ProcessGroupHCCL`` besides those of every c10d backend."""

TYPES = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16})
REDUCTIONS = frozenset({dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN})


class HcclCommunicator(VendorCommunicator):
    """One HCCL group.

    ``make_backend(members, name)`` connects a ``ProcessGroupHCCL`` over ``members`` (global ranks, in order), all of
    them under one ``name`` that was never used before. An abort waits at most ``limit`` seconds in a helper thread, in
    which ``set_device`` is run first.
    """

    def __init__(
        self,
        rank: int,
        make_backend: Callable[[Sequence[int], str], Any],
        limit: float,
        set_device: Callable[[], None] = lambda: None,
    ) -> None:
        self.order: tuple[int, ...] = ()
        self.revoked = self.can_shrink = self.can_grow = False
        self._rank = rank
        self._make_backend = make_backend
        self._limit = limit
        self._set_device = set_device
        self.backend: Any = None

    def new_identity(self) -> bytes:
        return secrets.token_hex(16).encode()

    def start(self, members: Sequence[int], identity: bytes) -> None:
        self.order, self.revoked = tuple(members), False
        self.backend = self._make_backend(self.order, identity.decode())

    def join(self, order: Sequence[int], identity: bytes) -> None:
        self.start(sorted(order), identity)

    def edit(self, members: Sequence[int], share: Callable[[bytes | None], bytes], damaged: bool = False) -> Edit:
        if set(members) == set(self.order) and not damaged:
            return "kept"
        leader = next(rank for rank in self.order if rank in members)
        self.close()
        self.start(sorted(members), share(self.new_identity() if leader == self._rank else None))
        return "rebuilt"

    def revoke(self) -> None:
        """Stop the group's streams; its links are made anew by the edit."""
        if self.backend is not None:
            self.revoked = True
            self._abort(self.backend)

    def close(self) -> None:
        backend, self.backend = self.backend, None
        self.order, revoked, self.revoked = (), self.revoked, False
        if backend is not None and not revoked:
            self._abort(backend)

    def _abort(self, backend: Any) -> None:
        def run() -> None:
            self._set_device()
            backend.abort_hccl_comm("edit")

        bounded(run, self._limit, "abort_hccl_comm")

    # -- operations: torch_npu's backend enqueues on the current stream --------------

    def takes(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType | None = None) -> bool:
        return tensor.dtype in TYPES and (op is None or op in REDUCTIONS)

    @contextmanager
    def batch(self) -> Iterator[None]:
        yield

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = cast(Any, op)
        self.backend.allreduce([tensor], options).wait()

    def reduce(self, tensor: torch.Tensor, root: int, op: dist.ReduceOp.RedOpType) -> None:
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = cast(Any, op), root
        self.backend.reduce([tensor], options).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.backend.broadcast([tensor], options).wait()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self.backend.send([tensor], to, 0)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        self.backend.recv([tensor], source, 0).wait()
