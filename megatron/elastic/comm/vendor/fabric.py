"""A fabric for device tensors: bulk data through the vendor's library, everything else over host links.

Membership, errors, waits and mirrors stay those of the native fabric. Each group
gets a communicator of the vendor's library when it first moves a device tensor;
:mod:`~megatron.elastic.comm.vendor.group` chooses between the two per call.

A new generation changes each vendor communicator lazily, at the first device operation of its group. The members
first tell each other, in an all-gather over host links, which communicator each one holds, whether it was revoked, and
what was begun with it (:mod:`~megatron.elastic.comm.vendor.ledger`). From that all members compute the same change:
keep, shrink, grow, or rebuild. A communicator is kept as it is if it was not revoked, has the right members, and all of
them have begun the same. One that was not used for :data:`UNUSED_GENERATIONS` is freed.

Interruption: a kernel waiting for a dead peer ends only when its communicator is
revoked (or aborted, where the library cannot). An abort frees memory of the device, which waits for all that runs
there, kernels of other communicators among it. So all that are in flight are ended at once, each in a helper thread
with a time limit; a library that hangs there ends the process into a respawn. The next
generation begins when it is done, so no kernel of the one before writes into its memory.
A call that connects members is left to a thread of its own
(:mod:`~megatron.elastic.comm.vendor.calls`).

Invariant: a communicator is used by one thread at a time (:attr:`Held.calling`). A call that enqueues returns at once,
unless the queue of the device is full; then it waits for the device, and only an abort can end that
(:data:`CALL_SECONDS`).

It is tested with real processes over a stand-in of NCCL's C API that moves real bytes
(``tests/standin/moving_nccl.c``); it has not run on several GPUs.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron.elastic._comm import DeviceEvent
from megatron.elastic.comm import registry
from megatron.elastic.comm.address import Address
from megatron.elastic.comm.errors import CommError, GenerationChanged
from megatron.elastic.comm.fabric import BlockRange, EditReport
from megatron.elastic.comm.native import NativeFabric
from megatron.elastic.comm.vendor.enqueued_beside import EnqueuedBeside
from megatron.elastic.comm.vendor.group import DeviceGroup
from megatron.elastic.comm.vendor.host_staging import begun_through_host, through_host
from megatron.elastic.comm.vendor.ledger import BYTES, Ledger, balanced
from megatron.elastic.comm.vendor.library import Edit, VendorCommunicator, VendorError, VendorHang, exit_into_respawn
from megatron.elastic.comm.vendor.outbox import Outbox
from megatron.elastic.platform.threads import OsThreads, Running

__all__ = ["DeviceFabric"]

NOTHING, WHOLE, REVOKED = 0, 1, 2
MAKING_BYTES = 16
CALL_SECONDS = 1.0
"""Time in seconds for a call that enqueues to return, before its communicator is revoked in spite of it."""
UNUSED_GENERATIONS = 3
"""Number of generations that a communicator is kept for without being used: its group may be needed again."""


@dataclass
class Held:
    """One group's communicator."""

    communicator: VendorCommunicator
    ledger: Ledger
    """The operations that this rank has begun with the communicator."""
    refused: bool = False
    """True if the library refused an operation, of which other members may have done their part."""
    making: bytes = bytes(MAKING_BYTES)
    """Names the communicator: the same on all its members, and on no other rank."""
    settled: int = 0
    """Generation in which its members were last agreed."""
    connecting: tuple[int, ...] = ()
    """Members that it is being changed to now."""
    busy: int = 0
    """Threads inside an operation of it, or about to be."""
    counting: threading.Lock = field(default_factory=threading.Lock)
    """For ``busy``."""
    calling: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that calls the library for this communicator."""
    ending: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that revokes or closes it."""
    enqueued: deque[tuple[DeviceEvent, DeviceEvent]] = field(default_factory=deque)
    """Events before and behind operations that the device may not have done yet (none on the CPU: calls block)."""

    def enter(self, threads: int) -> None:
        """Count so many threads more."""
        with self.counting:
            self.busy += threads

    def in_flight(self) -> bool:
        """True if an operation is begun or enqueued, and not done."""
        return self.busy > 0 or bool(self.pending())

    def awaited(self) -> tuple[int, ...]:
        """The members that an operation may wait for now. One that the device has not come to waits for none."""
        begun = self.busy > 0 or any(before.query() for before, _ in self.pending())
        return (*self.connecting, *(self.communicator.order if begun else ()))

    def enqueue(self, before: DeviceEvent, behind: DeviceEvent) -> None:
        """Note an operation between two events of one stream. On the thread that enqueues."""
        while self.enqueued and self.enqueued[0][1].query():
            self.enqueued.popleft()
        self.enqueued.append((before, behind))

    def pending(self) -> list[tuple[DeviceEvent, DeviceEvent]]:
        """Return the events of operations that are enqueued and not done."""
        return [pair for pair in list(self.enqueued) if not pair[1].query()]

    def state(self) -> int:
        """Return what is left of the communicator."""
        if not self.communicator.order or self.refused or self.communicator.broken():
            return NOTHING
        return REVOKED if self.communicator.revoked else WHOLE

    def begin_anew(self, making: bytes) -> None:
        """Name a communicator that has just been made."""
        self.making, self.refused, self.ledger = making, False, Ledger(self.ledger.rank)

    def enter_begun(self, messages: Sequence[tuple[int, bool]]) -> None:
        """Enter an operation into the ledger: ``messages`` (peer, whether it is sent), or a collective if empty."""
        if not messages:
            self.ledger.collective(self.communicator.order)
        for peer, sends in messages:
            (self.ledger.sent if sends else self.ledger.received)(peer)


class DeviceFabric(NativeFabric):
    """See the module docstring and :class:`~megatron.elastic.comm.fabric.Fabric`.

    ``vendor(rank)`` makes an unconnected communicator; ``device`` is where this
    rank's bulk tensors live, ``device_name`` tells devices of the job apart: members
    of a group that share one go over host links.
    """

    def __init__(
        self,
        rank: int,
        slots: int,
        incarnation: int,
        *,
        vendor: Callable[[int], VendorCommunicator],
        device: torch.device,
        device_name: str,
        **native: Any,
    ) -> None:
        self.device = device
        self._vendor = vendor
        self._device_name = device_name
        self._asked = vendor(rank)
        """Never connected: only asked what the library takes."""
        self._devices: dict[int, str] = {}
        self._held: dict[DeviceGroup, Held] = {}
        self.outbox = Outbox(device)
        self._stream: torch.Stream | None = None
        """The stream of operations in the background."""
        self._settling = threading.RLock()
        self._interrupting = threading.Lock()
        self._cut_off = 0
        """Generation whose interruption has ended operations of this one that were not done; 0 if there are none."""
        self._threads = OsThreads(self._use_device)
        self._revoking: list[Running] = []
        self.edits: list[tuple[str, Edit | str]] = []
        """Changes of communicators, newest last: (group, change)."""
        super().__init__(rank, slots, incarnation, **native)

    def _make(self, role: str, members: tuple[int, ...], *, slot_space: bool) -> DeviceGroup:
        name = registry.group_name(role, members)
        return DeviceGroup(self, self._hub, name, members, slot_space=slot_space)

    # -- membership ---------------------------------------------------------

    def address(self) -> Address:
        own = super().address()
        return Address(own.rank, own.incarnation, own.host, {**own.endpoint, "device": self._device_name})

    def edit(self, generation: int, members: Mapping[int, Address], timeout: float) -> EditReport:
        with self._interrupting:
            revoking, self._revoking, self._cut_off = self._revoking, [], 0
        for thread in revoking:
            thread.join()
        if self._stream is not None:
            with self._stream:
                behind = self._mark()
            behind.block()
        self._free_unused()
        with self.outbox.edited(generation):
            report = super().edit(generation, members, timeout)
        self._devices = {rank: str(address.endpoint.get("device", "")) for rank, address in members.items()}
        return report

    def interrupt(self, generation: int) -> None:
        # The training thread goes on at once, and must find the threads that it waits for.
        with self._interrupting, self._on_device():
            super().interrupt(generation)
            self.outbox.void(generation)
            older = [held for held in list(self._held.values()) if held.settled < generation]
            stuck = [held for held in older if held.in_flight()]
            self._cut_off = generation if stuck else self._cut_off  # before any of them ends by it
            self._revoking += self._begun([partial(self._revoke, held) for held in stuck])

    def _free_unused(self) -> None:
        """Free communicators of groups that are not used any more. Between generations, when nothing is in flight."""
        last = self.generation - UNUSED_GENERATIONS
        unused = [group for group, held in self._held.items() if held.settled <= last]
        for thread in self._begun([partial(self._close, self._held.pop(group)) for group in unused]):
            thread.join()

    def _revoke(self, held: Held) -> None:
        """End what is in flight on one communicator, when no thread is in a call of it."""
        blocks = self.device.type == "cpu"  # there a call is the operation itself, and ends only so
        alone = held.calling.acquire(timeout=0 if blocks else CALL_SECONDS)
        try:
            with held.ending:
                held.communicator.revoke()
            if not alone and not blocks:
                # What the call has enqueued meanwhile may come behind all that the library has ended.
                alone = held.calling.acquire(timeout=CALL_SECONDS)
                with self._on_device():
                    ended = alone and not held.pending()
                if not ended:
                    self._close(held)
        except VendorHang as hang:
            exit_into_respawn(hang)
        except VendorError:
            self._close(held)  # of no use to any member: made anew
        finally:
            if alone:
                held.calling.release()

    def unfinished(self) -> bool:
        with self._on_device():
            under_way = any(held.in_flight() for held in list(self._held.values()))
        return under_way or self._cut_off > 0  # in this order: an operation may be ended in between

    def cut_off_by(self) -> int:
        return self._cut_off

    def waiting_for(self) -> tuple[int, ...]:
        with self._on_device():
            others = {rank for held in list(self._held.values()) for rank in held.awaited() if rank != self.rank}
        return tuple(sorted({*super().waiting_for(), *others}))

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the device current for a block, on whatever thread: its events are asked for, and freed, there."""
        return nullcontext() if self.device.type == "cpu" else torch.accelerator.device_index(self.device.index)

    def _use_device(self) -> None:
        """Make the device current for good, on a thread of this fabric's own."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index)

    def _begun(self, actions: Iterable[Callable[[], None]]) -> list[Running]:
        """Return the threads that run ``actions``, all begun. What they refer to last, also events, is freed there."""
        return [self._threads.start("elastic-revoke", action) for action in actions]

    # -- communicators --------------------------------------------------------

    def takes(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType | None) -> bool:
        """True if the library moves (and reduces) such a tensor."""
        return self._asked.takes(tensor, op)

    def shares_device(self, living: Sequence[int]) -> bool:
        """True if two of ``living`` are on one device, which vendor libraries refuse."""
        names = [self._devices.get(rank, "") for rank in living]
        return len(set(names)) < len(names)

    def settled(self, group: DeviceGroup) -> bool:
        """True if the members have met over their communicator of this generation."""
        held = self._held.get(group)
        return held is not None and held.settled == self.generation

    @contextmanager
    def using(self, group: DeviceGroup, messages: Sequence[tuple[int, bool]] = ()) -> Iterator[VendorCommunicator]:
        """The group's communicator of this generation, for one collective of all its living members, or ``messages``.

        Each message is named by its peer (global rank) and whether it is sent there. Raises ``GenerationChanged`` when
        interrupted, before or in the middle; ``CommError`` when the library refuses. A library that hangs ends the
        process.
        """
        generation = self.generation
        with self._settling:
            held = self._held.get(group)
            if held is None:
                held = self._held[group] = Held(self._vendor(self.rank), Ledger(self.rank))
            self._check(generation)
            try:
                if held.settled != generation:
                    held.communicator.interrupted = lambda: self._hub.frozen() > generation
                    with held.calling:
                        self._settle(group, held)
                held.enter(1)
            except VendorHang as hang:
                exit_into_respawn(hang)
            except VendorError as error:
                self._close(held)
                raise self._meaning(error, generation) from error
        try:
            with held.calling:
                self._check(generation)  # after busy: either the interruption sees us or we see it
                held.enter_begun(messages)
                with self._noted(held):
                    yield held.communicator
        except VendorHang as hang:
            exit_into_respawn(hang)
        except VendorError as error:
            meaning = self._meaning(error, generation)
            held.refused |= meaning is error  # else the interruption sees to the communicator
            raise meaning from error
        finally:
            held.enter(-1)

    @contextmanager
    def _noted(self, held: Held) -> Iterator[None]:
        """Note what is enqueued in the block, also if the library refuses a part of it: the rest waits for peers."""
        if self.device.type == "cpu":
            yield
            return
        before = self._mark()
        try:
            yield
        finally:
            held.enqueue(before, self._mark())

    def _mark(self) -> DeviceEvent:
        """Return an event that is recorded in the current stream."""
        event = DeviceEvent(self.device)
        event.record()
        return event

    def _check(self, generation: int) -> None:
        frozen = self._hub.frozen()
        if frozen > generation:
            raise GenerationChanged(frozen)

    def _meaning(self, error: VendorError, generation: int) -> CommError:
        """The error that a refusal means: a revoked communicator refuses everything."""
        frozen = self._hub.frozen()
        return GenerationChanged(frozen) if frozen > generation else error

    def _settle(self, group: DeviceGroup, held: Held) -> None:
        """Agree over host links on the communicators held, and change them to the living members."""
        living, own = group.living(), held.communicator
        table = group.host_table(bytes([held.state()]) + held.making + held.ledger.to_bytes())
        states = {rank: (row[0], row[1:-BYTES]) for rank, row in zip(living, table, strict=True)}
        ledgers = {rank: row[-BYTES:] for rank, row in zip(living, table, strict=True)}
        holders = [rank for rank in living if states[rank][0] != NOTHING]
        leader = holders[0] if holders else living[0]
        order = json.loads(group.host_bytes(json.dumps(own.order).encode() if self.rank == leader else None, leader))
        survivors = [rank for rank in order if rank in living and states[rank] in _of_making(states[leader][1])]
        lost = [rank for rank in order if rank not in living]
        joined = sorted(set(living) - set(order))
        strayed = any(rank in order and rank not in survivors for rank in living)
        revoked = any(states[rank][0] == REVOKED for rank in survivors)
        uneven = not balanced(ledgers[rank] for rank in survivors)
        damaged = strayed or ((revoked or uneven) and not lost)  # without the lost ones it is made of the rest anew
        held.connecting = tuple(living)
        try:
            change = self._change(group, held, survivors, lost, joined, damaged)
        finally:
            held.connecting = ()
        if change != "kept":
            text = json.dumps([registry.group_name("", own.order), self.generation]).encode()
            held.begin_anew(hashlib.blake2s(group.group_name.encode() + text, digest_size=MAKING_BYTES).digest())
        held.settled = self.generation
        self.edits.append((group.group_name, change))

    def _change(
        self, group: DeviceGroup, held: Held, survivors: list[int], lost: list[int], joined: list[int], damaged: bool
    ) -> Edit | str:
        own, living = held.communicator, group.living()
        source = survivors[0] if survivors else living[0]

        def share(make: Callable[[], bytes]) -> bytes:
            return group.host_bytes(make() if self.rank == source else None, source)

        if not survivors:
            own.start(sorted(living), share(own.new_identity))
            return "started"
        if self.rank in survivors:
            return own.edit(sorted(living), share, damaged)
        identity = share(own.new_identity)
        if own.rebuilds(bool(lost), bool(joined), damaged):
            own.start(sorted(living), identity)
        else:
            own.join([*survivors, *joined], identity)
        return "joined"

    # -- groups and blocks ------------------------------------------------------

    def release(self, role_prefix: str) -> None:
        for (role, _), group in list(self._groups.items()):
            held = self._held.pop(cast(DeviceGroup, group), None) if role.startswith(role_prefix) else None
            if held is not None:
                self._close(held)
        super().release(role_prefix)

    def reduce_scatter_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        if not _ours(group).by_vendor(flat, op=dist.ReduceOp.SUM):
            staged = super().reduce_scatter_blocks
            through_host([], [flat], lambda _, host: staged(group, host[0], blocks))
            return
        self._reduce_blocks(_ours(group), flat, blocks)

    def _reduce_blocks(self, group: DeviceGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        """Enqueue one vendor reduction a block; the library sums in an order of its own."""
        with self.using(group) as communicator, communicator.batch():
            for block in blocks:
                root = communicator.order.index(block.owner)
                communicator.reduce(flat[block.start : block.stop], root, dist.ReduceOp.SUM)

    def all_gather_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        if not _ours(group).by_vendor(flat):
            staged = super().all_gather_blocks
            through_host([], [flat], lambda _, host: staged(group, host[0], blocks))
            return
        self._gather_blocks(_ours(group), flat, blocks)

    def _gather_blocks(self, group: DeviceGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        with self.using(group) as communicator, communicator.batch():
            for block in blocks:
                communicator.broadcast(flat[block.start : block.stop], communicator.order.index(block.owner))

    def begin_reduce_scatter_blocks(
        self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]
    ) -> dist.Work:
        begin = super().begin_reduce_scatter_blocks
        if not _ours(group).by_vendor(flat, op=dist.ReduceOp.SUM):
            return begun_through_host(flat, lambda host: begin(group, host, blocks))
        return self._beside(lambda: self._reduce_blocks(_ours(group), flat, blocks))

    def begin_all_gather_blocks(
        self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]
    ) -> dist.Work:
        begin = super().begin_all_gather_blocks
        if not _ours(group).by_vendor(flat):
            return begun_through_host(flat, lambda host: begin(group, host, blocks))
        return self._beside(lambda: self._gather_blocks(_ours(group), flat, blocks))

    def writes_values_only(self) -> bool:
        """Return False: no vendor says what its library does with a buffer until it is filled."""
        return False

    def begins_at_once(self, group: dist.ProcessGroup) -> bool:
        """A communicator's first use in a generation is a meeting of its members (:meth:`_settle`)."""
        ours = _ours(group)
        return self.settled(ours) or not ours.by_vendor(torch.empty(0, device=self.device), op=dist.ReduceOp.SUM)

    def _beside(self, enqueue: Callable[[], None]) -> dist.Work:
        """Enqueue on a stream of its own, behind what the current one has now."""
        if self.device.type == "cpu":
            enqueue()
            return EnqueuedBeside(None)
        if self._stream is None:
            self._stream = torch.Stream(self.device)
        before = self._mark()
        with self._stream:
            before.block()
            enqueue()
            return EnqueuedBeside(self._mark())

    def close(self) -> None:
        held, self._held = list(self._held.values()), {}
        for thread in self._begun([partial(self._close, one) for one in held]):
            thread.join()
        self.outbox.close()
        super().close()

    def _close(self, held: Held) -> None:
        try:
            with held.ending:
                held.communicator.close()
        except VendorHang as hang:
            exit_into_respawn(hang)
        except VendorError:
            return  # it is broken already: nothing is left to free


def _of_making(making: bytes) -> tuple[tuple[int, bytes], tuple[int, bytes]]:
    return (WHOLE, making), (REVOKED, making)


def _ours(group: dist.ProcessGroup) -> DeviceGroup:
    if not isinstance(group, DeviceGroup):
        raise CommError(f"block lists need a group of this fabric, not {type(group).__name__}")
    return group
