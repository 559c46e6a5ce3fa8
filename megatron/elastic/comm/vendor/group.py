# mypy: disable-error-code="override"
"""A group whose device tensors go through the vendor's library, and all others over host links.

The choice is made per call from what all members know alike: where the tensor
is, its type, the reduction, and whether members share a device. What the vendor
does not take is staged through page-locked host memory, so every operation of
:class:`~megatron.elastic.comm.native.NativeGroup` works for device tensors too.

Vendor operations are enqueued on the current stream, like those of torch's own
backends: the work that is returned is done for the stream, not for the host.

Sends and receives of one batch begin together: a library's send waits on the stream
for its receive, which may stand behind a send of its own that waits as well. Other
operations between the start and the end of a batch run at once.
(Type checking of overrides is off, for the reason given in ``group.py``.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from megatron.elastic import _comm
from megatron.elastic.comm.batched_work import BatchedWork
from megatron.elastic.comm.call_arguments import broadcast_in, op_in, options_in, tensor_list
from megatron.elastic.comm.native import NativeGroup
from megatron.elastic.comm.reconfigure import Reconfigurable
from megatron.elastic.comm.vendor import staged_message
from megatron.elastic.comm.vendor.host_staging import through_host
from megatron.elastic.comm.vendor.library import VendorCommunicator
from megatron.elastic.comm.vendor.outbox import Outbox

__all__ = ["DeviceGroup", "DeviceHost", "Enqueued"]

Tensors = list[torch.Tensor]
VendorCall = Callable[[VendorCommunicator, Tensors, Tensors], None]
HostCall = Callable[[Tensors, Tensors], dist.Work]


class DeviceHost(Reconfigurable, Protocol):
    """The part of its fabric that a group needs."""

    rank: int
    device: torch.device
    generation: int
    outbox: Outbox

    def shares_device(self, living: Sequence[int]) -> bool: ...

    def takes(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType | None) -> bool: ...

    def settled(self, group: DeviceGroup) -> bool: ...

    def using(
        self, group: DeviceGroup, messages: Sequence[tuple[int, bool]] = ()
    ) -> AbstractContextManager[VendorCommunicator]: ...


class Enqueued(dist.Work):
    """An operation that the current stream has behind it."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Tensors:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


@dataclass(frozen=True, eq=False)
class Message:
    """A send or a receive of a batch; ``peer`` is a rank of the group."""

    sends: bool
    tensor: torch.Tensor
    peer: int
    tag: int


class DeviceGroup(NativeGroup):
    """See the module docstring. Made by :class:`~megatron.elastic.comm.vendor.fabric.DeviceFabric` only."""

    batches_messages = True
    """``batch_isend_irecv`` hands over its list as one batch, which torch does for its own groups only."""

    def __init__(
        self, fabric: DeviceHost, hub: _comm.Hub, name: str, members: Sequence[int], *, slot_space: bool
    ) -> None:
        super().__init__(fabric, hub, name, members, slot_space=slot_space)
        self._devices = fabric
        self._slot_space = slot_space
        self._batch: list[Message] | None = None

    # -- the choice -----------------------------------------------------------

    def by_vendor(self, *tensors: torch.Tensor, op: dist.ReduceOp.RedOpType | None = None) -> bool:
        """True if the library takes these tensors now; the same answer on every member."""
        if self._devices.generation == 0 or any(tensor.device.type != self._devices.device.type for tensor in tensors):
            return False
        living = self.living()
        if len(living) == 1 or self._devices.shares_device(living):
            return False
        return all(self._devices.takes(tensor, op) for tensor in tensors)

    def _run(
        self,
        read: Tensors,
        written: Tensors,
        op: dist.ReduceOp.RedOpType | None,
        vendor: VendorCall | None,
        host: HostCall,
    ) -> dist.Work:
        """``vendor`` or ``host`` on what is ``read`` and ``written``, or on copies of it that they take."""
        if not any(tensor.device.type == self._devices.device.type for tensor in (*read, *written)):
            return host(read, written)
        if vendor is None or not self.by_vendor(*read, *written, op=op):
            through_host(read, written, lambda r, w: host(r, w).wait())
            return Enqueued(written)
        dense = {id(tensor): tensor.detach().contiguous() for tensor in (*read, *written)}
        with self._devices.using(self) as communicator:
            vendor(communicator, [dense[id(tensor)] for tensor in read], [dense[id(tensor)] for tensor in written])
        for tensor in written:
            if dense[id(tensor)].data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(dense[id(tensor)])
        return Enqueued(written)

    def _seat(self, rank: int) -> int:
        """Where ``rank`` (global) stands in per-rank lists."""
        return rank if self._slot_space else self.living().index(rank)

    def _vendor_rank(self, communicator: VendorCommunicator, group_rank: int) -> int:
        return communicator.order.index(self._living_at(group_rank))

    def _living_at(self, group_rank: int) -> int:
        """Global rank of a collective's root or a message's peer; the first living member stands in for one gone."""
        living = self.living()
        if self._slot_space:
            return group_rank if group_rank in living else living[0]
        return living[group_rank] if 0 <= group_rank < len(living) else living[0]

    # -- reductions -------------------------------------------------------------

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        return self._all_reduce(tensor_list(tensors), super().allreduce, args, kwargs)

    def allreduce_coalesced(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        return self._all_reduce(tensor_list(tensors), super().allreduce_coalesced, args, kwargs)

    def _all_reduce(self, items: Tensors, host: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        op = kind_of(op_in(args, kwargs))

        def vendor(communicator: VendorCommunicator, read: Tensors, written: Tensors) -> None:
            with communicator.batch():
                for tensor in written:
                    communicator.all_reduce(tensor, op)

        return self._run(items, items, op, vendor, lambda read, written: host(written, *args, **kwargs))

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        items, opts = tensor_list(tensors), options_in(args, kwargs, dist.ReduceOptions)
        op = kind_of(opts.reduceOp)

        def vendor(communicator: VendorCommunicator, read: Tensors, written: Tensors) -> None:
            communicator.reduce(written[0], self._vendor_rank(communicator, opts.rootRank), op)

        return self._run(items, items, op, vendor, lambda read, written: super(DeviceGroup, self).reduce(written, opts))

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        rows, op = list(inputs[0]), kind_of(op_in(args, kwargs))
        host: HostCall = lambda r, w: super(DeviceGroup, self).reduce_scatter(w, [r], *args, **kwargs)
        return self._run(rows, tensor_list(outputs), op, self._scatter_sums(op), host)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        op = kind_of(op_in(args, kwargs))
        sums = self._scatter_sums(op)
        host: HostCall = lambda r, w: super(DeviceGroup, self)._reduce_scatter_base(w[0], r[0], *args, **kwargs)
        return self._run([input], [output], op, lambda c, r, w: sums(c, self._parts(r[0]), w), host)

    def _scatter_sums(self, op: dist.ReduceOp.RedOpType) -> VendorCall:
        """One reduction a member: libraries know equal parts in vendor order only."""

        def vendor(communicator: VendorCommunicator, rows: Tensors, written: Tensors) -> None:
            own = self._seat(self._fabric_rank)
            rows = [row.clone() if seat == own else row for seat, row in enumerate(rows)]  # a root reduces in place
            with communicator.batch():
                for place, rank in enumerate(communicator.order):
                    communicator.reduce(rows[self._seat(rank)], place, op)
            written[0].view(-1).copy_(rows[own].view(-1))

        return vendor

    # -- migration ---------------------------------------------------------------

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        items, opts = broadcast_in(tensors, args, kwargs)

        def vendor(communicator: VendorCommunicator, read: Tensors, written: Tensors) -> None:
            root = self._vendor_rank(communicator, opts.rootRank)
            if communicator.order[root] != self._fabric_rank:
                zero_integers(written)
            communicator.broadcast(written[0], root)

        host: HostCall = lambda r, w: super(DeviceGroup, self).broadcast(w, opts)
        return self._run(items, items, None, vendor, host)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        host: HostCall = lambda r, w: super(DeviceGroup, self).allgather([w], r, *args, **kwargs)
        return self._run(tensor_list(inputs), list(outputs[0]), None, self._gather_rows, host)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        host: HostCall = lambda r, w: super(DeviceGroup, self)._allgather_base(w[0], r[0], *args, **kwargs)
        return self._run([input], [output], None, lambda c, r, w: self._gather_rows(c, r, self._parts(w[0])), host)

    def _gather_rows(self, communicator: VendorCommunicator, read: Tensors, rows: Tensors) -> None:
        own = self._seat(self._fabric_rank)
        zero_integers([row for seat, row in enumerate(rows) if seat != own])  # that one may be the memory to be read
        rows[own].view(-1).copy_(read[0].view(-1))
        with communicator.batch():
            for place, rank in enumerate(communicator.order):
                communicator.broadcast(rows[self._seat(rank)], place)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        *args: Any,
        **kwargs: Any,
    ) -> dist.Work:
        splits = list(output_splits), list(input_splits)
        host: HostCall = lambda r, w: super(DeviceGroup, self).alltoall_base(w[0], r[0], *splits, *args, **kwargs)

        def vendor(communicator: VendorCommunicator, read: Tensors, written: Tensors) -> None:
            self._exchange(communicator, self._parts(read[0], splits[1]), self._parts(written[0], splits[0]))

        return self._run([input], [output], None, vendor, host)

    def _exchange(self, communicator: VendorCommunicator, sent: Tensors, received: Tensors) -> None:
        own = self._seat(self._fabric_rank)
        zero_integers(received)
        received[own].copy_(sent[own])
        with communicator.batch():
            for place, rank in enumerate(communicator.order):
                if rank != self._fabric_rank:
                    communicator.send(sent[self._seat(rank)], place)
                    communicator.recv(received[self._seat(rank)], place)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        """Through the library only where it is matched by order (tag 0), in a group that has its communicator.

        To change a communicator all members have to come, and a message concerns two of them.
        """
        return self._message(Message(True, tensor_list(tensors)[0], dst, tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        return self._message(Message(False, tensor_list(tensors)[0], src, tag))

    def _message(self, message: Message) -> dist.Work:
        if self._batch is not None:
            self._batch.append(message)
            return Enqueued([message.tensor])  # the batch's own work is the one to wait for
        if not self._on_device(message.tensor):
            return self._over_host(message, message.tensor)
        return self._exchange_messages([message])

    def _start_coalescing(self, device: torch.device) -> None:
        """Sends and receives wait for :meth:`_end_coalescing`."""
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        batch, self._batch = self._batch or [], None
        return self._exchange_messages(batch)

    def _exchange_messages(self, batch: Sequence[Message]) -> dist.Work:
        """All of them at once: none waits for one that comes later in the list."""
        on_host = [message for message in batch if not self._on_device(message.tensor)]
        direct = [message for message in batch if message not in on_host and self._by_library(message)]
        staged = [message for message in batch if message not in on_host and message not in direct]
        works = [self._over_host(message, message.tensor) for message in on_host]
        if direct:
            self._exchange_by_library(direct)
        works += [self._staged(message) for message in staged]
        return BatchedWork(works) if works else Enqueued([message.tensor for message in batch])

    def _exchange_by_library(self, batch: Sequence[Message]) -> None:
        dense = [message.tensor.detach().contiguous() for message in batch]
        zero_integers([tensor for message, tensor in zip(batch, dense, strict=True) if not message.sends])
        ways = [(self._living_at(message.peer), message.sends) for message in batch]
        with self._devices.using(self, ways) as communicator, communicator.batch():
            for message, tensor in zip(batch, dense, strict=True):
                move = communicator.send if message.sends else communicator.recv
                move(tensor, self._vendor_rank(communicator, message.peer))
        for message, tensor in zip(batch, dense, strict=True):
            if not message.sends and tensor.data_ptr() != message.tensor.data_ptr():
                message.tensor.detach().copy_(tensor)

    def _staged(self, message: Message) -> dist.Work:
        def move(host: torch.Tensor) -> dist.Work:
            return self._over_host(message, host)

        if message.sends:
            return staged_message.sent(message.tensor, move, self._devices.outbox, self._devices.generation)
        return staged_message.received(message.tensor, move)

    def _by_library(self, message: Message) -> bool:
        return message.tag == 0 and self.by_vendor(message.tensor) and self._devices.settled(self)

    def _on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._devices.device.type

    def _over_host(self, message: Message, tensor: torch.Tensor) -> dist.Work:
        move = super().send if message.sends else super().recv
        return move([tensor], message.peer, message.tag)

    def gather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        rows = list(outputs[0]) if outputs else []
        host: HostCall = lambda r, w: super(DeviceGroup, self).gather([w] if w else [], r, *args, **kwargs)
        return self._run(tensor_list(inputs), rows, None, None, host)

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        rows = list(inputs[0]) if inputs else []
        host: HostCall = lambda r, w: super(DeviceGroup, self).scatter(w, [r] if r else [], *args, **kwargs)
        return self._run(rows, tensor_list(outputs), None, None, host)

    # -- what members agree by, over host links ------------------------------------

    def host_table(self, row: bytes) -> list[bytes]:
        """One row of equal length of every living member, in order."""
        entries = self.size()
        table = torch.zeros(entries * len(row), dtype=torch.uint8)
        own = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        super()._allgather_base(table, own).wait()
        parts = table.view(entries, len(row))
        return [bytes(parts[self._seat(rank)].tolist()) for rank in self.living()]

    def host_bytes(self, value: bytes | None, source: int) -> bytes:
        """``value`` of the member ``source`` (global), on all."""
        opts = dist.BroadcastOptions()
        opts.rootRank = self._seat(source)
        length = torch.tensor([len(value) if value is not None else 0])
        super().broadcast([length], opts).wait()
        data = torch.zeros(int(length), dtype=torch.uint8)
        if value:
            data.copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        super().broadcast([data], opts).wait()
        return bytes(data.tolist())

    @property
    def _fabric_rank(self) -> int:
        return self._devices.rank

    def _parts(self, flat: torch.Tensor, splits: Sequence[int] = ()) -> Tensors:
        """A tensor's parts by group rank, as views of its contiguous memory."""
        if splits:
            return list(flat.split(list(splits)))
        return list(flat.view(-1).view(self.size(), -1).unbind())


def zero_integers(tensors: Sequence[torch.Tensor]) -> None:
    """Fill integers that the library is about to write with zeros, enqueued like it.

    An interruption may end the operation before it has written. What it leaves is read until the host finds out, and
    then integers of any value would be indices outside a table, which break a device's context, and sizes of tensors.
    """
    for tensor in tensors:
        if not tensor.dtype.is_floating_point:
            tensor.zero_()


def kind_of(op: Any) -> dist.ReduceOp.RedOpType:
    """A ``ReduceOp`` object or one of its kinds → the kind."""
    return op if isinstance(op, dist.ReduceOp.RedOpType) else cast(dist.ReduceOp.RedOpType, op.op)
