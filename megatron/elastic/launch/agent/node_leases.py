"""Leases of agents in the store: each agent renews its own and reads others'.

- *Renewing.* A lease carries the table of what the agent's workers do. As soon as the
  store acknowledges a renewal, the workers may act for ``timing.fence`` longer; reading
  the others' leases is another thread's work and delays nothing. The renewal begins on
  the agent's loop: an agent that does not run does not renew.
- *Watching.* The agents of the first few nodes read all leases, the others read theirs
  (:meth:`AgentPlace.watched`), with one request. A node is lost when its lease did not change
  for ``timing.lease``, or for ``timing.broken`` while the connection to its agent is
  broken (:mod:`presence`). The proof is the store's, not the observer's pace: only the
  time between two reads that found the same lease counts (:class:`Silence`), and the
  lease is read once more before the loss is told.

A lease is a sign of life of one agent only, the one registered for the node: it contains that agent's token and a
number that grows. So the lease of a second agent does not count, nor does an old value that is read again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from megatron.elastic.control.clock import boot_ns
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.control.suspicion import Idle
from megatron.elastic.control.wire import Codec, Int64, ProtocolError, encode
from megatron.elastic.launch.agent.agent_place import AgentPlace
from megatron.elastic.platform.threads import OS_THREADS, Threads

__all__ = ["NodeLeases", "Silence", "Table"]

Table = dict[int, tuple[int, Idle]]
"""Rank → its incarnation and its activity."""

Holder = tuple[int, str]
"""The life of a node (epoch) and the token of the agent that holds its place."""


@dataclass
class _Seen:
    holder: Holder
    number: int
    """Of the newest renewal that was read."""
    until: float
    """Up to this time the lease is known not to have changed."""
    silent: float = 0.0


class Silence:
    """For how long leases verifiably did not change in the store. Times are seconds of one clock.

    Between the end of a read and the beginning of a later one that finds the same lease, it
    was not renewed, however long either read took. Of the time between two reads at most
    ``cap`` seconds count: an observer that did not run for longer (its machine was suspended,
    its job stopped) proves nothing by its absence.
    """

    def __init__(self, cap: float) -> None:
        self._cap = cap
        self._seen: dict[int, _Seen] = {}

    def note(self, node: int, holder: Holder, number: int | None, began: float, ended: float) -> float:
        """Seconds for which the lease of ``holder`` did not change, after a read from ``began`` to ``ended``.

        ``number``: of the renewal that was found; None where there was none of this holder.
        """
        seen = self._seen.get(node)
        if seen is None or seen.holder != holder:
            self._seen[node] = _Seen(holder, -1 if number is None else number, ended)
            return 0.0
        if number is not None and number > seen.number:
            seen.number, seen.until, seen.silent = number, ended, 0.0
        else:
            seen.silent += max(0.0, min(began - seen.until, self._cap))
            seen.until = max(seen.until, began)
        return seen.silent


class _Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One renewal."""

    number: Int64
    """Grows with each renewal."""
    epoch: Int64
    agent: str
    now: float
    """Seconds of the job."""
    read: Int64
    """Entries of the journal that the agent has read."""
    table: Table


_LEASE: Codec[_Lease] = Codec(_Lease)


@dataclass(frozen=True)
class _Look:
    """The leases to read: the holder of each place, and since when the connections to agents are broken."""

    holders: Mapping[int, Holder]
    broken: Mapping[int, float]


T = TypeVar("T")


class _Inbox(Generic[T]):
    """Values for one thread, in their order."""

    def __init__(self, threads: Threads) -> None:
        self._arrived = threads.condition()
        self._values: deque[T] = deque()

    @property
    def empty(self) -> bool:
        return not self._values

    def put(self, value: T) -> None:
        with self._arrived:
            self._values.append(value)
            self._arrived.notify_all()

    def get(self) -> T:
        with self._arrived:
            while not self._values:
                self._arrived.wait()
            return self._values.popleft()


class NodeLeases:
    """See the module docstring. Callbacks run on the loop's thread.

    ``extend(until)``: the workers may act until then (ns, ``clock``); ``lost(node, epoch, why)``; ``heard(now)``:
    seconds of the job by another agent's clock; ``clock``: ns of the clock by which the workers' leases run out.
    """

    def __init__(
        self,
        place: AgentPlace,
        extend: Callable[[int], None],
        lost: Callable[[int, int, str], None],
        heard: Callable[[float], None],
        threads: Threads = OS_THREADS,
        clock: Callable[[], int] = boot_ns,
    ) -> None:
        self._place, self._loop, self._timing = place, place.loop, place.timing
        self._extend, self._lost, self._heard = extend, lost, heard
        self._threads, self._clock = threads, clock
        self._beats: _Inbox[tuple[int, bytes]] = _Inbox(threads)
        self._looks: _Inbox[_Look] = _Inbox(threads)
        self._silence = Silence(place.timing.grace + 2 * place.timing.beat)
        self._broken: dict[int, float] = {}
        self._count = 0
        self._started = False
        self.tables: dict[int, Table] = {}
        self.seen: dict[int, int] = {}
        """Node → entries of the journal that its agent has read, as of its newest renewal."""

    def start(self) -> None:
        """Begin, once this agent holds its place. Later calls change nothing."""
        if not self._started:
            self._started = True
            self._threads.start("lease", self._renew)
            self._threads.start("lease-watch", self._watch)

    def beat(self, table: Table, read: int, now: float) -> None:
        """Renew and look (from the loop, every ``timing.beat`` seconds).

        ``read``: entries of the journal; ``now``: seconds of the job.
        """
        self._count += 1
        if self._beats.empty:
            lease = _Lease(self._count, self._place.epoch, self._place.token, now, read, table)
            self._beats.put((self._clock(), encode(lease)))
        if self._looks.empty:
            holders = {number: (node.epoch, node.agent) for number, node in self._place.watched().items()}
            self._looks.put(_Look(holders, dict(self._broken)))

    def doubt(self, node: int) -> None:
        """The connection to the agent of ``node`` broke: if it does not renew its lease either, it is lost sooner."""
        self._broken.setdefault(node, self._seconds())

    def trust(self, node: int) -> None:
        """The connection stands again, or ``node`` has a new agent."""
        self._broken.pop(node, None)

    # -- the threads --------------------------------------------------------------

    def _renew(self) -> None:
        try:
            store, key = self._place.store.clone(), f"lease/{self._place.node}"
            while True:
                began, body = self._beats.get()
                store.put(key, self._place.signer.sign(key, body))
                until = self._until(began)
                self._loop.post(lambda u=until: self._extend(u))  # type: ignore[misc]
        except StoreLost:
            pass  # the journal's follower tells the loop

    def _until(self, began: int) -> int:
        """The time (ns) up to which workers may act after a renewal that ``began`` then: before the node is lost."""
        return began + int(self._timing.fence * 1e9)

    def _seconds(self) -> float:
        return self._clock() / 1e9

    def _watch(self) -> None:
        try:
            store = self._place.store.clone()
            while True:
                self._look(store, self._looks.get())
        except StoreLost:
            pass

    def _look(self, store: Store, look: _Look) -> None:
        began = self._seconds()
        values = store.get_many([f"lease/{node}" for node in look.holders])
        ended = self._seconds()
        found: dict[int, _Lease] = {}
        for node, holder in look.holders.items():
            lease = self._opened(node, holder, values.get(f"lease/{node}"))
            if lease is not None:
                found[node] = lease
            silent = self._silence.note(node, holder, None if lease is None else lease.number, began, ended)
            if self._allowed(look, node, began) < silent:
                self._tell_lost(store, node, holder, lease)
        self._loop.post(lambda: self._take(look, found))

    def _allowed(self, look: _Look, node: int, now: float) -> float:
        """Seconds without a renewal that do not make ``node`` lost."""
        broken = node in look.broken and now - look.broken[node] > self._timing.broken
        return self._timing.broken if broken else self._timing.lease

    def _tell_lost(self, store: Store, node: int, holder: Holder, known: _Lease | None) -> None:
        """Tell the loop, if the lease is still the same at this moment."""
        began = self._seconds()
        fresh = self._opened(node, holder, store.get(f"lease/{node}"))
        if fresh is not None and (known is None or fresh.number > known.number):
            self._silence.note(node, holder, fresh.number, began, self._seconds())
            return

        def report() -> None:
            # A loop that was kept from running takes the next look's word instead.
            if self._seconds() - began <= self._timing.grace + 2 * self._timing.beat:
                why = "node unreachable" + (" (its agent ended)" if node in self._broken else "")
                self._lost(node, holder[0], why)

        self._loop.post(report)

    def _opened(self, node: int, holder: Holder, value: bytes | None) -> _Lease | None:
        """The lease in ``value`` if it is one of ``holder``."""
        body = self._place.signer.open(f"lease/{node}", value) if value is not None else None
        try:
            lease = _LEASE.decode(body or b"")
        except ProtocolError:
            return None
        return lease if (lease.epoch, lease.agent) == holder else None

    def _take(self, look: _Look, found: Mapping[int, _Lease]) -> None:
        for node in self.tables.keys() - look.holders.keys():  # it is lost, or watched by others now
            del self.tables[node], self.seen[node]
        for node, lease in found.items():
            self.seen[node] = lease.read
            self._heard(lease.now)
            self.tables[node] = lease.table

    # -- the end ------------------------------------------------------------------

    def take_leave(self, seconds: float) -> None:
        """Leave a place that this agent holds: the one that serves the store last, since the others read there."""
        store = self._place.store
        if store.server:
            end = self._threads.monotonic() + seconds
            with suppress(ConnectionError):
                for number in self._place.others():
                    store.wait(f"bye/{number}", max(0.01, end - self._threads.monotonic()))
        elif store.embedded:
            # Apart: the way to the store may be cut.
            report = threading.Thread(target=self._tell_the_end, daemon=True)
            report.start()
            report.join(seconds)

    def _tell_the_end(self) -> None:
        with suppress(ConnectionError):
            self._place.store.put(f"bye/{self._place.node}", b"bye")
