"""A fabric whose links are queues in one Python process (:class:`megatron.elastic.comm.fabric.Fabric`).

Every message lies at its receiver from the moment it is sent, under its generation. When a process is killed, each peer
keeps a beginning of what it had sent it and not been read, cut at random, as the queues of a socket would. A wait that
is complete and interrupted at once ends in either way, by chance.

What transports do differently is a :class:`Style`, drawn with the seed: whether a send is over before the receiver has
asked for it, whether an edit returns before all members have begun it, and whether collectives of blocks are enqueued
on a device.
"""

# mypy: disable-error-code="override, assignment"
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron.elastic.comm import registry
from megatron.elastic.comm.address import Address
from megatron.elastic.comm.call_arguments import op_in, tensor_list
from megatron.elastic.comm.errors import CommError, GenerationChanged, PeerLost
from megatron.elastic.comm.fabric import BlockRange, EditReport, Fabric
from megatron.elastic.comm.gloo.seating import Seated, Seating
from megatron.elastic.comm.side_channel import AWAITED, BACKGROUND_ROLE, BESIDE_A_STEP, SideChannel
from tests.cluster.scheduler import Scheduler

__all__ = ["ClusterFabric", "ClusterGroup", "Style", "Wire"]

WORLD_ROLE = "world"
CONFIRMED_BYTES = 512
"""Longer messages of a side channel are confirmed: a sender has a few of them under way."""

Key = tuple[Any, ...]
"""(generation, what the message is, ..., sender)."""


@dataclass(frozen=True)
class Style:
    """The behaviour of a transport where the interface leaves it open."""

    eager: bool = True
    """A send is over at once; otherwise when its receiver has asked for it."""
    meets: bool = False
    """An edit returns when all members have begun it; otherwise when newcomers have."""
    enqueues: bool = False
    """Collectives of blocks are enqueued, as by a vendor's library. No call of theirs tells of a peer that is lost, or
    of an interruption, which ends them without values. The host waits for them all the same, as kernels would."""


@dataclass
class Wire:
    """The connection between the fabrics of all processes."""

    scheduler: Scheduler
    style: Style = field(default_factory=Style)
    ends: dict[tuple[int, int], ClusterFabric] = field(default_factory=dict)
    """(rank, incarnation) → the fabric of that process, also when it has ended."""
    store: dist.Store = field(default_factory=dist.HashStore)
    """For torch's tables; nothing is kept there."""

    def cut(self, rank: int, incarnation: int) -> None:
        """The process is killed: what it has sent and is not read comes to its peers in part."""
        for end in self.ends.values():
            waiting = sorted(
                (number, key)
                for key, messages in end.inbox.items()
                if key[-1] == (rank, incarnation)
                for number, _ in messages
            )
            kept = self.scheduler.random.randint(0, len(waiting))
            gone = {number for number, _ in waiting[kept:]}
            for key in {key for _, key in waiting[kept:]}:
                end.inbox[key] = deque(one for one in end.inbox[key] if one[0] not in gone)


class ClusterFabric(Fabric):
    """One process's end of the wire."""

    def __init__(self, wire: Wire, rank: int, slots: int, incarnation: int, host: str, timeout: float = 600.0) -> None:
        self.rank, self.slots, self.generation, self.timeout = rank, slots, 0, timeout
        self.incarnation = incarnation
        self.scheduler = wire.scheduler
        self.closed = False
        self.begun = 0
        """Newest generation whose edit has begun here."""
        self.inbox: dict[Key, deque[tuple[int, Any]]] = defaultdict(deque)
        self.asked: dict[Key, int] = defaultdict(int)
        """Number of messages that this process has asked for."""
        self._sent: dict[Key, int] = defaultdict(int)
        self._numbers: dict[int, int] = defaultdict(int)
        self._wire, self._host = wire, host
        self._frozen = 0
        self._waits: dict[object, tuple[int, ...]] = {}
        self._cut_off = False
        """An enqueued collective of this generation has ended without its values."""
        self._members: dict[int, Address] = {rank: self.address()}
        self._living = registry.Living((rank,))
        self._groups: dict[tuple[str, tuple[int, ...]], ClusterGroup] = {}
        self._world = self._make(WORLD_ROLE, tuple(range(slots)))
        wire.ends[rank, incarnation] = self

    # -- membership ---------------------------------------------------------

    def address(self) -> Address:
        return Address(self.rank, self.incarnation, self._host)

    def edit(self, generation: int, members: Mapping[int, Address], timeout: float) -> EditReport:
        self.scheduler.wait()
        if self.rank not in members:
            raise CommError(f"rank {self.rank} is not a member of generation {generation}")
        if generation <= self.generation:
            raise CommError(f"generation {generation} is not newer than {self.generation}")
        if self._frozen > generation:
            raise GenerationChanged(self._frozen)
        self._frozen = self.begun = generation
        here = [rank for rank, address in members.items() if self._wire.style.meets or self._is_new(rank, address)]
        ends = {rank: self._wire.ends[rank, members[rank].incarnation] for rank in here}
        self._await(generation, tuple(ends), lambda: all(end.begun >= generation for end in ends.values()), members)
        opened = sum(self._is_new(rank, address) for rank, address in members.items())
        dropped = len(self._members.keys() - members.keys())
        self._members, self.generation, self._cut_off = dict(members), generation, False
        for key in [key for key in self.inbox if key[0] < generation]:
            del self.inbox[key]
        self._seat()
        return EditReport(generation, {}, len(self._groups), opened, dropped)

    def _is_new(self, rank: int, address: Address) -> bool:
        known = self._members.get(rank)
        return known is None or known.incarnation != address.incarnation

    def interrupt(self, generation: int) -> None:
        if generation > self.generation:
            self._frozen = max(self._frozen, generation)

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(sorted(self._members))

    def waiting_for(self) -> tuple[int, ...]:
        return tuple(sorted({rank for peers in self._waits.values() for rank in peers}))

    def unfinished(self) -> bool:
        return self._cut_off

    def cut_off_by(self) -> int:
        return self._frozen if self._cut_off and self._frozen > self.generation else 0

    def break_off(self) -> None:
        """This process is killed: not all that it has sent arrives."""
        if not self.closed:
            self._wire.cut(self.rank, self.incarnation)
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for group in (self._world, *self._groups.values()):
                registry.unregister(group)

    def enter(self) -> None:
        """Make this process's world the default group of ``torch.distributed``."""
        c10d._world._default_pg = self._world

    # -- groups -------------------------------------------------------------

    @property
    def world(self) -> ClusterGroup:
        return self._world

    def group(self, role: str, members: Sequence[int]) -> ClusterGroup:
        key = role, tuple(members)
        if self.rank not in key[1]:
            raise ValueError(f"rank {self.rank} is not in group {registry.group_name(*key)}")
        if key not in self._groups:
            self._groups[key] = self._make(*key)
        return self._groups[key]

    def _make(self, role: str, members: tuple[int, ...]) -> ClusterGroup:
        group = ClusterGroup(self, role, members)
        group.seating = self._seating(group)
        living = registry.Living(members) if self.generation == 0 else self._living
        name = f"{self.rank}.{self.incarnation}/{registry.group_name(role, members)}"
        registry.register(group, name, self._wire.store, members, living)
        return group

    def _seat(self) -> None:
        self._living = registry.Living(frozenset(self._members))
        for group in (self._world, *self._groups.values()):
            group.seating = self._seating(group)
            registry.set_ranks(group, group.members, self._living)

    def _seating(self, group: ClusterGroup) -> Seating:
        living = tuple(rank for rank in group.members if rank in self._members)
        slots = self.slots if group.role == WORLD_ROLE else None
        return Seating(self.generation, living, living.index(self.rank), slots, group.members)

    def release(self, role_prefix: str) -> None:
        for key in [key for key in self._groups if key[0].startswith(role_prefix)]:
            registry.unregister(self._groups.pop(key))

    def side_channel(self, number: int) -> SideChannel:
        return ClusterSideChannel(self, number)

    # -- blocks -------------------------------------------------------------

    def reduce_scatter_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        self.begin_reduce_scatter_blocks(group, flat, blocks).wait()

    def all_gather_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        self.begin_all_gather_blocks(group, flat, blocks).wait()

    def begin_reduce_scatter_blocks(
        self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]
    ) -> dist.Work:
        ours = _ours(group)
        parts = {
            rank: torch.cat([flat[b.start : b.stop] for b in blocks if b.owner == rank])
            for rank in ours.seating.living
            if any(b.owner == rank for b in blocks)
        }
        mine = [block for block in blocks if block.owner == self.rank]
        living = ours.seating.living

        def finish(found: dict[int, Any]) -> None:
            if mine:
                total = _summed([found[rank] for rank in living])
                for block, part in zip(mine, total.split([b.stop - b.start for b in mine]), strict=True):
                    flat[block.start : block.stop] = part

        begun = ours.begin_exchange("reduce_scatter_blocks", parts, living if mine else (), finish)
        return self._enqueued(begun, flat) if self._wire.style.enqueues else begun

    def begin_all_gather_blocks(
        self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]
    ) -> dist.Work:
        ours = _ours(group)
        mine = [block for block in blocks if block.owner == self.rank]
        part = torch.cat([flat[b.start : b.stop] for b in mine]) if mine else None
        owners = tuple(dict.fromkeys(block.owner for block in blocks))
        parts = {} if part is None else dict.fromkeys(ours.seating.living, part)

        def finish(found: dict[int, Any]) -> None:
            for owner in owners:
                theirs = [block for block in blocks if block.owner == owner]
                for block, values in zip(theirs, found[owner].split([b.stop - b.start for b in theirs]), strict=True):
                    flat[block.start : block.stop] = values

        begun = ours.begin_exchange("all_gather_blocks", parts, owners, finish)
        return self._enqueued(begun, flat) if self._wire.style.enqueues else begun

    def _enqueued(self, begun: dist.Work, flat: torch.Tensor) -> dist.Work:
        """Return ``begun`` as a device does it: if an interruption ends it, no value of ``flat`` is one to use."""

        def finish() -> None:
            try:
                begun.wait()
            except PeerLost:
                with suppress(GenerationChanged):
                    self.settle(self.generation, (), lambda: False)
                self.never(flat)
            except GenerationChanged:
                self.never(flat)

        return _Work(finish, lambda: begun.is_completed() or self._frozen > self.generation)

    def never(self, flat: torch.Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
        """An enqueued collective of this generation does not come to its end, so ``flat`` has no values of its own.

        ``group``: this process does not take part in it at all.
        """
        if group is not None:
            _ours(group).count()
        self._cut_off = True
        flat.fill_(float("nan"))
        return _Work()

    # -- messages -----------------------------------------------------------

    def put(self, peer: int, key: Key, value: Any) -> Callable[[], bool]:
        """Send ``value`` to ``peer`` under ``key``; the answer tells whether it has asked for it."""
        end = self._end(peer)
        address = *key, (self.rank, self.incarnation)
        self._sent[peer, *key] += 1
        number = self._sent[peer, *key]
        if not end.closed and key[0] >= end.generation:
            self._numbers[peer] += 1
            end.inbox[address].append((self._numbers[peer], value))
        return lambda: end.asked[address] >= number

    def ask(self, peer: int, key: Key) -> Key:
        """This process wants the next message of ``peer`` under ``key``; the answer is where it will lie."""
        address = *key, (peer, self._end(peer).incarnation)
        self.asked[address] += 1
        return address

    def take(self, address: Key) -> Any:
        """The oldest message at ``address``, where there is one."""
        value = self.inbox[address].popleft()[1]
        if not self.inbox[address]:
            del self.inbox[address]
        return value

    def has(self, address: Key) -> bool:
        """Return whether a message lies at ``address``."""
        return bool(self.inbox.get(address))

    def _end(self, peer: int) -> ClusterFabric:
        address = self._members.get(peer)
        if address is None:
            raise PeerLost(peer, "not a living member")
        return self._wire.ends[peer, address.incarnation]

    def begin(self, generation: int) -> None:
        """An operation of ``generation`` begins. Raises ``GenerationChanged`` where that is over."""
        self.scheduler.wait()
        error = self._void(generation, (), self._members)
        if error is not None:
            raise error

    def settle(
        self,
        generation: int,
        peers: Iterable[int],
        done: Callable[[], bool],
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until ``done``. Raises ``PeerLost`` of one of ``peers``, ``GenerationChanged``, ``CommError``."""
        me, others = object(), tuple(peers)
        self._waits[me] = others
        try:
            self._await(generation, others, done, self._members, given_up)
        finally:
            del self._waits[me]

    def _await(
        self,
        generation: int,
        peers: tuple[int, ...],
        done: Callable[[], bool],
        members: Mapping[int, Address],
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        def void() -> CommError | None:
            return CommError("given up") if given_up() else self._void(generation, peers, members)

        self.scheduler.wait(lambda: done() or void() is not None)
        error = void()
        if error is None or (done() and isinstance(error, PeerLost)):
            return
        if not (done() and self.scheduler.random.random() < 0.5):
            raise error

    def _void(self, generation: int, peers: tuple[int, ...], members: Mapping[int, Address]) -> CommError | None:
        if self.closed:
            return CommError("the fabric is closed")
        newest = max(self._frozen, self.generation)
        if newest > generation:
            return GenerationChanged(newest)
        for rank in peers:
            if self._wire.ends[rank, members[rank].incarnation].closed:
                return PeerLost(rank)
        return None

    def transfers_at_once(self) -> bool:
        """Return whether a send is over before its receiver has asked for it."""
        return self._wire.style.eager


class ClusterGroup(Seated, dist.ProcessGroup):
    """A group of a :class:`ClusterFabric`, with the collectives that the engine calls."""

    def __init__(self, fabric: ClusterFabric, role: str, members: tuple[int, ...]) -> None:
        super().__init__(members.index(fabric.rank), len(members))  # type: ignore[call-arg]
        self.role, self.members = role, members
        self._fabric = fabric
        self._calls = (0, 0)
        """(generation, collectives begun in it)."""

    # -- collectives ----------------------------------------------------------

    def exchange(self, kind: str, parts: Mapping[int, torch.Tensor | None], needed: Iterable[int]) -> dict[int, Any]:
        """Send ``parts`` (rank → value), wait for those of the ranks ``needed``. One call of a collective."""
        found: dict[int, Any] = {}
        self.begin_exchange(kind, parts, needed, found.update).wait()
        return found

    def begin_exchange(
        self,
        kind: str,
        parts: Mapping[int, torch.Tensor | None],
        needed: Iterable[int],
        finish: Callable[[dict[int, Any]], None],
    ) -> dist.Work:
        """Send ``parts`` and return; the work's wait takes in those of ``needed`` and hands them to ``finish``."""
        fabric, seating = self._fabric, self.seating
        fabric.begin(seating.generation)
        key = seating.generation, "collective", self.role, self.members, self.count()
        sent = {id(part): part.clone() for part in parts.values() if part is not None}
        for rank, part in parts.items():
            fabric.put(rank, key, (kind, sent.get(id(part))))
        places = {rank: fabric.ask(rank, key) for rank in needed}

        def is_done() -> bool:
            return all(map(fabric.has, places.values()))

        def take() -> None:
            missing = [rank for rank, place in places.items() if not fabric.has(place)]
            fabric.settle(seating.generation, missing, is_done)
            found = {rank: fabric.take(place) for rank, place in places.items()}
            others = {rank: of for rank, (of, _) in found.items() if of != kind}
            if others:
                raise AssertionError(
                    f"rank {fabric.rank} is in {kind} of {self.getGroupName()}, others are in {others}"
                )
            finish({rank: part for rank, (_, part) in found.items()})

        return _Work(take, is_done)

    def count(self) -> int:
        """Return the number of the next collective within this generation."""
        generation, count = self._calls
        count = count + 1 if generation == self.seating.generation else 1
        self._calls = self.seating.generation, count
        return count

    def _from_all(self, kind: str, value: Any) -> list[Any]:
        living = self.seating.living
        found = self.exchange(kind, dict.fromkeys(living, value), living)
        return [found[rank] for rank in living]

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        op = op_in(args, kwargs)
        for tensor in tensor_list(tensors):
            rows = self._from_all(f"all_reduce of {tuple(tensor.shape)}", tensor)
            tensor.copy_(torch.stack(rows).amax(0) if op == dist.ReduceOp.MAX else _summed(rows))
        return _Work()

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        living, seats = self.seating.living, self.seating.seats()

        def finish(found: dict[int, Any]) -> None:
            for seat, rank in zip(seats, living, strict=True):
                outputs[0][seat].copy_(found[rank])

        parts = dict.fromkeys(living, inputs[0])
        return self.begin_exchange(f"all_gather of {tuple(inputs[0].shape)}", parts, living, finish)

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        self._from_all("barrier", None)
        return _Work()

    # -- point to point -------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        fabric, generation, peer = self._fabric, self.seating.generation, self._peer(dst)
        fabric.begin(generation)
        (tensor,) = tensor_list(tensors)
        taken = fabric.put(peer, self._key(tag), tensor.detach().clone())
        done = (lambda: True) if fabric.transfers_at_once() else taken
        return _Work(lambda: fabric.settle(generation, (peer,), done), done)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        fabric, generation, peer = self._fabric, self.seating.generation, self._peer(src)
        fabric.begin(generation)
        (tensor,) = tensor_list(tensors)
        place = fabric.ask(peer, self._key(tag))

        def finish() -> None:
            fabric.settle(generation, (peer,), lambda: fabric.has(place))
            tensor.copy_(fabric.take(place).view(tensor.shape))

        return _Work(finish, lambda: fabric.has(place))

    def _key(self, tag: int) -> Key:
        return self.seating.generation, "message", self.role, self.members, tag

    def _peer(self, group_rank: int) -> int:
        inner = self.seating.inner(group_rank)
        if inner is None:
            raise PeerLost(group_rank, f"not a living member of {self.role!r}")
        return self.seating.living[inner]


class _Work(dist.Work):
    """Of a message, or of a collective that is over."""

    def __init__(self, finish: Callable[[], None] = lambda: None, is_done: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._finish, self._is_done, self._over = finish, is_done, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._over:
            self._finish()
            self._over = True
        return True

    def is_completed(self) -> bool:
        return self._over or self._is_done()

    def is_success(self) -> bool:
        return self._over


class ClusterSideChannel:
    """Implements :class:`megatron.elastic.comm.side_channel.SideChannel`."""

    def __init__(self, fabric: ClusterFabric, number: int) -> None:
        self._fabric, self._generation = fabric, fabric.generation
        self._key: Key = fabric.generation, BACKGROUND_ROLE, number
        self._allowed, self._given_up = BESIDE_A_STEP, False
        self._unconfirmed: dict[int, list[Callable[[], bool]]] = defaultdict(list)

    def send(self, peer: int, payload: torch.Tensor) -> None:
        self._fabric.begin(self._generation)
        self._confirmed(peer, self._allowed - 1)
        taken = self._fabric.put(peer, self._key, payload.reshape(-1).clone())
        if payload.nbytes > CONFIRMED_BYTES:
            self._unconfirmed[peer].append(taken)

    def recv(self, peer: int, out: torch.Tensor) -> None:
        self._fabric.begin(self._generation)
        place = self._fabric.ask(peer, self._key)
        self._settle(peer, lambda: self._fabric.has(place))
        out.view(-1).copy_(self._fabric.take(place))

    def drain(self, peer: int) -> None:
        self._confirmed(peer, 0)

    def hurry(self) -> None:
        self._allowed = AWAITED

    def give_up(self) -> None:
        self._given_up = True

    def under_way(self, peer: int) -> int:
        return sum(not taken() for taken in self._unconfirmed[peer])

    def _confirmed(self, peer: int, left: int) -> None:
        self._settle(peer, lambda: self.under_way(peer) <= left)

    def _settle(self, peer: int, done: Callable[[], bool]) -> None:
        self._fabric.settle(self._generation, (peer,), done, lambda: self._given_up)


def _summed(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """In the order of the members."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _ours(group: dist.ProcessGroup) -> ClusterGroup:
    assert isinstance(group, ClusterGroup)
    return group
