"""A totally ordered list of events that all agents share, kept in the store.

Position n is the key ``journal/n``. Appending is a compare-and-set on the first
free position: whoever is beaten there reads what came first and decides anew.
That makes the order of a loss and a decision a fact (DESIGN §4), not a race:
:meth:`Journal.append_at` appends only at a position the caller has seen
everything before.

What everybody has read may be dropped (:func:`trim`) once a :class:`Snapshot` of the state
it led to is kept: whoever comes later starts from that. A reader that did not run while
entries it had yet to read were dropped finds :class:`Trimmed`, and starts from there too.
``journal/floor`` says below which position nothing may be read or written any more; it
grows before anything is deleted.

Values carry an HMAC under the job's secret, bound to their position. Whatever
does not verify or parse is, for every reader alike, nothing: its position passes
with None for an event, and is counted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.elastic.control.events import Event, from_json, to_json
from megatron.elastic.control.store import Store
from megatron.elastic.control.wire import Message, ProtocolError, parse, take_int, take_object

__all__ = ["Journal", "Seal", "Snapshot", "Trimmed", "keep", "newest", "trim"]

_SNAPSHOT, _FLOOR = "journal/snapshot", "journal/floor"


class Trimmed(Exception):
    """Entries that this reader has not read are gone: the others went on without it."""


@dataclass(frozen=True)
class Snapshot:
    """What the entries before ``position`` lead to."""

    position: int
    content: Message


class Seal:
    """Signs and verifies texts under one job's secret."""

    def __init__(self, secret: str) -> None:
        self._key = secret.encode()

    def sign(self, place: str, text: str) -> bytes:
        """``text`` for ``place`` (a key), ASCII."""
        body = base64.b64encode(text.encode())
        return self._tag(place, body) + b" " + body

    def open(self, place: str, value: bytes) -> str | None:
        """The text if ``value`` was signed for ``place``; otherwise None."""
        tag, _, body = value.partition(b" ")
        if not hmac.compare_digest(tag, self._tag(place, body)):
            return None
        try:
            return base64.b64decode(body, validate=True).decode()
        except ValueError:
            return None

    def _tag(self, place: str, body: bytes) -> bytes:
        message = place.encode() + b"\0" + body
        return hmac.new(self._key, message, hashlib.sha256).hexdigest().encode()


class Journal:
    """One agent's view: ``position`` is the first entry it has not seen.

    Not for several threads: each uses its own view over its own store connection.
    """

    def __init__(self, store: Store, seal: Seal, position: int = 0) -> None:
        self._store = store
        self._seal = seal
        self.position = position
        self.dropped = 0

    def append(self, event: Event) -> Iterator[tuple[int, Event | None]]:
        """Append ``event`` after everything there is; yields it and all that came before it, in order.

        Raises :class:`Trimmed`; the event is not in the journal then.
        """
        while True:
            place = self._place(self.position)
            mine = self._seal.sign(place, json.dumps(to_json(event), separators=(",", ":")))
            found = self._store.create(place, mine)
            if found == mine and self._withdrawn(self.position):
                raise Trimmed
            yield from self._advance(found)
            if found == mine:
                return

    def append_at(self, position: int, event: Event) -> bool:
        """Append ``event`` at exactly ``position``; False when something else is there."""
        place = self._place(position)
        mine = self._seal.sign(place, json.dumps(to_json(event), separators=(",", ":")))
        return self._store.create(place, mine) == mine and not self._withdrawn(position)

    def follow(self, timeout: float) -> Iterator[tuple[int, Event | None]]:
        """The next entry, waited for up to ``timeout`` seconds (blocking, no polling). Raises :class:`Trimmed`."""
        value = self._store.wait(self._place(self.position), timeout)
        if value is not None:
            yield from self._advance(value)
        elif self._trimmed(self.position):
            raise Trimmed

    def _withdrawn(self, position: int) -> bool:
        """Whether what was just written at ``position`` is below the floor, where it was free only for having gone."""
        if not self._trimmed(position):
            return False
        self._store.delete(self._place(position))
        return True

    def _trimmed(self, position: int) -> bool:
        return position < _floors(self._seal, self._store.get(_FLOOR))[0]

    def _advance(self, value: bytes) -> Iterator[tuple[int, Event | None]]:
        position = self.position
        self.position += 1
        text = self._seal.open(self._place(position), value)
        event: Event | None
        try:
            if text is None:
                raise ProtocolError("not signed with this job's secret")
            event = from_json(parse(text))
        except ProtocolError:
            self.dropped += 1
            event = None
        yield position, event

    @staticmethod
    def _place(position: int) -> str:
        return f"journal/{position}"


def keep(store: Store, seal: Seal, snapshot: Snapshot) -> bool:
    """Put ``snapshot`` where :func:`newest` finds it, in the place of an older one; False if there is a newer one.

    Whoever coordinates calls it. One that was stopped, at any point, and comes late finds what its successor has kept.
    """
    text = json.dumps({"position": snapshot.position, "content": snapshot.content}, separators=(",", ":"))
    while True:
        value = store.get(_SNAPSHOT)
        if value is not None and _opened(seal, value).position >= snapshot.position:
            return False
        if store.replace(_SNAPSHOT, value, seal.sign(_SNAPSHOT, text)):
            return True


def newest(store: Store, seal: Seal) -> Snapshot | None:
    """The snapshot to start from; None where nothing was dropped yet. Raises :class:`ProtocolError`."""
    value = store.get(_SNAPSHOT)
    return None if value is None else _opened(seal, value)


def _opened(seal: Seal, value: bytes) -> Snapshot:
    text = seal.open(_SNAPSHOT, value)
    if text is None:
        raise ProtocolError("the journal's snapshot is not signed with this job's secret")
    body = parse(text)
    return Snapshot(take_int(body, "position"), take_object(body, "content"))


def trim(store: Store, seal: Seal, floor: int) -> int:
    """Drop the entries below ``floor``, which a kept snapshot covers; how many.

    Cut short at any point, it leaves entries that the next call drops. The floor only grows: a caller that was stopped
    while another one raised it deletes at most what is below that floor already.
    """
    value = store.get(_FLOOR)
    present, deleted = _floors(seal, value)
    if floor <= present:
        return 0
    raised = seal.sign(_FLOOR, f"{floor} {deleted}")
    if not store.replace(_FLOOR, value, raised):
        return 0
    for position in range(deleted, floor):
        store.delete(f"journal/{position}")
    store.replace(_FLOOR, raised, seal.sign(_FLOOR, f"{floor} {floor}"))
    return floor - deleted


def _floors(seal: Seal, value: bytes | None) -> tuple[int, int]:
    """Position below which nothing counts, and below which everything is deleted."""
    text = None if value is None else seal.open(_FLOOR, value)
    if text is None:
        return 0, 0
    floor, deleted = text.split()
    return int(floor), int(deleted)
