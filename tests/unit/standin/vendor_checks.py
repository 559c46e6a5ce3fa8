"""A vendor's library beside the engine's threads and generations, each check in a process of its own."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import GenerationChanged
from megatron.elastic.comm.fabric import BlockRange
from megatron.elastic.comm.transfers import PostedTransfers
from megatron.elastic.comm.vendor import fabric as vendor_fabric
from megatron.elastic.comm.vendor.group import DeviceGroup
from megatron.elastic.comm.vendor.library import VendorError
from megatron.elastic.comm.vendor.nccl import NcclCommunicator, NcclLibrary
from megatron.elastic.comm.vendor.selection import Vendor
from megatron.elastic.engine.compute.block_checksums import CHECKSUM_SLOTS
from megatron.elastic.engine.compute.message_memory import MessageMemory
from megatron.elastic.engine.generation.buckets import Cut
from megatron.elastic.engine.generation.view import Routes
from megatron.elastic.engine.transaction.shipment import Shipment, plan_shipment
from megatron.elastic.state.device_place import DevicePlace, tensor_kernels
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper
from tests.standin import device as standin
from tests.standin.platform import StandinPlatform
from tests.standin.vendor import VERSIONS, build_nccl
from tests.unit.standin.pairs import NAP, edit, linked
from tests.unit.standin.state_checks import LAYOUT, RATES, filled


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


def check_threads_that_free_a_communicator_work_on_its_device(folder: Path) -> None:
    """Its events are freed there, and a new thread begins on device 0, of which another process may have the use."""
    both, seen = OnDevices(folder), list[int]()
    for rank, fabric in enumerate(both.fabrics):
        for thread in fabric._begun([lambda: seen.append(torch.accelerator.current_device_index())]):
            thread.join()
        assert seen[rank] == rank, seen


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
        for thread in job.fabrics[0]._revoking:
            thread.join()
        held = job.fabrics[0]._held[cast(DeviceGroup, job.groups[0])]
        assert held.communicator.order == (), "a revoke ends what was enqueued before it: the rest takes an abort"
        returns.set()
        enqueued.result(20)
        job.threads[0].submit(standin.synchronize).result(20)


def check_a_full_queue_of_the_device_holds_up_no_other_thread(folder: Path) -> None:
    """The operation at its head waits for a rank that is lost, and only another thread can end it."""
    job = OnDevices(folder)
    for one in [job.sum(rank) for rank in range(2)]:
        one.result(20)
    job.sum(0).result(20)
    assert job.waits(0, (1,))
    marking = job.threads[0].submit(lambda: [job.fabrics[0]._mark() for _ in range(5000)])
    with pytest.raises(TimeoutError):
        marking.result(1.0)
    job.fabrics[0].interrupt(2)
    assert len(marking.result(20)) == 5000
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
    groups = {"slots": 2, "group": lambda role, members: pair.groups[0], "transfers": PostedTransfers}
    fabric = cast(Any, SimpleNamespace(**groups, lendable=torch.zeros, on_loan=lambda address: False))
    tools, messages = cast(Any, SimpleNamespace(pool=pool, fabric=fabric)), MessageMemory(CHECKSUM_SLOTS, fabric)
    way, key = Routes({1: LAYOUT.blocks}, {}), GradientKey(0, 1)
    gradients = place.bring(torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_group_rank", lambda group, rank: rank)
        shipment = Shipment(tools, plan_shipment(way, Cut((0,), LAYOUT.numel), messages, fabric), key, 0, 7)
        pool.retain_all(key, {block.key: gradients[block.start : block.stop] for block in LAYOUT.blocks}, shipment)
        shipment.advance()
        assert len(shipment.unsent) == 1, "the device has not come so far"
        end = time.monotonic() + 20
        while shipment.unsent and time.monotonic() < end:
            shipment.advance()
        assert not shipment.unsent
        shipment.complete()
    received = torch.zeros(LAYOUT.numel + CHECKSUM_SLOTS * len(LAYOUT.blocks))
    assert pair.groups[1].recv([received], 0, 7).wait() and received[: LAYOUT.numel].tolist() == gradients.tolist()
