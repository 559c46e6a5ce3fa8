"""Messages over a stream socket: four bytes of length, then one JSON value of a declared type.

Used between an agent and its workers, between an agent and its console, and for what agents keep in the store. A
message is a ``msgspec.Struct`` or a union of them; its annotations say what is accepted, and an unknown field is
refused. Everything else, a frame that is too long included, raises :class:`ProtocolError`. The receiver of such a
message drops the connection and goes on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Any, Generic, TypeVar

import msgspec

__all__ = ["MAX_FRAME", "Codec", "FrameReader", "Int64", "ProtocolError", "encode", "frame", "printable"]

T = TypeVar("T")

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An integer that every process can hold."""
MAX_FRAME = 1 << 28
_LENGTH = struct.Struct(">I")


class ProtocolError(ValueError):
    """Bytes that are not a message of the expected type."""


def encode(value: object) -> bytes:
    """``value`` as JSON: fields in the order of their declaration, mappings in their own order, without blanks.

    The same value gives the same bytes in every process. Raises :class:`ProtocolError` for text that is not Unicode
    (see :func:`printable`).
    """
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise ProtocolError(f"text that is not Unicode: {error}") from None


def printable(text: str) -> str:
    """``text`` as Unicode: bytes of a file name that are no UTF-8 become question marks."""
    return text.encode(errors="replace").decode()


class Codec(Generic[T]):
    """JSON form of values of one type: ``Codec[Event](Event)``."""

    def __init__(self, kind: Any) -> None:
        self._name = getattr(kind, "__name__", None) or str(kind)
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)

    def decode(self, data: bytes | str) -> T:
        """Inverse of :func:`encode`. Raises :class:`ProtocolError` for anything but JSON of this type."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"not a message of this protocol ({self._name:.60}): {error}") from None


def frame(message: object) -> bytes:
    """``message`` as it travels on a stream. Raises :class:`ProtocolError` where it is too long."""
    body = encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"message of {len(body)} bytes; the limit is {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[T]):
    """Turns received bytes into messages, whatever the chunks."""

    def __init__(self, codec: Codec[T], max_frame: int = MAX_FRAME) -> None:
        self._codec = codec
        self._buffer = bytearray()
        self._max = max_frame

    def feed(self, data: bytes) -> Iterator[T]:
        """Messages completed by ``data``. Raises :class:`ProtocolError`; the stream is unusable then."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max:
                raise ProtocolError(f"frame of {length} bytes announced; the limit is {self._max}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield self._codec.decode(body)
