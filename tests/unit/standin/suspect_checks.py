"""Faults that the engine had on devices, each check in a process of its own (``tests/standin/forked.py``)."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import GenerationChanged
from megatron.elastic.comm.fabric import BlockRange
from megatron.elastic.comm.vendor import fabric as vendor_fabric
from megatron.elastic.comm.vendor.enqueued_beside import EnqueuedBeside
from megatron.elastic.comm.vendor.fabric import DeviceFabric
from megatron.elastic.comm.vendor.group import Enqueued
from megatron.elastic.comm.vendor.hccl import HcclCommunicator
from megatron.elastic.comm.vendor.library import VendorError
from megatron.elastic.comm.vendor.nccl import NcclCommunicator, NcclLibrary
from megatron.elastic.comm.vendor.selection import Vendor, vendor_of
from megatron.elastic.comm.vendor.through_host import ThroughHost
from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.control.slot import Slot
from megatron.elastic.engine.compute.block_checksums import CHECKSUM_SLOTS
from megatron.elastic.engine.compute.device_numbers import on_device
from megatron.elastic.engine.compute.dropout import DropoutKey, _Mask
from megatron.elastic.engine.compute.executor import Executor, PassResult
from megatron.elastic.engine.compute.message_memory import MessageMemory
from megatron.elastic.engine.compute.piece_times import clock_of
from megatron.elastic.engine.generation.buckets import Cut
from megatron.elastic.engine.generation.hardware import survey
from megatron.elastic.engine.generation.view import Routes
from megatron.elastic.engine.inject import Injector, parse
from megatron.elastic.engine.transaction.shipment import Shipment
from megatron.elastic.platform.own_device import threads_on
from megatron.elastic.platform.threads import OS_THREADS
from megatron.elastic.runtime import assembly
from megatron.elastic.state.device_place import DevicePlace, tensor_kernels
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper
from tests.standin import device as standin
from tests.standin.platform import StandinPlatform
from tests.standin.vendor import VERSIONS, build_nccl
from tests.unit.engine.test_executor import LENGTH, ROWS, UNITS, WIDTH, Layers, Nowhere, plan, work
from tests.unit.standin.state_checks import LAYOUT, RATES, filled

NAP = 300_000_000
"""Nanoseconds that a device is kept busy, far longer than any call of these checks."""


# -- the current device ----------------------------------------------------------------------


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
    held = fabric._held[group] = vendor_fabric.Held(ThroughHost())  # type: ignore[index]
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
                done = torch.Event(own)
                done.record(aside)
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


# -- messages over host links ----------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Two ranks of one process, linked, and their groups."""

    fabrics: tuple[DeviceFabric, DeviceFabric]
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup]


def linked() -> Pair:
    """In generation 1."""
    vendor = vendor_of(StandinPlatform(), dist.HashStore())
    first, second = (vendor.fabric(rank, 2, 0, run_id="pair", secret=b"pair", timeout=20.0) for rank in range(2))
    edit((first, second), 1)
    return Pair((first, second), (first.group_apart("pp", (0, 1)), second.group_apart("pp", (0, 1))))


def edit(fabrics: Sequence[DeviceFabric], generation: int) -> None:
    addresses = {fabric.rank: fabric.address() for fabric in fabrics}
    threads = [threading.Thread(target=one.edit, args=(generation, addresses, 20.0)) for one in fabrics]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def busy() -> torch.Event:
    """Keep the device busy; the event comes when it is free."""
    standin.set_lateness(0.0)
    standin._sleep(NAP)
    free = torch.Event(torch.device("standin", 0))
    free.record()
    return free


def check_a_send_does_not_wait_for_the_device() -> None:
    pair = linked()
    free = busy()
    tensor = torch.full((4,), 2.0, device="standin")
    leaving = pair.groups[0].send([tensor], 1, 5)
    tensor.zero_()
    assert not free.query() and not leaving.is_completed(), "the rank can go on launching"
    into = torch.zeros(4, device="standin")
    assert pair.groups[1].recv([into], 0, 5).wait() and leaving.wait(timedelta(seconds=20))
    assert into.tolist() == [2.0] * 4 and standin.unpinned_asynchronous_copies() == 0
    assert leaving.is_completed() and leaving.is_success()


def check_a_send_of_an_older_generation_is_never_begun() -> None:
    """Its tag may be used again by the step that is run once more."""
    pair = linked()
    busy()
    void = pair.groups[0].send([torch.ones(4, device="standin")], 1, 5)
    for fabric in pair.fabrics:
        fabric.interrupt(2)
    with pytest.raises(GenerationChanged):
        void.wait()
    edit(pair.fabrics, 2)
    again = pair.groups[0].send([torch.full((4,), 3.0, device="standin")], 1, 5)
    into = torch.zeros(4, device="standin")
    assert pair.groups[1].recv([into], 0, 5).wait() and again.wait()
    assert into.tolist() == [3.0] * 4


def check_waiting_for_what_runs_beside_orders_streams_and_leaves_the_host_free() -> None:
    side, values = torch.Stream(torch.device("standin", 0)), torch.zeros(4, device="standin")
    with side:
        done = busy()
        values.fill_(2.0)
        done.record()
    beside = EnqueuedBeside(done)
    assert not beside.is_completed() and not beside.is_success()
    assert beside.wait() and not beside.is_completed(), "the host did not wait"
    assert values.clone().tolist() == [2.0] * 4, "the stream did"
    assert beside.is_completed() and beside.is_success()


def check_what_ran_on_the_host_is_over() -> None:
    assert EnqueuedBeside(None).wait() and EnqueuedBeside(None).is_completed()


# -- a vendor's library ----------------------------------------------------------------------


class OnDevices:
    """Two ranks of one process on a device each, in one group whose tensors the stand-in NCCL moves."""

    def __init__(self, folder: Path, version: str = "full") -> None:
        path = build_nccl(folder, version, on_streams=True)
        os.environ["STANDIN_DIR"] = str(path.parent)
        opened = NcclLibrary(path)
        self.threads = [ThreadPoolExecutor(1, initializer=partial(standin.set_device, rank)) for rank in range(2)]
        self.fabrics = [
            self._vendor(opened, rank).fabric(rank, 2, 0, run_id="pair", secret=b"pair") for rank in range(2)
        ]
        edit(self.fabrics, 1)
        self.groups = [fabric.group_apart("dp", (0, 1)) for fabric in self.fabrics]
        self.others = [fabric.group_apart("tp", (0, 1)) for fabric in self.fabrics]

    def _vendor(self, library: NcclLibrary, rank: int) -> Vendor:
        def stream() -> int:
            return standin.current_stream(rank).cuda_stream

        def communicator(number: int) -> NcclCommunicator:
            return NcclCommunicator(library, number, 5.0, partial(standin.set_device, rank), stream)

        return Vendor(torch.device("standin", rank), f"device{rank}", communicator)

    def sum(self, rank: int, other: bool = False) -> Future[torch.Tensor]:
        """Enqueue an all-reduce of ``rank + 1`` on the rank's own thread. ``other``: in the second group."""

        def enqueue() -> torch.Tensor:
            tensor = torch.full((4,), rank + 1.0, device=f"standin:{rank}")
            (self.others if other else self.groups)[rank].allreduce([tensor])
            return tensor

        return self.threads[rank].submit(enqueue)

    def waits(self, rank: int, expected: tuple[int, ...]) -> bool:
        """True as soon as the rank waits for ``expected``; False if it does not in time."""
        end = time.monotonic() + 20
        while self.fabrics[rank].waiting_for() != expected and time.monotonic() < end:
            time.sleep(0.001)
        return self.fabrics[rank].waiting_for() == expected


def check_a_wait_on_the_device_names_the_ranks_that_it_waits_for(folder: Path) -> None:
    job = OnDevices(folder)
    sums = [job.sum(rank) for rank in range(2)]
    assert [one.result(20).tolist() for one in sums] == [[3.0] * 4] * 2
    first = job.sum(0).result(20)
    assert job.waits(0, (1,)), "the call has returned, the device waits"
    standin.set_lateness(0.0)
    job.threads[1].submit(standin._sleep, NAP).result()
    second = job.sum(1).result(20)
    assert job.fabrics[1].waiting_for() == (), "its device has not come to the operation: it is others that wait"
    assert (first.tolist(), second.tolist()) == ([3.0] * 4, [3.0] * 4)
    assert job.waits(0, ()) and job.waits(1, ())


def check_an_operation_that_waits_on_the_device_ends_with_its_generation(folder: Path) -> None:
    job = OnDevices(folder)
    for one in [job.sum(rank) for rank in range(2)]:
        one.result(20)
    job.sum(0).result(20)
    assert job.waits(0, (1,))
    job.fabrics[0].interrupt(2)
    job.threads[0].submit(standin.synchronize).result(20)
    with pytest.raises(GenerationChanged):
        job.sum(0).result(20)


def check_all_communicators_with_work_on_the_device_end_together(folder: Path) -> None:
    """An abort waits for all that its device runs. So none of them returned before the others had begun."""
    for version in VERSIONS:
        job = OnDevices(folder, version)
        for other in (False, True):
            for one in [job.sum(rank, other) for rank in range(2)]:
                one.result(20)
        for other in (False, True):
            job.sum(0, other).result(20)
        assert job.waits(0, (1,))
        job.fabrics[0].interrupt(2)
        job.threads[0].submit(job.fabrics[0].edit, 2, {0: job.fabrics[0].address()}, 20.0).result(20)
        job.threads[0].submit(standin.synchronize).result(20)


def check_a_fabric_that_closes_ends_all_communicators_together(folder: Path) -> None:
    job = OnDevices(folder, "basic")
    for other in (False, True):
        for one in [job.sum(rank, other) for rank in range(2)]:
            one.result(20)
    for other in (False, True):
        job.sum(0, other).result(20)
    job.threads[0].submit(job.fabrics[0].close).result(20)
    job.threads[0].submit(standin.synchronize).result(20)


class Calls:
    """What happens to a rank's only communicator, in order; a call that enqueues lasts until ``returns``."""

    def __init__(self, job: OnDevices, returns: threading.Event, patch: pytest.MonkeyPatch) -> None:
        (held,) = job.fabrics[0]._held.values()
        self.seen: list[str] = []
        enqueue, revoke = held.communicator.all_reduce, held.communicator.revoke

        def slow(*given: Any) -> None:
            enqueue(*given)
            self.seen.append("called")
            returns.wait(20)
            self.seen.append("returned")

        def revoked() -> None:
            self.seen.append("revoked")
            revoke()

        patch.setattr(held.communicator, "all_reduce", slow)
        patch.setattr(held.communicator, "revoke", revoked)

    def await_last(self, what: str) -> None:
        end = time.monotonic() + 20
        while self.seen[-1:] != [what] and time.monotonic() < end:
            time.sleep(0.001)
        assert self.seen[-1:] == [what], self.seen


def check_a_communicator_ends_when_no_thread_is_in_a_call_of_it(folder: Path) -> None:
    """NCCL takes one call of a communicator at a time. One that enqueues is over soon."""
    job, returns = OnDevices(folder), threading.Event()
    for one in [job.sum(rank) for rank in range(2)]:
        one.result(20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vendor_fabric, "CALL_SECONDS", 20.0)
        calls = Calls(job, returns, patch)
        enqueued = job.sum(0)
        calls.await_last("called")
        job.fabrics[0].interrupt(2)
        time.sleep(0.2)
        returns.set()
        enqueued.result(20)
        calls.await_last("revoked")
        assert calls.seen == ["called", "returned", "revoked"]
        with pytest.raises(GenerationChanged):
            job.sum(0).result(20)


def check_a_call_that_waits_for_the_device_is_no_reason_not_to_end_what_it_waits_for(folder: Path) -> None:
    """Where the queue of the device is full, a call that enqueues returns only then."""
    job, returns = OnDevices(folder), threading.Event()
    for one in [job.sum(rank) for rank in range(2)]:
        one.result(20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vendor_fabric, "CALL_SECONDS", 0.1)
        calls = Calls(job, returns, patch)
        enqueued = job.sum(0)
        calls.await_last("called")
        job.fabrics[0].interrupt(2)
        calls.await_last("revoked")
        returns.set()
        enqueued.result(20)
        job.threads[0].submit(standin.synchronize).result(20)


def check_a_generation_begins_behind_what_the_one_before_has_left_on_the_device(folder: Path) -> None:
    """Else a gather that ends late could write into memory that the recovery has filled."""
    job = OnDevices(folder)
    for one in [job.sum(rank) for rank in range(2)]:
        one.result(20)
    fabric, group = job.fabrics[0], job.groups[0]
    (held,) = fabric._held.values()
    revoke = held.communicator.revoke

    def late() -> None:
        time.sleep(0.3)
        revoke()

    held.communicator.revoke = late  # type: ignore[method-assign]

    def alone() -> bool:
        gathering = fabric.begin_all_gather_blocks(group, torch.zeros(4, device="standin:0"), [BlockRange(0, 4, 1)])
        fabric.interrupt(2)
        fabric.edit(2, {0: fabric.address()}, 20.0)
        standin.current_stream().synchronize()
        return gathering.is_completed()

    assert job.threads[0].submit(alone).result(20), "the other rank never comes"


def check_an_operation_that_is_only_enqueued_is_reported_as_not_done(folder: Path) -> None:
    """Its call has returned, and the owner of a block dies: no call tells of it, and the memory has no values."""
    job = OnDevices(folder)
    for one in [job.sum(rank) for rank in range(2)]:
        one.result(20)
    fabric, group, end = job.fabrics[0], job.groups[0], time.monotonic() + 20
    while fabric.unfinished() and time.monotonic() < end:
        time.sleep(0.001)
    assert not fabric.unfinished(), "the sum is done on both devices"

    def gather() -> torch.Tensor:
        values = torch.full((4,), -1.0, device="standin:0")
        fabric.all_gather_blocks(group, values, [BlockRange(0, 4, 1)])
        return values

    values = job.threads[0].submit(gather).result(20)
    assert fabric.unfinished(), "the device waits"
    fabric.interrupt(2)
    job.threads[0].submit(standin.synchronize).result(20)
    assert fabric.unfinished() and values.tolist() == [-1.0] * 4, "it has ended without the owner"
    job.threads[0].submit(fabric.edit, 2, {0: fabric.address()}, 20.0).result(20)
    assert not fabric.unfinished()


def check_what_was_enqueued_before_a_refusal_ends_with_its_generation(folder: Path) -> None:
    job = OnDevices(folder)
    for one in [job.sum(rank) for rank in range(2)]:
        one.result(20)
    fabric, group = job.fabrics[0], job.groups[0]

    def refused() -> None:
        tensor = torch.ones(4, device="standin:0")
        with pytest.raises(VendorError, match="bad"), fabric.using(group) as communicator:  # type: ignore[arg-type]
            communicator.all_reduce(tensor, dist.ReduceOp.SUM)
            raise VendorError("bad")

    job.threads[0].submit(refused).result(20)
    assert job.waits(0, (1,)) and fabric.unfinished()
    fabric.interrupt(2)
    job.threads[0].submit(standin.synchronize).result(20)


def check_reduced_blocks_leave_when_the_device_has_brought_them_and_the_host_waits_for_none() -> None:
    pair = linked()
    place = DevicePlace(StandinPlatform(), torch.device("standin", 0), tensor_kernels())
    pool, _ = filled(place, Hyper(ConstantSchedule(RATES)))
    fabric = SimpleNamespace(slots=2, group=lambda role, members: pair.groups[0])
    tools = cast(Any, SimpleNamespace(fabric=fabric, pool=pool, messages=MessageMemory()))
    way, key = Routes({1: LAYOUT.blocks}, {}), GradientKey(0, 1)
    gradients = place.bring(torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", lambda tensor, dst, group, tag: group.send([tensor], dst, tag))
        shipment = Shipment(tools, way, key, Cut((0,), LAYOUT.numel), 0, 7)
        pool.retain_all(key, {block.key: gradients[block.start : block.stop] for block in LAYOUT.blocks})
        shipment.advance()
        assert not shipment._leaving, "the device has not come so far"
        end = time.monotonic() + 20
        while not shipment._leaving and time.monotonic() < end:
            shipment.advance()
        assert len(shipment._leaving) == 1
        shipment.complete()
    received = torch.zeros(LAYOUT.numel + CHECKSUM_SLOTS * len(LAYOUT.blocks))
    assert pair.groups[1].recv([received], 0, 7).wait() and received[: LAYOUT.numel].tolist() == gradients.tolist()


# -- times -----------------------------------------------------------------------------------


def layers_on_device() -> tuple[Layers, Executor]:
    """Layers on the device, and what computes them in several pieces."""
    interface = Layers(layers=[torch.nn.Linear(WIDTH, WIDTH).to("standin") for _ in range(UNITS)])
    interface.batch = torch.randn(LENGTH, ROWS, WIDTH).to("standin")
    found, device, clock = plan(0, UNITS), torch.device("standin", 0), clock_of(StandinPlatform())
    return interface, Executor(
        interface,  # type: ignore[arg-type]
        Nowhere(),
        found,
        found.cells[0],
        0,
        lambda *_: None,
        device,
        clock,
    )


def slow_pass(**change: Any) -> PassResult:
    """One pass whose first forward keeps the device busy for ``NAP``."""
    standin.set_lateness(0.0)
    interface, execute = layers_on_device()
    forward = interface.forward
    slept: list[bool] = []

    def first(*given: Any) -> Any:
        output = forward(*given)
        if not slept:
            slept.append(True)
            standin._sleep(NAP)
        return output

    interface.forward = first  # type: ignore[assignment, method-assign]
    return execute.run(replace(work(), **change))


def check_pieces_are_timed_by_the_device_and_not_by_their_launches() -> None:
    measured = slow_pass().measured.read()
    spent = [one.end_ns - one.start_ns for one in measured]
    assert spent[0] >= NAP and max(spent[1:]) < NAP
    starts = [one.start_ns for one in measured]
    assert starts == sorted(starts), "in the order of the work"


def flag() -> torch.Tensor:
    """A number of the host that the device sets when it comes here; it comes no further than the host waits for."""
    found = torch.zeros(1).pin_memory()
    found.copy_(torch.ones(1, device="standin"), non_blocking=True)
    return found


def check_the_host_launches_a_whole_pass_before_its_device_has_computed_the_first_piece() -> None:
    """Each micro-batch would begin late if the host read the loss of the one before."""
    flags: list[torch.Tensor] = []
    ahead: list[bool] = []

    def between() -> None:
        flags.append(flag())
        ahead.append(flags[0].item() == 0)

    result = layers_on_device()[1].run(replace(work(), between=between))
    assert len(ahead) > 4 and all(ahead), ahead
    assert flags[0].item() == 1 and result.tokens > 0 and result.report["loss"][1] > 1


def check_numbers_for_kernels_and_dropout_do_not_wait_for_the_device() -> None:
    mask = _Mask(DropoutKey(3, 5, (7, 9)), 0.3, 2, 1, sample_dim=1, extent=(4, 8), offset=(0, 0))
    x = torch.ones(4, 2, 8, device="standin")
    standin.synchronize()
    behind = flag()
    numbers, dropped = on_device((3, 1, 2), x.device), mask.apply(x, None)
    assert behind.item() == 0, "the host did not wait"
    assert numbers.tolist() == [3, 1, 2] and torch.equal(dropped.cpu(), mask.apply(torch.ones(4, 2, 8), None))
    assert standin.unpinned_asynchronous_copies() == 0


def check_the_survey_counts_the_ranks_that_share_a_device() -> None:
    os.environ["ELASTIC_PLATFORM"] = "tests.standin.platform:StandinPlatform"
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(survey, linked().fabrics))
    assert found[0] == found[1] and (found[0].sharing, found[0].memory_bytes) == (2, 2 << 30)


def check_an_injected_slowness_is_in_proportion_to_the_devices_work() -> None:
    injector = Injector(parse("slow:factor=2"), 0, 0)
    measured = slow_pass(drag=partial(injector.drag, 0)).measured.read()
    assert measured[0].end_ns - measured[0].start_ns >= 2 * NAP
