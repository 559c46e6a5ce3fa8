"""HCCL is stopped and made anew through names torch-npu has. Nothing here runs on an NPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.group import Enqueued
from megatron.elastic.comm.vendor.hccl import BACKEND_NAMES, HcclCommunicator
from megatron.elastic.comm.vendor.library import VendorError, VendorHang, VendorInterrupted
from tests.wheels import newest


class Backend:
    """Records what the adapter asks of torch_npu."""

    def __init__(self, hang: float = 0.0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._hang = hang

    def make(self, members: Sequence[int], name: str) -> Backend:
        assert ("make", tuple(members), name) not in self.calls, "a name is used once"
        self.calls.append(("make", tuple(members), name))
        return self

    def allreduce(self, tensors: Sequence[torch.Tensor], options: dist.AllreduceOptions) -> None:
        """The first one connects."""
        self.calls.append(("sum", tuple(tensors[0].shape)))

    def reduce(self, tensors: Sequence[torch.Tensor], options: dist.ReduceOptions) -> None:
        raise RuntimeError("no such group")

    def abort_hccl_comm(self, why: str) -> None:
        time.sleep(self._hang)
        self.calls.append(("abort", why))


def share(make: Callable[[], bytes]) -> bytes:
    return make()


def test_a_change_of_members_is_a_stop_and_a_new_group_under_a_new_name() -> None:
    backend = Backend()
    communicator = HcclCommunicator(0, backend.make, limit=5.0)
    communicator.start((0, 1, 2), communicator.new_identity())
    assert communicator.edit((0, 2), share) == "rebuilt"
    assert communicator.order == (0, 2)
    assert communicator.edit((0, 2), share) == "kept"
    communicator.revoke()
    assert communicator.revoked
    assert communicator.edit((0, 2), share, damaged=True) == "rebuilt"
    communicator.close()
    communicator.close()
    seen = [call[:2] for call in backend.calls]
    assert seen == [
        ("make", (0, 1, 2)),
        ("sum", (1,)),
        ("abort", "edit"),
        ("make", (0, 2)),
        ("sum", (1,)),
        ("abort", "edit"),
        ("make", (0, 2)),
        ("sum", (1,)),
        ("abort", "edit"),
    ]


class Waiting(Backend):
    """Connects when it may: a member has not come."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.may, self.stopped = threading.Event(), threading.Event(), threading.Event()

    def allreduce(self, tensors: Sequence[torch.Tensor], options: dist.AllreduceOptions) -> None:
        self._wait()

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> dist.Work:
        self._wait()
        tensors[0].fill_(7.0)
        self.stopped.set()
        return Enqueued(list(tensors))

    def abort_hccl_comm(self, why: str) -> None:
        super().abort_hccl_comm(why)
        self.stopped.set()

    def _wait(self) -> None:
        self.entered.set()
        assert self.may.wait(30)


def test_an_interruption_ends_the_wait_for_a_member_that_does_not_connect() -> None:
    backend = Waiting()
    communicator = HcclCommunicator(0, backend.make, limit=5.0)
    communicator.interrupted = backend.entered.is_set
    with pytest.raises(VendorInterrupted):
        communicator.start((0, 1), b"name")
    assert communicator.order == () and communicator.backend is None
    backend.may.set()
    assert backend.stopped.wait(30) and ("abort", "left behind") in backend.calls


def test_a_first_message_that_was_left_behind_writes_into_no_tensor_of_its_caller() -> None:
    backend = Waiting()
    backend.may.set()
    communicator = HcclCommunicator(0, backend.make, limit=5.0)
    communicator.start((0, 1), b"name")
    communicator.recv(tensor := torch.zeros(3), 1)
    assert tensor.tolist() == [7.0] * 3

    communicator.start((0, 1), b"another")
    backend.stopped.clear(), backend.may.clear(), backend.entered.clear()
    communicator.interrupted = backend.entered.is_set
    with pytest.raises(VendorInterrupted):
        communicator.recv(tensor := torch.zeros(3), 1)
    backend.may.set()
    assert backend.stopped.wait(30) and tensor.tolist() == [0.0] * 3


class Messages(Backend):
    """Notes when a message is issued, and when the stream is to wait for it."""

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> dist.Work:
        return self._issued("send")

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> dist.Work:
        return self._issued("recv")

    def _issued(self, name: str) -> dist.Work:
        self.calls.append((name,))
        calls = self.calls

        class Issued(dist.Work):
            def wait(self, timeout: Any = None) -> bool:
                calls.append((f"wait for {name}",))
                return True

        return Issued()


def test_the_stream_waits_for_messages_when_those_of_a_batch_are_all_issued() -> None:
    """Messages wait for a send before them until it is received, so the lower rank sends first."""
    tensor = torch.zeros(3)
    for rank, first, second in ((0, "send", "recv"), (1, "recv", "send")):
        backend = Messages()
        communicator = HcclCommunicator(rank, backend.make, limit=5.0)
        communicator.start((0, 1), b"name")
        for _ in range(2):  # the first message connects the two
            backend.calls.clear()
            with communicator.batch():
                communicator.recv(tensor, 1 - rank)
                communicator.send(tensor, 1 - rank)
            assert [call[0] for call in backend.calls] == [first, second, f"wait for {first}", f"wait for {second}"]
        backend.calls.clear()
        communicator.send(tensor, 1 - rank)
        assert [call[0] for call in backend.calls] == ["send", "wait for send"]


def test_refusals_of_torch_npu_are_errors_of_the_library() -> None:
    communicator = HcclCommunicator(0, Backend().make, limit=5.0)
    communicator.start((0, 1), b"name")
    with pytest.raises(VendorError, match="HCCL reduce: no such group"):
        communicator.reduce(torch.ones(1), 0, dist.ReduceOp.SUM)
    communicator.close()
    with pytest.raises(VendorError, match="HCCL broadcast: the group was stopped"):
        communicator.broadcast(torch.ones(1), 0)


def test_a_hanging_abort_is_bounded() -> None:
    backend = Backend(hang=5.0)
    communicator = HcclCommunicator(0, backend.make, limit=0.1)
    communicator.start((0, 1), b"name")
    with pytest.raises(VendorHang, match="abort_hccl_comm"):
        communicator.edit((0,), share)


@pytest.mark.slow
def test_the_names_exist_in_torch_npu() -> None:
    """Of a wheel of 44 MB."""
    with newest("torch-npu") as archive:
        source = archive.read("torch_npu/distributed/distributed_c10d.py").decode()
        registry = archive.read("torch_npu/_init/registry/distributed.py").decode()
        header = " ".join(archive.read(HEADER).decode().split())
        library = archive.read("torch_npu/lib/libtorch_npu.so")
    for name in BACKEND_NAMES:
        assert f".{name}(" in source and name.encode() in library
    for used in ("ProcessGroupHCCL(", "ProcessGroupHCCL.Options()", ".global_ranks_in_group =", ".group_id ="):
        assert used in registry, f"torch_npu makes its groups without {used}"
    assert "store, group_rank, group_size, pg_options" in registry
    for prototype in PROTOTYPES:
        assert prototype in header, prototype


HEADER = "torch_npu/include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp"
PROTOTYPES = (
    "ProcessGroupHCCL( const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, "
    "c10::intrusive_ptr<Options> options",
    "std::vector<uint32_t> global_ranks_in_group;",
    "std::string group_id;",
    "void abortAndClearHcclComm(c10::optional<std::string> abortReason);",
    "allreduce( std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts",
    "reduce( std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts",
    "broadcast( std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts",
    "send(std::vector<at::Tensor>& tensors, int dstRank, int tag)",
    "recv(std::vector<at::Tensor>& tensors, int srcRank, int tag)",
)
"""The methods of a group that are called, as torch_npu's header declares them, with single spaces."""
