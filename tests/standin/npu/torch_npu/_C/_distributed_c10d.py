"""``ProcessGroupHCCL``: a group that connects at its first operation and can be aborted, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.group import kind_of
from megatron.elastic.comm.vendor.nccl import NcclCommunicator, NcclLibrary

__all__ = ["ProcessGroupHCCL"]


class Options:
    """Set before a group is made."""

    def __init__(self) -> None:
        self.global_ranks_in_group: Sequence[int] = ()
        self.group_id = ""


class Issued(dist.Work):
    """The work of an operation on its group's stream: ``wait`` has the current stream wait for it."""

    def __init__(self, done: torch.Event) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream(self._done.device).wait_event(self._done)
        return True


class ProcessGroupHCCL:
    """Ranks are those within the group; all members name it alike in ``store``.

    Two members that exchange messages have a communicator of their own. Each communicator has a stream of its own, as
    in torch_npu: its operations run behind what the current stream has at the call.
    """

    Options = Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        assert len(options.global_ranks_in_group) == size and options.group_id
        self._store, self._rank, self._size = store, rank, size
        self._aborted = False
        self._groups: dict[str, NcclCommunicator] = {}
        self._streams: dict[tuple[int, ...], torch.Stream] = {}

    def _connected(self, members: Sequence[int] = ()) -> NcclCommunicator:
        if self._aborted:
            raise RuntimeError("this HCCL group was aborted")
        name = ":".join(map(str, members))
        if name not in self._groups:
            members = members or range(self._size)
            group = NcclCommunicator(NcclLibrary(), self._rank, 120.0, stream=_stream)
            if self._rank == members[0]:
                self._store.set(f"id {name}", group.new_identity().hex())
            group.start(members, bytes.fromhex(self._store.get(f"id {name}").decode()))
            self._groups[name] = group
        return self._groups[name]

    def abort_hccl_comm(self, why: str) -> None:
        """End all operations; the group is of no use afterwards."""
        self._aborted = True
        ending = [threading.Thread(target=group.close) for group in self._groups.values()]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> Issued:
        return self._issue(tensors[0], lambda group: group.all_reduce(tensors[0], kind_of(options.reduceOp)))

    def reduce(self, tensors: list[torch.Tensor], options: dist.ReduceOptions) -> Issued:
        kind = kind_of(options.reduceOp)
        return self._issue(tensors[0], lambda group: group.reduce(tensors[0], options.rootRank, kind))

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Issued:
        return self._issue(tensors[0], lambda group: group.broadcast(tensors[0], options.rootRank))

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Issued:
        pair = sorted((self._rank, to))
        return self._issue(tensors[0], lambda group: group.send(tensors[0], pair.index(to)), pair)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Issued:
        pair = sorted((self._rank, source))
        return self._issue(tensors[0], lambda group: group.recv(tensors[0], pair.index(source)), pair)

    def _issue(
        self, tensor: torch.Tensor, act: Callable[[NcclCommunicator], None], members: Sequence[int] = ()
    ) -> Issued:
        group, device = self._connected(members), tensor.device
        stream = self._streams.get(tuple(members)) or torch.Stream(device)
        self._streams[tuple(members)] = stream
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            act(group)
            done = torch.Event(device)
            done.record(stream)
        tensor.record_stream(stream)
        return Issued(done)


def _stream() -> int:
    return int(torch.get_device_module("npu").current_stream().cuda_stream)
