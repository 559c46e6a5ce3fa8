"""Every group rebuilt over gloo at every edit: the baseline, ``--elastic-comm gloo``.

What a restart-free runtime can do with stock parts. Group objects live for ever
(:class:`~megatron.elastic.comm.gloo_group.GlooGroup`); the ``ProcessGroupGloo``
inside is thrown away at an edit and made anew over the living members, under
keys (run, generation, group name) of a store that lives outside the ranks.

Three things gloo does not give are made here.
- *Local groups*: connections are opened on first use (gloo's lazy device), so
  making a group waits for nobody.
- *Waking*: :meth:`GlooFabric.interrupt` shuts this process's own gloo sockets
  down (:mod:`megatron.elastic.comm.sockets`) until nothing waits any more.
- *Who died*: gloo's error names no rank. Every fabric keeps a listening socket;
  a member whose socket refuses is gone. A broken link to a member that is there
  usually means that it was interrupted first, so our own interruption is
  awaited for a moment before the wait ends as ``CommTimeout``.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron.elastic.comm import registry
from megatron.elastic.comm.errors import CommError, CommTimeout, GenerationChanged, PeerLost
from megatron.elastic.comm.fabric import Address, BlockRange, EditReport, Fabric
from megatron.elastic.comm.gloo_group import GlooGroup, Seating
from megatron.elastic.comm.guarded_store import GuardedStore
from megatron.elastic.comm.sockets import Endpoint, Liveness, created_listener, refused, shut_connections

__all__ = ["GlooFabric"]

WORLD_ROLE = "world"
PROBE_SECONDS = 0.2
"""How long one liveness probe may take."""
GRACE_SECONDS = 1.0
"""How long a broken link to a living member may precede our own interruption."""


@dataclass(eq=False)
class _Built:
    """One gloo group and the store it asks: torch keeps the C++ half of a Python store only."""

    inner: Any
    store: dist.Store


class GlooFabric(Fabric):
    """See the module docstring and :class:`~megatron.elastic.comm.fabric.Fabric`.

    ``store`` outlives every rank (the launcher's); ``timeout`` bounds every wait,
    in seconds; ``threads`` is gloo's number of worker threads a group.
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
        self._liveness = Liveness(host)
        self._lock = threading.RLock()
        self._frozen = 0
        self._closed = False
        self._members: dict[int, Address] = {rank: self.address()}
        self._groups: dict[tuple[str, tuple[int, ...]], GlooGroup] = {}
        self._inner: dict[GlooGroup, _Built] = {}
        self._listeners: set[Endpoint] = set()
        self._waits: dict[int, tuple[int, ...]] = {}
        slots_tuple = tuple(range(slots))
        self._world = GlooGroup(self, WORLD_ROLE, slots_tuple, self._seating(slots_tuple, slots))
        self._groups[WORLD_ROLE, slots_tuple] = self._world

    # -- membership ---------------------------------------------------------

    def address(self) -> Address:
        endpoint = {"liveness": list(self._liveness.endpoint)}
        return Address(self.rank, self._incarnation, self._host, endpoint)

    def edit(self, generation: int, members: Mapping[int, Address], timeout: float) -> EditReport:
        """Full rebuild: drop every gloo group, agree that all are here, make them anew."""
        if self.rank not in members:
            raise CommError(f"rank {self.rank} is not a member of generation {generation}")
        started = time.monotonic()
        with self._lock:
            if generation <= self.generation:
                raise CommError(f"generation {generation} is not newer than {self.generation}")
            if self._frozen > generation:
                raise GenerationChanged(self._frozen)
            self._frozen = generation
            before = self._members
        self._liveness.drain()
        self._drop_inner()
        dropped = time.monotonic()
        self._meet(generation, members, timeout)
        met = time.monotonic()
        with self._lock:
            self._check_frozen(generation)
            self._members = dict(members)
            self.generation = generation
            for group in self._groups.values():
                self._seat(group)
            groups = list(self._groups.values())
        for group in groups:
            if len(group.seating.living) > 1:
                self.inner(group)
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
        return tuple(sorted({rank for peers in list(self._waits.values()) for rank in peers}))

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
                registry.register(found, registry.group_name(*key), self._store, key[1])
                registry.set_ranks(found, key[1], found.seating.living)
        return found

    def release(self, role_prefix: str) -> None:
        with self._lock:
            gone = [group for (role, _), group in self._groups.items() if role.startswith(role_prefix)]
        for group in gone:
            self.forget(group)

    def forget(self, group: GlooGroup) -> None:
        """Drop one group; the world stays."""
        if group is self._world:
            return
        with self._lock:
            self._groups.pop((group.role, group.members), None)
            built = self._inner.pop(group, None)
        registry.unregister(group)
        _bury([built] if built is not None else [])

    def inner(self, group: GlooGroup) -> tuple[Any, Seating]:
        """The gloo group of this generation, made on first use; waits for nobody."""
        with self._lock:
            self._check_frozen(self.generation)
            if self._closed:
                raise CommError("the fabric is closed")
            built = self._inner.get(group)
            if built is None:
                built = self._inner[group] = self._make(group)
            return built.inner, group.seating

    # -- blocks -------------------------------------------------------------

    def reduce_scatter_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        """One all-reduce over all ranges: gloo's own reduce-scatter is slower than that."""
        if blocks:
            _spread(flat, blocks, lambda data: group.allreduce([data]).wait())

    def all_gather_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        """Owners' bits are kept: the sum is taken over integers, to which others add zero."""
        if not blocks:
            return
        for block in blocks:
            if block.owner != self.rank:
                flat[block.start : block.stop].zero_()
        word = {1: torch.uint8, 2: torch.uint8, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        _spread(flat, blocks, lambda data: group.allreduce([data.view(word)]).wait())

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
        if self._frozen > generation:
            raise GenerationChanged(self._frozen)

    def _start_waking(self) -> None:
        threading.Thread(target=self._wake, name="elastic-wake", daemon=True).start()

    def _wake(self) -> None:
        """Keep shutting sockets, some of which are only being connected, until nothing waits or an edit begins."""
        began_in = self.generation
        while self._waits and self.generation == began_in and not self._closed:
            self._shut_sockets()
            time.sleep(0.001)

    def _shut_sockets(self) -> None:
        listeners = self._listeners.copy()
        if listeners:
            shut_connections(listeners)

    # -- building -----------------------------------------------------------

    def _seating(self, members: Sequence[int], slots: int | None) -> Seating:
        living = tuple(rank for rank in members if rank in self._members)
        return Seating(self.generation, living, living.index(self.rank), slots)

    def _seat(self, group: GlooGroup) -> None:
        group.seating = self._seating(group.members, self.slots if group is self._world else None)
        if group is not self._world:
            registry.set_ranks(group, group.members, group.seating.living)

    def _make(self, group: GlooGroup) -> _Built:
        """A device of its own (lazy pairs of two groups clash on a shared one) and the gloo group over it."""
        generation, seating = self.generation, group.seating
        device, listener = created_listener(
            lambda: dist.ProcessGroupGloo.create_device(hostname=self._host, lazy_init=True)
        )
        store: dist.Store = dist.HashStore()
        if len(seating.living) > 1:
            store = self._meeting_point(group, generation, seating, listener)
        options = cast(Any, dist.ProcessGroupGloo)._Options()
        options._devices = [device]
        options._timeout = timedelta(seconds=self.timeout)
        options._threads = self._threads
        return _Built(dist.ProcessGroupGloo(store, seating.own, len(seating.living), options), store)

    def _meeting_point(self, group: GlooGroup, generation: int, seating: Seating, listener: Endpoint) -> GuardedStore:
        """Where the members' gloo addresses are exchanged; learns their listeners before gloo connects."""
        name = registry.group_name(group.role, group.members)
        prefix = f"{self._run_id}/{generation}/{name}/"
        self._listeners.add(listener)
        self._store.set(f"{prefix}listener/{seating.own}", f"{listener[0]} {listener[1]}")

        def learn(key: str) -> None:
            host, port = self._store.get(f"{prefix}listener/{key.rsplit('/', 1)[-1]}").decode().split()
            self._listeners.add((host, int(port)))

        return GuardedStore(self._store, prefix, lambda: self._check_frozen(generation), self.timeout, learn)

    def _meet(self, generation: int, members: Mapping[int, Address], timeout: float) -> None:
        """Return when every member has begun this edit."""
        store = GuardedStore(
            self._store, f"{self._run_id}/{generation}/meet/", lambda: self._check_frozen(generation), timeout
        )
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
                    raise PeerLost(rank, "gone before the edit was complete")
            if time.monotonic() > deadline:
                raise CommTimeout(timeout, tuple(missing))

    def _drop_inner(self) -> None:
        with self._lock:
            gone = list(self._inner.values())
            self._inner.clear()
        self._shut_sockets()
        self._listeners.clear()
        _bury(gone)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._drop_inner()
        for group in list(self._groups.values()):
            registry.unregister(group)
        self._groups.clear()
        self._liveness.close()


def _at(address: Address, key: str) -> Endpoint:
    host, port = cast("list[Any]", address.endpoint[key])
    return (str(host), int(port))


def _bury(groups: list[_Built]) -> None:
    """Destroy gloo groups aside: a destructor waits for works that may take until they fail."""

    def destroy() -> None:
        while groups:
            groups.pop().inner = None  # the store last: gloo's threads may still ask it

    if groups:
        threading.Thread(target=destroy, name="elastic-bury", daemon=True).start()


def _spread(flat: torch.Tensor, blocks: Sequence[BlockRange], collective: Callable[[torch.Tensor], object]) -> None:
    """Run ``collective`` on the ranges, as one tensor, in place where they cover ``flat`` without gaps."""
    ordered = sorted((block.start, block.stop) for block in blocks)
    whole = ordered[0][0], ordered[-1][1]
    gapless = all(a[1] == b[0] for a, b in itertools.pairwise(ordered))
    if gapless and flat.is_contiguous():
        collective(flat[whole[0] : whole[1]])
        return
    pieces = [flat[start:stop] for start, stop in ordered]
    packed = torch.cat(pieces)
    collective(packed)
    for piece, part in zip(pieces, packed.split([stop - start for start, stop in ordered]), strict=True):
        piece.copy_(part)
