"""``ProcessGroupHCCL``: a group that connects at its first operation and can be aborted, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
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


class Done(dist.Work):
    """The work of an operation that the stream has behind it."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class ProcessGroupHCCL:
    """Ranks are those within the group; all members name it alike in ``store``.

    Two members that exchange messages have a communicator of their own.
    """

    Options = Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        assert len(options.global_ranks_in_group) == size and options.group_id
        self._store, self._rank, self._size = store, rank, size
        self._aborted = False
        self._groups: dict[str, NcclCommunicator] = {}

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
        for group in self._groups.values():
            group.close()

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> Done:
        self._connected().all_reduce(tensors[0], kind_of(options.reduceOp))
        return Done()

    def reduce(self, tensors: list[torch.Tensor], options: dist.ReduceOptions) -> Done:
        self._connected().reduce(tensors[0], options.rootRank, kind_of(options.reduceOp))
        return Done()

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Done:
        self._connected().broadcast(tensors[0], options.rootRank)
        return Done()

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Done:
        pair = sorted((self._rank, to))
        self._connected(pair).send(tensors[0], pair.index(to))
        return Done()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Done:
        pair = sorted((self._rank, source))
        self._connected(pair).recv(tensors[0], pair.index(source))
        return Done()


def _stream() -> int:
    return int(torch.get_device_module("npu").current_stream().cuda_stream)
