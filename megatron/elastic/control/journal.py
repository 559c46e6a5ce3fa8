"""A totally ordered list of events that all agents share, kept in the store.

Position n is the key ``journal/n``. Appending is a compare-and-set on the first
free position: whoever is beaten there reads what came first and decides anew.
That makes the order of a loss and a decision a fact (docs/design.md §4), not a race:
:meth:`Journal.append_next` appends only at a position the caller has seen
everything before.

The entries are a chain: each one carries a hash of those before it (:class:`Mark`), so that an order can only be
continued by an agent that has read it. An entry that is signed and yet continues something else means that entries were
removed, replaced or put back: :class:`JournalForged` ends the reader, which has read another past than the store holds.

What everybody has read may be dropped (:func:`trim`) once a :class:`Snapshot` of the state
it led to is kept: whoever comes later starts from that. A reader that did not run while
entries it had yet to read were dropped finds :class:`Trimmed`, and starts from there too.
``journal/floor`` says below which position nothing may be read or written any more; it
grows before anything is deleted.

Values are signed for their position (:mod:`signer`). Whatever does not verify or parse is, for every reader alike,
nothing: its position passes with None for an event, and is counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.elastic.control.events import Event, from_json, to_json
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.control.wire import Message, ProtocolError, parse, take_int, take_object, take_str

__all__ = ["BEGIN", "Journal", "JournalForged", "Mark", "Signer", "Snapshot", "Trimmed", "keep", "newest", "trim"]

_SNAPSHOT, _FLOOR = "journal/snapshot", "journal/floor"


class Trimmed(Exception):
    """Entries that this reader has not read are gone: the others went on without it."""


class JournalForged(StoreLost):
    """The store holds another past than the one that was read: nothing in it can be relied on."""


@dataclass(frozen=True)
class Mark:
    """How far one has read."""

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
    """What the entries before ``mark`` lead to."""

    mark: Mark
    content: Message


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
        while True:
            mine = self._signed(event)
            found = self._store.create(_place(self.position), mine)
            if found == mine and self._withdrawn(self.position):
                raise Trimmed
            yield self._advance(found)
            if found == mine:
                return

    def append_next(self, event: Event) -> bool:
        """Append ``event`` at exactly the next position, ``mark.position``; False when something else is there."""
        mine = self._signed(event)
        return self._store.create(_place(self.position), mine) == mine and not self._withdrawn(self.position)

    def follow(self, timeout: float) -> Iterator[tuple[int, Event | None]]:
        """The next entry, waited for up to ``timeout`` seconds (blocking, no polling). Raises :class:`Trimmed`."""
        value = self._store.wait(_place(self.position), timeout)
        if value is not None:
            yield self._advance(value)
        elif self._trimmed(self.position):
            raise Trimmed

    def _signed(self, event: Event) -> bytes:
        text = json.dumps({"after": self.mark.chain, "event": to_json(event)}, separators=(",", ":"))
        return self._signer.sign(_place(self.position), text)

    def _withdrawn(self, position: int) -> bool:
        """Whether what was just written at ``position`` is below the floor, where it was free only for having gone."""
        if not self._trimmed(position):
            return False
        self._store.delete(_place(position))
        return True

    def _trimmed(self, position: int) -> bool:
        self._floor = max(self._floor, _floors(self._signer, self._store.get(_FLOOR))[0])
        return position < self._floor

    def _advance(self, value: bytes) -> tuple[int, Event | None]:
        """Take the entry at ``mark``. Raises :class:`JournalForged`."""
        position = self.position
        try:
            event, after = self._parsed(value)
        except ProtocolError:
            self.dropped += 1
            self.mark = self.mark.after(None)
            return position, None
        if after != self.mark.chain:
            raise JournalForged(f"entry {position} of the journal continues another past than the one read here")
        self.mark = self.mark.after(value)
        return position, event

    def _parsed(self, value: bytes) -> tuple[Event, str]:
        text = self._signer.open(_place(self.position), value)
        if text is None:
            raise ProtocolError("not signed with this job's secret")
        body = parse(text)
        return from_json(take_object(body, "event")), take_str(body, "after")


def _place(position: int) -> str:
    return f"journal/{position}"


def _chained(chain: str, value: bytes) -> str:
    return hashlib.sha256(chain.encode() + b"\0" + value).hexdigest()[:32]


def keep(store: Store, signer: Signer, snapshot: Snapshot) -> bool:
    """Put ``snapshot`` where :func:`newest` finds it, in the place of an older one; False if there is a newer one.

    Whoever coordinates calls it. One that was stopped, at any point, and comes late finds what its successor has kept.
    """
    mark = snapshot.mark
    body = {"position": mark.position, "chain": mark.chain, "content": snapshot.content}
    text = json.dumps(body, separators=(",", ":"))
    while True:
        value = store.get(_SNAPSHOT)
        if value is not None and _opened(signer, value).mark.position >= mark.position:
            return False
        if store.replace(_SNAPSHOT, value, signer.sign(_SNAPSHOT, text)):
            return True


def newest(store: Store, signer: Signer) -> Snapshot | None:
    """The snapshot to start from; None where nothing was dropped yet. Raises :class:`ProtocolError`."""
    value = store.get(_SNAPSHOT)
    return None if value is None else _opened(signer, value)


def _opened(signer: Signer, value: bytes) -> Snapshot:
    text = signer.open(_SNAPSHOT, value)
    if text is None:
        raise ProtocolError("the journal's snapshot is not signed with this job's secret")
    body = parse(text)
    return Snapshot(Mark(take_int(body, "position"), take_str(body, "chain")), take_object(body, "content"))


def trim(store: Store, signer: Signer, floor: int) -> int:
    """Drop the entries below ``floor``, which a kept snapshot covers; how many.

    Cut short at any point, it leaves entries that the next call drops. The floor only grows: a caller that was stopped
    while another one raised it deletes at most what is below that floor already.
    """
    value = store.get(_FLOOR)
    present, deleted = _floors(signer, value)
    if floor <= present:
        return 0
    raised = signer.sign(_FLOOR, f"{floor} {deleted}")
    if not store.replace(_FLOOR, value, raised):
        return 0
    for position in range(deleted, floor):
        store.delete(_place(position))
    store.replace(_FLOOR, raised, signer.sign(_FLOOR, f"{floor} {floor}"))
    return floor - deleted


def _floors(signer: Signer, value: bytes | None) -> tuple[int, int]:
    """Position below which nothing counts, and below which everything is deleted."""
    text = None if value is None else signer.open(_FLOOR, value)
    if text is None:
        return 0, 0
    floor, deleted = text.split()
    return int(floor), int(deleted)
