"""Messages over a stream socket: four bytes of length, then one JSON object.

Used between an agent and its workers, and between agents. A frame that is too
long or no JSON object raises :class:`ProtocolError`: the reader of the stream
drops the connection, never itself. What travels as a value is turned into and
out of JSON here, with every field checked.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from megatron.elastic.comm.fabric import Address
from megatron.elastic.control.membership import Decision, Ending, Loss

__all__ = [
    "FrameReader",
    "Message",
    "ProtocolError",
    "address_from_json",
    "address_to_json",
    "decision_from_json",
    "decision_to_json",
    "encode",
    "loss_from_json",
    "loss_to_json",
]

Message = dict[str, Any]
MAX_FRAME = 1 << 28
_LENGTH = struct.Struct(">I")
_DIGITS = 20
"""Of an integer of 64 bits, with its sign."""
_RANKS = 1 << 31


class ProtocolError(ValueError):
    """Bytes that are not a message of ours."""


def encode(message: Mapping[str, Any]) -> bytes:
    """One frame. The same mapping gives the same bytes in every process."""
    body = json.dumps(message, separators=(",", ":"), sort_keys=True).encode()
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"message of {len(body)} bytes; the limit is {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Turns received bytes into messages, whatever the chunks."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self._max = max_frame

    def feed(self, data: bytes) -> Iterator[Message]:
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
            yield parse(body)


def parse(body: bytes | str) -> Message:
    """A JSON object, or :class:`ProtocolError`. Its numbers are finite, and its integers fit 64 bits."""
    try:
        value = json.loads(body, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError("not a JSON object")
    return value


def _integer(text: str) -> int:
    if len(text) > _DIGITS or not -(1 << 63) <= (number := int(text)) < 1 << 63:
        raise ValueError(f"{text:.40} does not fit 64 bits")
    return number


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.40} is no number")
    return number


def take_int(value: Mapping[str, Any], key: str) -> int:
    """An integer field, or :class:`ProtocolError`."""
    found = value.get(key)
    if not isinstance(found, int) or isinstance(found, bool):
        raise ProtocolError(f"field {key!r} is not an integer")
    return found


def take_str(value: Mapping[str, Any], key: str) -> str:
    """A text field, or :class:`ProtocolError`."""
    found = value.get(key)
    if not isinstance(found, str):
        raise ProtocolError(f"field {key!r} is not text")
    return found


def take_list(value: Mapping[str, Any], key: str) -> list[Any]:
    """A list field, or :class:`ProtocolError`."""
    found = value.get(key)
    if not isinstance(found, list):
        raise ProtocolError(f"field {key!r} is not a list")
    return found


def take_object(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object field, or :class:`ProtocolError`."""
    found = value.get(key)
    if not isinstance(found, dict):
        raise ProtocolError(f"field {key!r} is not an object")
    return found


def as_object(value: Any) -> dict[str, Any]:
    """``value`` if it is a JSON object, or :class:`ProtocolError`."""
    if not isinstance(value, dict):
        raise ProtocolError("an object was expected")
    return value


def as_rank(value: Any) -> int:
    """``value`` as a rank; JSON turns integer keys into text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _DIGITS:
        value = int(value)
    if type(value) is not int or not 0 <= value < _RANKS:
        raise ProtocolError("a rank was expected")
    return value


def address_to_json(address: Address) -> Message:
    """JSON form of an address."""
    return {
        "rank": address.rank,
        "incarnation": address.incarnation,
        "host": address.host,
        "endpoint": dict(address.endpoint),
        "domain": address.domain,
    }


def address_from_json(value: Mapping[str, Any]) -> Address:
    """Inverse of :func:`address_to_json`."""
    return Address(
        take_int(value, "rank"), take_int(value, "incarnation"), take_str(value, "host"),
        take_object(value, "endpoint"), take_str(value, "domain"),
    )  # fmt: skip


def loss_to_json(loss: Loss) -> Message:
    """JSON form of a loss."""
    return {
        "rank": loss.rank,
        "incarnation": loss.incarnation,
        "host": loss.host,
        "cause": loss.cause,
        "last_lines": list(loss.last_lines),
        "ending": loss.ending,
    }


def loss_from_json(value: Mapping[str, Any]) -> Loss:
    """Inverse of :func:`loss_to_json`."""
    ending = take_str(value, "ending")
    if ending not in get_args(Ending):
        raise ProtocolError(f"unknown ending {ending!r}")
    return Loss(
        take_int(value, "rank"),
        take_int(value, "incarnation"),
        take_str(value, "host"),
        take_str(value, "cause"),
        tuple(str(line) for line in take_list(value, "last_lines")),
        ending,  # type: ignore[arg-type]
    )


def decision_to_json(decision: Decision) -> Message:
    """JSON form of a decision."""
    return {
        "generation": decision.generation,
        "members": [address_to_json(address) for address in decision.members.values()],
        "reason": decision.reason,
        "lost": [loss_to_json(loss) for loss in decision.lost],
        "joined": list(decision.joined),
        "reports": {str(rank): report for rank, report in decision.reports.items()},
        "left_out": list(decision.left_out),
        "returning": list(decision.returning),
    }


def decision_from_json(value: Mapping[str, Any]) -> Decision:
    """Inverse of :func:`decision_to_json`; members and reports in ascending rank order."""
    addresses = [address_from_json(as_object(item)) for item in take_list(value, "members")]
    reports = {as_rank(rank): str(text) for rank, text in take_object(value, "reports").items()}
    reason = take_str(value, "reason")
    if reason not in ("start", "loss", "join", "drain", "reform"):
        raise ProtocolError(f"unknown reason {reason!r}")
    return Decision(
        generation=take_int(value, "generation"),
        members={address.rank: address for address in sorted(addresses, key=lambda a: a.rank)},
        reason=reason,  # type: ignore[arg-type]
        lost=tuple(loss_from_json(as_object(item)) for item in take_list(value, "lost")),
        joined=tuple(as_rank(item) for item in take_list(value, "joined")),
        reports=dict(sorted(reports.items())),
        left_out=tuple(as_rank(node) for node in take_list(value, "left_out")),
        returning=tuple(as_rank(rank) for rank in take_list(value, "returning")),
    )
