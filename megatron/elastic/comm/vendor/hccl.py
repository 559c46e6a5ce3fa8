"""HCCL (Ascend) behind the same interface, by torch_npu.

HCCL cannot shrink or grow: an edit stops what is in flight and makes the group's
links anew, under a name that its first survivor hands round. It is local to the
groups a change touches.

torch_npu connects the members of a group inside their first collective, and two members inside their first message
(``createHCCLComm`` in its ``ProcessGroupHCCL.cpp``), for up to HCCL_CONNECT_TIMEOUT, 120 s or more. So both run in a
thread that the caller can leave (:mod:`~megatron.elastic.comm.vendor.calls`), on a stream and tensors of their own: a
call that was left behind writes into no memory that is used.

Names used are checked against a torch-npu wheel by
``tests/unit/comm/test_hccl.py``. No Ascend device has run this file.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.calls import bounded, connected
from megatron.elastic.comm.vendor.library import Edit, Share, VendorCommunicator, VendorError, never

__all__ = ["BACKEND_NAMES", "HcclCommunicator"]

BACKEND_NAMES = ("abort_hccl_comm",)
"""Methods used of ``ProcessGroupHCCL`` besides those of every c10d backend."""

TYPES = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16})
HOST = torch.device("cpu")
T = TypeVar("T")
REDUCTIONS = frozenset({dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN})


@dataclass(frozen=True, eq=False)
class _Transfer:
    """A send or a receive; ``peer`` is a vendor rank."""

    tensor: torch.Tensor
    peer: int
    sends: bool


class HcclCommunicator(VendorCommunicator):
    """One HCCL group.

    ``make_backend(members, name)`` connects a ``ProcessGroupHCCL`` over ``members`` (global ranks, in order), all of
    them under one ``name`` that was never used before. An abort waits at most ``limit`` seconds in a helper thread, in
    which ``set_device`` is run first. ``device`` is where tensors lie.
    """

    def __init__(
        self,
        rank: int,
        make_backend: Callable[[Sequence[int], str], Any],
        limit: float,
        set_device: Callable[[], None] = lambda: None,
        device: torch.device = HOST,
    ) -> None:
        self.order: tuple[int, ...] = ()
        self.revoked = self.can_shrink = self.can_grow = False
        self.interrupted = never
        self._rank = rank
        self._make_backend = make_backend
        self._limit = limit
        self._set_device = set_device
        self._device = device
        self._met: set[int] = set()
        """Members that a message was exchanged with."""
        self._batch: list[_Transfer] | None = None
        """The messages of a batch; None outside of one."""
        self.backend: Any = None

    def new_identity(self) -> bytes:
        return secrets.token_hex(16).encode()

    def start(self, members: Sequence[int], identity: bytes) -> None:
        def connect() -> Any:
            backend = self._make_backend(members, identity.decode())
            _issue(backend, "allreduce", [torch.zeros(1, device=self._device)], dist.AllreduceOptions())
            return backend

        def left(backend: Any) -> None:
            if backend is not None:
                backend.abort_hccl_comm("left behind")

        self.close()
        self.backend = self._connected(connect, left)
        self.order, self.revoked = tuple(members), False
        self._met.clear()

    def join(self, order: Sequence[int], identity: bytes) -> None:
        self.start(sorted(order), identity)

    def edit(self, members: Sequence[int], share: Share, damaged: bool = False) -> Edit:
        if set(members) == set(self.order) and not damaged:
            return "kept"
        self.start(sorted(members), share(self.new_identity))
        return "rebuilt"

    def broken(self) -> bool:
        return False  # torch_npu does not say; the next call raises

    def revoke(self) -> None:
        """Stop the group's streams; its links are made anew by the edit."""
        if self.backend is not None and not self.revoked:
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

    # -- operations: on streams of torch_npu's own, behind the current one, which waits for them -------

    def takes(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType | None = None) -> bool:
        return tensor.dtype in TYPES and (op is None or op in REDUCTIONS)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Messages of the block are issued at its end, and then waited for.

        Those of two members have one stream, on which one that is not received holds up those behind it. So the lower
        rank sends first, and each rank turns to its peers in ascending order.
        """
        batch = self._batch = []
        try:
            yield
        finally:
            self._batch = None
        for wait in [self._begun(one) for one in self._in_order(batch)]:
            wait()

    def _in_order(self, batch: Sequence[_Transfer]) -> list[_Transfer]:
        if self._rank not in self.order:  # another thread has given the group up
            raise VendorError("HCCL: the group was stopped")
        own = self.order.index(self._rank)
        return sorted(batch, key=lambda one: (one.peer, one.sends is not (own < one.peer)))

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = cast(Any, op)
        _issue(self.backend, "allreduce", [tensor], options).wait()

    def reduce(self, tensor: torch.Tensor, root: int, op: dist.ReduceOp.RedOpType) -> None:
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = cast(Any, op), root
        _issue(self.backend, "reduce", [tensor], options).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        _issue(self.backend, "broadcast", [tensor], options).wait()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._exchange(_Transfer(tensor, to, sends=True))

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        self._exchange(_Transfer(tensor, source, sends=False))

    def _exchange(self, message: _Transfer) -> None:
        if self._batch is None:
            self._begun(message)()
        else:
            self._batch.append(message)

    def _begun(self, message: _Transfer) -> Callable[[], object]:
        """Issue a message, and return what has the current stream wait for it."""
        tensor, peer, name = message.tensor, message.peer, "send" if message.sends else "recv"
        if peer in self._met:
            wait: Callable[[], object] = _issue(self.backend, name, [tensor], peer, 0).wait
            return wait
        aside = tensor.clone()
        work = self._meet(peer, name, aside)

        def end() -> None:
            work.wait()
            if not message.sends:
                tensor.copy_(aside)

        return end

    def _meet(self, peer: int, name: str, tensor: torch.Tensor) -> Any:
        """Exchange the first message with ``peer``; its work."""
        backend = self.backend
        work = self._connected(lambda: _issue(backend, name, [tensor], peer, 0), lambda _: None)
        self._met.add(peer)
        return work

    def _connected(self, connect: Callable[[], T], left: Callable[[T | None], None]) -> T:
        """``connect()`` in a thread that can be left behind, on a stream of its own in the place of the current one."""
        aside = None if self._device.type == "cpu" else torch.Stream(self._device)
        if aside is not None:
            aside.wait_stream(torch.accelerator.current_stream(self._device))

        def run() -> T:
            self._set_device()
            with aside or nullcontext():
                return connect()

        made = connected(run, math.inf, "connecting by HCCL", self.interrupted, left)
        if aside is not None:
            torch.accelerator.current_stream(self._device).wait_stream(aside)
        return made


def _issue(backend: Any, name: str, *arguments: Any) -> Any:
    """Call a method of a ``ProcessGroupHCCL``. Raises :class:`VendorError` where torch_npu raises, or if it is gone."""
    if backend is None:
        raise VendorError(f"HCCL {name}: the group was stopped")
    try:
        return getattr(backend, name)(*arguments)
    except RuntimeError as error:
        raise VendorError(f"HCCL {name}: {error}") from error
