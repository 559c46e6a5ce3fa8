"""A totally ordered list of events that all agents share, kept in the store.

Position n is the key ``journal/n``. Appending is a compare-and-set on the first
free position: whoever is beaten there reads what came first and decides anew.
That makes the order of a loss and a decision a fact (DESIGN §4), not a race:
:meth:`Journal.append_at` appends only at a position the caller has seen
everything before.

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

from megatron.elastic.control.events import Event, from_json, to_json
from megatron.elastic.control.store import Store
from megatron.elastic.control.wire import ProtocolError, parse

__all__ = ["Journal", "Seal"]


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
        """Append ``event`` after everything there is; yields it and all that came before it, in order."""
        while True:
            place = self._place(self.position)
            mine = self._seal.sign(place, json.dumps(to_json(event), separators=(",", ":")))
            found = self._store.create(place, mine)
            yield from self._advance(found)
            if found == mine:
                return

    def append_at(self, position: int, event: Event) -> bool:
        """Append ``event`` at exactly ``position``; False when something else is there."""
        place = self._place(position)
        mine = self._seal.sign(place, json.dumps(to_json(event), separators=(",", ":")))
        return self._store.create(place, mine) == mine

    def follow(self, timeout: float) -> Iterator[tuple[int, Event | None]]:
        """The next entry, waited for up to ``timeout`` seconds (blocking, no polling)."""
        value = self._store.wait(self._place(self.position), timeout)
        if value is not None:
            yield from self._advance(value)

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
