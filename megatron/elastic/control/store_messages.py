"""The messages between the embedded store and its clients: one request, one reply.

Requests are MessagePack arrays with a number for their kind; anything else raises
:class:`ProtocolError`, and the receiver drops the connection.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from megatron.elastic.control.wire import ProtocolError

__all__ = [
    "Create",
    "Delete",
    "Get",
    "GetMany",
    "Put",
    "Replace",
    "Reply",
    "Request",
    "Wait",
    "decode_reply",
    "decode_request",
    "encode",
]

Key = Annotated[str, msgspec.Meta(max_length=1024)]
LONGEST_WAIT = 3600.0


class Put(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Set; answered by None."""

    key: Key
    value: bytes


class Get(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answered by the value or None."""

    key: Key


class GetMany(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Answered by a list of values or None."""

    keys: Annotated[list[Key], msgspec.Meta(max_length=1 << 16)]


class Create(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Answered by the value there is then."""

    key: Key
    value: bytes


class Replace(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Answered by whether the key holds ``new`` then."""

    key: Key
    old: bytes | None
    new: bytes


class Wait(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Answered by the value as soon as there is one, by None after ``seconds``.

    With ``then`` the value is answered in a list, before those of these keys that exist then.
    """

    key: Key
    seconds: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT)]
    then: Annotated[list[Key], msgspec.Meta(max_length=1 << 16)] = []


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Answered by None."""

    key: Key


Request = Put | Get | GetMany | Create | Replace | Wait | Delete
Reply = bytes | bool | list[bytes | None] | None

_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The body of one frame."""
    return msgspec.msgpack.encode(message)


def decode_request(body: bytes) -> Request:
    """A request, or :class:`ProtocolError`."""
    try:
        return _REQUESTS.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a request: {error}") from None


def decode_reply(body: bytes) -> Reply:
    """A reply, or :class:`ProtocolError`."""
    try:
        return _REPLIES.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a reply: {error}") from None
