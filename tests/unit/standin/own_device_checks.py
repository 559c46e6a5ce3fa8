"""Threads, groups and clocks are those of the rank's own device, each check in a process of its own."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron.elastic._comm import DeviceEvent
from megatron.elastic.comm.vendor import fabric as vendor_fabric
from megatron.elastic.comm.vendor.enqueued_beside import EnqueuedBeside
from megatron.elastic.comm.vendor.group import Enqueued
from megatron.elastic.comm.vendor.hccl import HcclCommunicator
from megatron.elastic.comm.vendor.ledger import Ledger
from megatron.elastic.comm.vendor.selection import vendor_of
from megatron.elastic.comm.vendor.through_host import ThroughHost
from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.control.slot import Slot
from megatron.elastic.platform.own_device import threads_on
from megatron.elastic.platform.threads import OS_THREADS
from megatron.elastic.runtime import assembly
from tests.standin import device as standin
from tests.standin.platform import StandinPlatform
from tests.unit.standin.pairs import NAP


def in_thread(threads: Any) -> list[int | str]:
    """The device of a tensor that a thread of ``threads`` makes, or the error."""
    seen: list[int | str] = []

    def body() -> None:
        try:
            seen.append(torch.ones(1, device="standin").device.index)
        except RuntimeError as error:
            seen.append(str(error))

    threads.start("elastic-check", body).join()
    return seen


def check_threads_of_the_engine_begin_on_the_device_of_their_rank() -> None:
    os.environ.update(LOCAL_RANK="3", STANDIN_OWN="local")
    assert in_thread(threads_on(StandinPlatform())) == [3]
    (other,) = in_thread(OS_THREADS)
    assert "works on standin:3 alone, not on standin:0" in str(other)


def check_a_group_is_connected_and_aborted_on_the_device_of_its_rank() -> None:
    class Backend:
        def allreduce(self, tensors: Sequence[torch.Tensor], options: dist.AllreduceOptions) -> None:
            assert tensors[0].device == torch.device("standin:2") and standin.current_device() == 2

        def abort_hccl_comm(self, why: str) -> None:
            self.device, self.thread = standin.current_device(), threading.current_thread()

    backend = Backend()
    own, set_device = torch.device("standin:2"), partial(StandinPlatform().set_device, 2)
    communicator = HcclCommunicator(0, lambda members, name: backend, limit=5.0, set_device=set_device, device=own)
    communicator.start((0, 1), b"name")
    communicator.close()
    assert backend.device == 2 and backend.thread is not threading.main_thread()


def check_a_thread_without_a_device_may_interrupt_and_ask_a_fabric() -> None:
    """As the control plane's does. It asks for events of the rank's device, and may be the one that frees them."""
    os.environ.update(LOCAL_RANK="3", STANDIN_OWN="local")
    own = torch.device("standin:3")
    standin.set_device(3)
    fabric = vendor_of(StandinPlatform(), dist.HashStore()).fabric(0, 1, 0, run_id="alone", secret=b"alone")
    group = fabric.group_apart("dp", (0,))
    held = fabric._held[group] = vendor_fabric.Held(ThroughHost(), Ledger(0))  # type: ignore[index]
    held.communicator.order = (0, 1)
    failed: list[BaseException] = []

    def control() -> None:
        try:
            assert fabric.waiting_for() == () and fabric.unfinished()
            end = time.monotonic() + 20
            while fabric.waiting_for() != (1,) and time.monotonic() < end:
                time.sleep(0.001)
            assert fabric.waiting_for() == (1,)
            fabric.interrupt(2)
        except BaseException as error:
            failed.append(error)

    standin.set_lateness(0.0)
    standin._sleep(NAP)
    with fabric._noted(held):
        standin._sleep(NAP)
    thread = threading.Thread(target=control)
    thread.start()
    thread.join()
    assert not failed, failed
    held.enqueued.clear()
    assert torch.ones(1, device=own).tolist() == [1.0], "no event was freed on another device"


def check_the_thread_of_the_control_plane_begins_on_the_device_of_its_rank() -> None:
    os.environ.update(LOCAL_RANK="3", STANDIN_OWN="local")
    agents, ours = socket.socketpair()
    slot = Slot(Slot.create("slot")[0])
    worker = WorkerMembership(0, 0, 1, ours, slot, "node", threads=threads_on(StandinPlatform()))
    seen: list[int] = []
    worker.sample(lambda: seen.append(standin.current_device()))
    worker.start(lambda generation: None)
    end = time.monotonic() + 20
    while not seen and time.monotonic() < end:
        time.sleep(0.01)
    worker.close()
    agents.close()
    assert seen[0] == 3


def check_a_first_message_over_hccl_is_in_the_order_of_the_callers_stream() -> None:
    """It is exchanged on another stream, by another thread."""

    class Backend:
        sent: torch.Tensor

        def allreduce(self, tensors: Sequence[torch.Tensor], options: dist.AllreduceOptions) -> None:
            """Connects."""

        def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> Enqueued:
            self.sent = tensors[0] * 1.0
            return Enqueued([self.sent])

        def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> Enqueued:
            tensors[0].copy_(self.sent)
            return Enqueued(list(tensors))

    backend, own = Backend(), torch.device("standin:1")
    standin.set_device(1)
    communicator = HcclCommunicator(0, lambda members, name: backend, 5.0, partial(standin.set_device, 1), own)
    communicator.start((0, 1, 2), b"name")
    tensor, received = torch.zeros(4, device=own), torch.zeros(4, device=own)
    communicator.send(tensor.fill_(3.0), 1)
    tensor.fill_(float("nan"))
    communicator.recv(received, 2)
    assert (received + 1.0).tolist() == [4.0] * 4


def check_a_message_over_hccl_is_sent_as_it_was() -> None:
    """Torch_npu sends it on a stream of its own."""
    standin.set_device(1)
    own = torch.device("standin:1")
    aside = torch.Stream(own)

    class Backend:
        sent: torch.Tensor

        def allreduce(self, tensors: Sequence[torch.Tensor], options: dist.AllreduceOptions) -> None:
            """Connects."""

        def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> EnqueuedBeside:
            aside.wait_stream(torch.accelerator.current_stream(own))
            with aside:
                self.sent = tensors[0] * 1.0
                done = DeviceEvent(own)
                done.record()
            return EnqueuedBeside(done)

    backend = Backend()
    communicator = HcclCommunicator(0, lambda members, name: backend, 5.0, partial(standin.set_device, 1), own)
    communicator.start((0, 1), b"name")
    for _ in range(2):  # the first one connects the two
        tensor = torch.full((4,), 3.0, device=own)
        communicator.send(tensor, 1)
        tensor.fill_(float("nan"))
        torch.accelerator.current_stream(own).synchronize()
        aside.synchronize()
        assert backend.sent.tolist() == [3.0] * 4


def check_the_clock_is_that_of_the_ranks_device() -> None:
    """A rank of a node with more ranks than devices has another number than its device."""
    os.environ["LOCAL_RANK"] = "6"
    asked: list[Any] = []

    def none_known(platform: str, index: int = 0) -> Any:
        asked.append((platform, index))
        return SimpleNamespace(why=lambda: "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "select", StandinPlatform)
        patch.setattr(assembly, "frequency_of", none_known)
        assembly._clocks(cast(Any, SimpleNamespace()), ElasticConfig(frequency="auto"), cast(Any, None))
    assert asked == [("standin", 2)]
