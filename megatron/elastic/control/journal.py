"""A totally ordered list of events that all agents share, kept in the store.

Position n is the key ``journal/n``. Appending is a compare-and-set on the first
free position: an agent that is beaten there reads what came first and decides anew.
That makes the order of a loss and a decision a fact (docs/design.md §4), not a race:
:meth:`Journal.append_next` appends only at a position the caller has seen
everything before.

The entries are a chain: each one carries a hash of those before it (:class:`Mark`), so that an order can only be
continued by an agent that has read it. An entry that is signed and yet continues something else means that entries were
removed, replaced or put back: :class:`JournalForged` ends the reader, which has read another past than the store holds.

Entries that every agent has read may be dropped (:func:`trim`) once a :class:`Snapshot` of the state
that they lead to is kept: an agent that comes later starts from that. A reader that did not run while
entries it had yet to read were dropped finds :class:`Trimmed`, and starts from there too.
``journal/floor`` says below which position nothing may be read or written any more; it
grows before anything is deleted.

Values are signed for their position (:mod:`signer`). Whatever does not verify or parse is, for every reader alike,
nothing: its position passes with None for an event, and is counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import msgspec

from megatron.elastic.control.events import Event
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.store import Store, StoreLost, leading
from megatron.elastic.control.wire import Codec, ProtocolError, encode

__all__ = ["BEGIN", "Journal", "JournalForged", "Mark", "Signer", "Snapshot", "Trimmed", "keep", "newest", "trim"]

_SNAPSHOT, _FLOOR = "journal/snapshot", "journal/floor"
_AT_ONCE = 32
"""Entries that are read with one request: after a loss the agent of each node appends one, and each reads them all."""


class Trimmed(Exception):
    """Entries that this reader has not read are gone: the others went on without it."""


class JournalForged(StoreLost):
    """The store holds another past than the one that was read: nothing in it can be relied on."""


@dataclass(frozen=True)
class Mark:
    """The entries that a reader has read."""

    position: int
    """The first entry that was not read."""
    chain: str
    """Hash over all entries before it that counted, in their order."""

    def after(self, value: bytes | None) -> Mark:
        """The mark behind the next entry; None: one that does not count."""
        return Mark(self.position + 1, self.chain if value is None else _chained(self.chain, value))


BEGIN = Mark(0, "")


@dataclass(frozen=True)
class Snapshot:
    """The state that the entries before ``mark`` lead to."""

    mark: Mark
    content: bytes
    """JSON; opaque here."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One entry, as it is signed."""

    after: str
    """The hash over the entries before it."""
    event: Event


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    """A snapshot, as it is signed."""

    position: int
    chain: str
    content: msgspec.Raw


class _Floor(msgspec.Struct, forbid_unknown_fields=True):
    """``floor``: the position below which nothing counts; ``deleted``: below which everything is deleted."""

    floor: int = 0
    deleted: int = 0


_ENTRY: Codec[_Entry] = Codec(_Entry)
_KEPT: Codec[_Kept] = Codec(_Kept)
_FLOORS: Codec[_Floor] = Codec(_Floor)


class Journal:
    """One agent's view: ``mark`` is how far it has read.

    Not for several threads: each uses its own view over its own store connection.
    """

    def __init__(self, store: Store, signer: Signer, mark: Mark = BEGIN) -> None:
        self._store = store
        self._signer = signer
        self.mark = mark
        self.dropped = 0
        self._floor = 0
        """The highest seen: one that was put back lower does not count."""

    @property
    def position(self) -> int:
        """The first entry it has not seen."""
        return self.mark.position

    def append(self, event: Event) -> Iterator[tuple[int, Event | None]]:
        """Append ``event`` after everything there is; yields it and all that came before it, in order.

        Raises :class:`Trimmed`; the event is not in the journal then.
        """
        for attempt in count():
            mine = self._signed(event)
            found = self._store.create(_place(self.position), mine)
            if found == mine and self._withdrawn(self.position):
                raise Trimmed
            yield self._advance(found)
            if found == mine:
                return
            if attempt:  # others append too: one request for all that they have
                yield from self._read_on()

    def append_next(self, event: Event) -> bool:
        """Append ``event`` at exactly the next position, ``mark.position``; False when something else is there."""
        mine = self._signed(event)
        return self._store.create(_place(self.position), mine) == mine and not self._withdrawn(self.position)

    def follow(self, timeout: float) -> Iterator[tuple[int, Event | None]]:
        """The next entries, the first waited for up to ``timeout`` seconds (blocking, no polling).

        Raises :class:`Trimmed`.
        """
        values = self._store.wait_many(self._next_places(), timeout)
        if not values and self._trimmed(self.position):
            raise Trimmed
        for value in values:
            yield self._advance(value)

    def _read_on(self) -> Iterator[tuple[int, Event | None]]:
        """The entries that are there already."""
        values = [b""] * _AT_ONCE
        while len(values) == _AT_ONCE:
            values = leading(self._store.get_many(self._next_places()).values())
            for value in values:
                yield self._advance(value)

    def _next_places(self) -> list[str]:
        return [_place(self.position + number) for number in range(_AT_ONCE)]

    def _signed(self, event: Event) -> bytes:
        return self._signer.sign(_place(self.position), encode(_Entry(self.mark.chain, event)))

    def _withdrawn(self, position: int) -> bool:
        """True if the entry just written at ``position`` is below the floor; it is deleted then."""
        if not self._trimmed(position):
            return False
        self._store.delete(_place(position))
        return True

    def _trimmed(self, position: int) -> bool:
        self._floor = max(self._floor, _floors(self._signer, self._store.get(_FLOOR)).floor)
        return position < self._floor

    def _advance(self, value: bytes) -> tuple[int, Event | None]:
        """Take the entry at ``mark``. Raises :class:`JournalForged`."""
        position = self.position
        try:
            entry = self._parsed(value)
        except ProtocolError:
            self.dropped += 1
            self.mark = self.mark.after(None)
            return position, None
        if entry.after != self.mark.chain:
            raise JournalForged(f"entry {position} of the journal does not follow the entry before it")
        self.mark = self.mark.after(value)
        return position, entry.event

    def _parsed(self, value: bytes) -> _Entry:
        content = self._signer.open(_place(self.position), value)
        if content is None:
            raise ProtocolError("not signed with this job's secret")
        return _ENTRY.decode(content)


def _place(position: int) -> str:
    return f"journal/{position}"


def _chained(chain: str, value: bytes) -> str:
    return hashlib.sha256(chain.encode() + b"\0" + value).hexdigest()[:32]


def keep(store: Store, signer: Signer, snapshot: Snapshot) -> bool:
    """Put ``snapshot`` where :func:`newest` finds it, in the place of an older one; False if there is a newer one.

    The coordinator calls it. One that was stopped, at any point, and comes late finds what its successor has kept.
    """
    mark = snapshot.mark
    body = encode(_Kept(mark.position, mark.chain, msgspec.Raw(snapshot.content)))
    while True:
        value = store.get(_SNAPSHOT)
        if value is not None and _opened(signer, value).mark.position >= mark.position:
            return False
        if store.replace(_SNAPSHOT, value, signer.sign(_SNAPSHOT, body)):
            return True


def newest(store: Store, signer: Signer) -> Snapshot | None:
    """The snapshot to start from; None where nothing was dropped yet. Raises :class:`ProtocolError`."""
    value = store.get(_SNAPSHOT)
    return None if value is None else _opened(signer, value)


def _opened(signer: Signer, value: bytes) -> Snapshot:
    body = signer.open(_SNAPSHOT, value)
    if body is None:
        raise ProtocolError("the journal's snapshot is not signed with this job's secret")
    kept = _KEPT.decode(body)
    return Snapshot(Mark(kept.position, kept.chain), bytes(kept.content))


def trim(store: Store, signer: Signer, floor: int) -> int:
    """Drop the entries below ``floor``, which a kept snapshot covers; how many.

    Cut short at any point, it leaves entries that the next call drops. The floor only grows: a caller that was stopped
    while another one raised it deletes at most what is below that floor already.
    """
    value = store.get(_FLOOR)
    present = _floors(signer, value)
    if floor <= present.floor:
        return 0
    raised = signer.sign(_FLOOR, encode(_Floor(floor, present.deleted)))
    if not store.replace(_FLOOR, value, raised):
        return 0
    for position in range(present.deleted, floor):
        store.delete(_place(position))
    store.replace(_FLOOR, raised, signer.sign(_FLOOR, encode(_Floor(floor, floor))))
    return floor - present.deleted


def _floors(signer: Signer, value: bytes | None) -> _Floor:
    """The floor that ``value`` holds; nothing is dropped yet where it holds none."""
    body = None if value is None else signer.open(_FLOOR, value)
    return _Floor() if body is None else _FLOORS.decode(body)
