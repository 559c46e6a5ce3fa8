"""Every group rebuilt over gloo at every edit: the baseline, ``--elastic-comm gloo``.

The baseline: a restart-free runtime made of stock parts. Group objects live for ever
(:class:`~megatron.elastic.comm.gloo.group.GlooGroup`). An edit discards the ``ProcessGroupGloo`` inside and
makes it anew over the living members, under keys (run, generation, group name) of a store outside the ranks.

Three things gloo does not give are made here.
- *Local groups*: connecting a gloo group waits for all its members, so it is
  done aside (:mod:`megatron.elastic.comm.gloo.build`); only the first operation
  on a group waits for it. (gloo's lazy connections would wait for no rank, but
  hang or abort the process when several operations start at once.)
- *Waking*: :meth:`GlooFabric.interrupt` shuts this process's own gloo sockets
  down (:mod:`megatron.elastic.comm.gloo.sockets`) until nothing waits any more. A wait
  that gloo then forgets ends by itself (:mod:`megatron.elastic.comm.gloo.wait`).
- *The lost rank*: gloo's error names no rank. Every fabric keeps a listening socket;
  a member whose socket refuses is gone. A broken link to a member that is there
  usually means that it was interrupted first, so our own interruption is
  awaited for a moment before the wait ends as ``CommTimeout``.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron.elastic.comm import registry
from megatron.elastic.comm.address import Address, EndpointValue
from megatron.elastic.comm.errors import CommError, CommTimeout, GenerationChanged, PeerLost
from megatron.elastic.comm.fabric import BlockRange, EditReport, Fabric
from megatron.elastic.comm.gloo.build import Build, bury
from megatron.elastic.comm.gloo.group import GlooGroup
from megatron.elastic.comm.gloo.guarded_store import GuardedStore
from megatron.elastic.comm.gloo.seating import Seating
from megatron.elastic.comm.gloo.side_channel import GlooSideChannel
from megatron.elastic.comm.gloo.sockets import (
    Endpoint,
    Liveness,
    created_listener,
    refused,
    shut_connections,
    unread,
)
from megatron.elastic.comm.gloo.wait import Waiters
from megatron.elastic.comm.side_channel import BACKGROUND_ROLE, SideChannel

__all__ = ["GlooFabric"]

WORLD_ROLE = "world"
PROBE_SECONDS = 0.2
"""Time-out of one liveness probe, seconds."""
GRACE_SECONDS = 1.0
"""Longest time between a broken link to a living member and our own interruption, seconds."""


class GlooFabric(Fabric):
    """See the module docstring and :class:`~megatron.elastic.comm.fabric.Fabric`.

    ``store`` is a client of a store that outlives every rank (the launcher's); it
    must be the fabric's own, since a call that blocks in it stops all others. ``timeout`` bounds every wait,
    in seconds; ``threads`` is gloo's number of worker threads a group. With
    ``dense_world`` the default group counts the living, as sub-groups do.
    """

    def __init__(
        self,
        rank: int,
        slots: int,
        incarnation: int,
        store: dist.Store,
        *,
        run_id: str = "run",
        host: str = "127.0.0.1",
        timeout: float = 60.0,
        threads: int = 2,
        dense_world: bool = False,
    ) -> None:
        self.rank = rank
        self.slots = slots
        self.generation = 0
        self.timeout = timeout
        self._incarnation = incarnation
        self._host = host
        self._store = store
        self._run_id = run_id
        self._threads = threads
        self._device, self._listener = created_listener(
            lambda: dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
        )
        self._liveness = Liveness(host)
        self._lock = threading.RLock()
        self._frozen = 0
        self._closed = False
        self._members: dict[int, Address] = {rank: self.address()}
        self._groups: dict[tuple[str, tuple[int, ...]], GlooGroup] = {}
        self._builds: dict[GlooGroup, Build] = {}
        self._written: deque[str] = deque()
        """Keys of the store that this rank has set and not deleted, in their order."""
        self._waits: dict[int, tuple[int, ...]] = {}
        self._unseen: set[int] = set()
        self._shut: set[int] = set()
        self.waiters = Waiters()
        slots_tuple = tuple(range(slots))
        self._world_slots = None if dense_world else slots
        self._world = GlooGroup(self, WORLD_ROLE, slots_tuple, self._seating(slots_tuple, self._world_slots))
        self._groups[WORLD_ROLE, slots_tuple] = self._world

    # -- membership ---------------------------------------------------------

    def address(self) -> Address:
        endpoint: dict[str, EndpointValue] = {"gloo": list(self._listener), "liveness": list(self._liveness.endpoint)}
        return Address(self.rank, self._incarnation, self._host, endpoint)

    def edit(self, generation: int, members: Mapping[int, Address], timeout: float) -> EditReport:
        """Full rebuild: drop every gloo group, agree that all are here, make them anew."""
        if self.rank not in members:
            raise CommError(f"rank {self.rank} is not a member of generation {generation}")
        started = time.monotonic()
        with self._lock:
            if generation <= self.generation:
                raise CommError(f"generation {generation} is not newer than {self.generation}, which is already used")
            if self._frozen > generation:
                raise GenerationChanged(self._frozen)
            self._frozen = generation
            before = self._members
        self._liveness.drain()
        self._drop_inner()
        dropped = time.monotonic()
        former = len(self._written)
        self._meet(generation, members, timeout)
        self._delete(former)
        met = time.monotonic()
        with self._lock:
            self._check_frozen(generation)
            self._members = dict(members)
            self.generation = generation
            groups = list(self._groups.values())
            for group in groups:
                self._seat(group)
                self._begin(group)
        self._await(self._world)
        seconds = {"drop": dropped - started, "meet": met - dropped, "build": time.monotonic() - met}
        kept = {rank for rank, address in members.items() if before.get(rank) == address}
        return EditReport(generation, seconds, len(groups), len(members) - len(kept), len(before) - len(kept))

    def interrupt(self, generation: int) -> None:
        with self._lock:
            if generation <= self._frozen or generation <= self.generation:
                return
            self._frozen = generation
            self._shut_sockets()
        self._start_waking()

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(sorted(self._members))

    def waiting_for(self) -> tuple[int, ...]:
        waits = list(self._waits.items())
        return tuple(sorted({rank for thread, peers in waits if thread not in self._unseen for rank in peers}))

    def side_channel(self, number: int) -> SideChannel:
        return GlooSideChannel(self.group(BACKGROUND_ROLE, range(self.slots)), number, self._settle)

    def _settle(self, work: dist.Work) -> None:
        """Wait on a thread beside the step. gloo's messages complete only while a thread waits for them."""
        me = threading.get_ident()
        self._unseen.add(me)
        try:
            work.wait()
        finally:
            self._unseen.discard(me)

    # -- groups -------------------------------------------------------------

    @property
    def world(self) -> GlooGroup:
        return self._world

    def group(self, role: str, members: Sequence[int]) -> GlooGroup:
        key = (role, tuple(members))
        if self.rank not in key[1]:
            raise ValueError(f"rank {self.rank} is not in group {registry.group_name(*key)}")
        with self._lock:
            found = self._groups.get(key)
            if found is None:
                found = GlooGroup(self, role, key[1], self._seating(key[1], None))
                self._groups[key] = found
                living = registry.Living(found.seating.living if self.generation else key[1])
                registry.register(found, registry.group_name(*key), self._store, key[1], living)
                if self._frozen <= self.generation:
                    self._begin(found)
        return found

    def release(self, role_prefix: str) -> None:
        with self._lock:
            matching = [group for (role, _), group in self._groups.items() if role.startswith(role_prefix)]
        gone = [group for group in matching if group is not self._world]
        for group in gone:
            self.forget(group)
            registry.unregister(group)

    def forget(self, group: GlooGroup) -> None:
        """Drop one group; the world stays. The caller clears torch's tables (``destroy_process_group``)."""
        if group is self._world:
            return
        with self._lock:
            self._groups.pop((group.role, group.members), None)
            build = self._builds.pop(group, None)
        bury([build] if build is not None else [])

    def inner(self, group: GlooGroup) -> tuple[Any, Seating]:
        """The gloo group of this generation, once its members have made theirs."""
        build = self._await(group)
        inner = build.inner
        if inner is None:  # an edit began since
            raise GenerationChanged(max(self._frozen, self.generation))
        return inner, build.seating

    def _begin(self, group: GlooGroup) -> Build:
        """Start to connect ``group`` aside (with ``_lock`` held)."""
        generation = self.generation
        name = registry.group_name(group.role, group.members)
        build = self._builds[group] = Build(group.seating)
        store: dist.Store = dist.HashStore()
        if len(group.seating.living) > 1:
            store = self._keys(f"{generation}/{name}", generation, self.timeout)
        build.start(store, self._device, self.timeout, self._threads)
        return build

    def _await(self, group: GlooGroup) -> Build:
        with self._lock:
            self._check_frozen(self.generation)
            build = self._builds.get(group) or self._begin(group)
        if not build.ready.is_set():
            deadline = time.monotonic() + self.timeout
            others = tuple(rank for rank in build.seating.living if rank != self.rank)
            with self.waiting(others, build.seating.generation):
                while not build.ready.wait(0.001):
                    self._check_frozen(build.seating.generation)
                    if time.monotonic() > deadline:
                        raise CommTimeout(self.timeout, others)
        if build.error is not None:
            others = tuple(rank for rank in build.seating.living if rank != self.rank)
            raise self.translate(build.error, others, build.seating.generation, self.timeout)
        return build

    # -- blocks -------------------------------------------------------------

    def reduce_scatter_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        """One all-reduce over all ranges: gloo's own reduce-scatter is slower than that."""
        self.begin_reduce_scatter_blocks(group, flat, blocks).wait()

    def all_gather_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        """Owners' bits are kept: the sum is taken over integers, to which others add zero."""
        self.begin_all_gather_blocks(group, flat, blocks).wait()

    def begin_reduce_scatter_blocks(
        self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]
    ) -> dist.Work:
        return _spread(flat, blocks, lambda data: group.allreduce([data]))

    def begin_all_gather_blocks(
        self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]
    ) -> dist.Work:
        for block in blocks:
            if block.owner != self.rank:
                flat[block.start : block.stop].zero_()
        word = {1: torch.uint8, 2: torch.uint8, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        return _spread(flat, blocks, lambda data: group.allreduce([data.view(word)]))

    def writes_values_only(self) -> bool:
        """Return False: the ranges of other owners are zero until their values are there."""
        return False

    # -- waits and errors ---------------------------------------------------

    @contextmanager
    def waiting(self, peers: tuple[int, ...], generation: int) -> Iterator[None]:
        me = threading.get_ident()
        self._waits[me] = peers
        if self._frozen > generation:
            self._start_waking()  # interrupted before we were seen to wait
        try:
            yield
        finally:
            self._waits.pop(me, None)

    def void(self, generation: int) -> bool:
        """True if ``generation`` is over and no shut socket holds a byte, so gloo writes to no tensor any more."""
        if max(self._frozen, self.generation) <= generation:
            return False
        with self._lock:
            self._shut = unread(self._shut)
            return not self._shut

    def translate(self, error: BaseException, peers: tuple[int, ...], generation: int, seconds: float) -> CommError:
        """gloo says only that a connection broke or time ran out; find out what that means."""
        text = str(error)
        deadline = time.monotonic() + GRACE_SECONDS
        while True:
            newest = max(self._frozen, self.generation)
            if newest > generation:
                return GenerationChanged(newest)
            lost = self._lost(peers)
            if lost is not None:
                return PeerLost(lost, text.splitlines()[0])
            late = "imed out" in text or "imeout" in text or isinstance(error, TimeoutError)
            if late or time.monotonic() > deadline:
                return CommTimeout(seconds, peers)
            time.sleep(0.001)

    def _lost(self, peers: tuple[int, ...]) -> int | None:
        for rank in peers:
            address = self._members.get(rank)
            if address is not None and refused(_at(address, "liveness"), PROBE_SECONDS):
                return rank
        return None

    def _check_frozen(self, generation: int) -> None:
        if self._closed:
            raise CommError("the fabric is closed")
        if self._frozen > generation:
            raise GenerationChanged(self._frozen)

    def _start_waking(self) -> None:
        threading.Thread(target=self._wake, name="elastic-wake", daemon=True).start()

    def _wake(self) -> None:
        """Keep shutting sockets, some of which are only being connected, until nothing waits or an edit begins."""
        began_in = self.generation
        while self._waits and not self._closed:
            with self._lock:  # an edit must not have new connections shut
                if self.generation != began_in:
                    return
                self._shut_sockets()
            time.sleep(0.001)

    def _shut_sockets(self) -> None:
        peers = [_at(address, "gloo") for address in list(self._members.values())]
        self._shut |= shut_connections({self._listener, *peers})

    # -- building -----------------------------------------------------------

    def _seating(self, members: Sequence[int], slots: int | None) -> Seating:
        living = tuple(rank for rank in members if rank in self._members)
        return Seating(self.generation, living, living.index(self.rank), slots, tuple(members))

    def _seat(self, group: GlooGroup) -> None:
        group.seating = self._seating(group.members, self._world_slots if group is self._world else None)
        if group is not self._world:
            registry.set_ranks(group, group.members, registry.Living(group.seating.living))
        elif self._world_slots is None:
            living = range(len(group.seating.living))
            registry.set_ranks(group, living, registry.Living(living))

    def _keys(self, topic: str, generation: int, timeout: float) -> GuardedStore:
        prefix = f"{self._run_id}/{topic}/"
        return GuardedStore(self._store, prefix, lambda: self._check_frozen(generation), timeout, self._written)

    def _meet(self, generation: int, members: Mapping[int, Address], timeout: float) -> None:
        """Return when every member has begun this edit."""
        store = self._keys(f"{generation}/meet", generation, timeout)
        store.set(str(self.rank), b"here")
        deadline = time.monotonic() + timeout
        missing = sorted(set(members) - {self.rank})
        while missing:
            try:
                store.wait([str(rank) for rank in missing], timedelta(seconds=min(PROBE_SECONDS, timeout)))
                return
            except TimeoutError:
                missing = [rank for rank in missing if not store.check([str(rank)])]
            for rank in missing:
                if refused(_at(members[rank], "liveness"), PROBE_SECONDS):
                    raise PeerLost(rank, "lost while groups of the new generation were formed")
            if time.monotonic() > deadline:
                raise CommTimeout(timeout, tuple(missing))

    def _delete(self, count: int) -> None:
        """Delete the first keys, of former generations, aside. All members have begun this one: none reads them now."""
        keys = [self._written.popleft() for _ in range(count)]

        def run() -> None:
            with suppress(RuntimeError, OSError):  # the store is gone, and the job with it
                for key in keys:
                    self._store.delete_key(key)

        if keys:
            threading.Thread(target=run, name="elastic-delete", daemon=True).start()

    def _drop_inner(self) -> None:
        with self._lock:
            gone = list(self._builds.values())
            self._builds.clear()
            self._shut_sockets()
        bury(gone)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._drop_inner()
        for group in list(self._groups.values()):
            if group is not self._world:
                registry.unregister(group)
        self._groups.clear()
        self.waiters.close()
        self._liveness.close()


def _at(address: Address, key: str) -> Endpoint:
    host, port = cast("list[Any]", address.endpoint[key])
    return (str(host), int(port))


class _Unpacked(dist.Work):
    """``work`` on a packed copy; the wait runs ``unpack``."""

    def __init__(self, work: dist.Work | None, unpack: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._work, self._unpack = work, unpack

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
            self._unpack()
            self._work = None
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


def _spread(
    flat: torch.Tensor, blocks: Sequence[BlockRange], collective: Callable[[torch.Tensor], dist.Work]
) -> dist.Work:
    """Begin ``collective`` on the ranges, as one tensor, in place where they cover ``flat`` without gaps."""
    if not blocks:
        return _Unpacked(None)
    ordered = sorted((block.start, block.stop) for block in blocks)
    whole = ordered[0][0], ordered[-1][1]
    gapless = all(a[1] == b[0] for a, b in itertools.pairwise(ordered))
    if gapless and flat.is_contiguous():
        return collective(flat[whole[0] : whole[1]])
    pieces = [flat[start:stop] for start, stop in ordered]
    packed = torch.cat(pieces)

    def unpack() -> None:
        for piece, part in zip(pieces, packed.split([stop - start for start, stop in ordered]), strict=True):
            piece.copy_(part)

    return _Unpacked(collective(packed), unpack)
