"""Signatures of the values in the store, under the job's secret.

A value is worth something only under the key that it was signed for and in the run that it was signed in; once the
agents have met, in this very launch of the run. So nothing that was recorded, of another key, another job, or an
earlier launch under the same name, is taken for a value of this one. An older value of the same key verifies: whatever
may be replaced carries a number that must grow, and the journal is a chain.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import zlib
from dataclasses import dataclass, field

from megatron.elastic.control.channel import Credentials

__all__ = ["Signer"]

_LONG, _LEVEL = 1 << 10, 1
"""Contents with more bytes are compressed, at this level: reports of one node's ranks are much alike, and all agents
read those of all."""
_SMALLER = b"~"
"""Begins a body with compressed content; no digit of base 64."""


@dataclass(frozen=True)
class Signer:
    """Signs and verifies values of one run. ``launch``: tells it from an earlier launch of the same name."""

    credentials: Credentials
    launch: str = ""
    _key: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_key", self.credentials.key(f"values {self.launch}"))

    def of_launch(self, launch: str) -> Signer:
        """The same for values that are signed once the agents have met."""
        return Signer(self.credentials, launch)

    def sign(self, place: str, content: bytes) -> bytes:
        """``content`` for ``place`` (a key), ASCII."""
        if len(content) > _LONG:
            body = _SMALLER + base64.b64encode(zlib.compress(content, _LEVEL))
        else:
            body = base64.b64encode(content)
        return self._tag(place, body) + b" " + body

    def open(self, place: str, value: bytes) -> bytes | None:
        """The content if ``value`` was signed for ``place``; otherwise None."""
        tag, _, body = value.partition(b" ")
        if not hmac.compare_digest(tag, self._tag(place, body)):
            return None
        try:
            content = base64.b64decode(body.removeprefix(_SMALLER), validate=True)
            return zlib.decompress(content) if body.startswith(_SMALLER) else content
        except (ValueError, zlib.error):
            return None

    def _tag(self, place: str, body: bytes) -> bytes:
        message = place.encode() + b"\0" + body
        return hmac.new(self._key, message, hashlib.sha256).hexdigest().encode()
