"""Messages between ranks beside tensors: values of declared types, as MessagePack; nothing is ever unpickled.

A type is a dataclass, or a container or union of plain ones; its annotations say what is accepted. Anything else
that a peer sends raises :class:`BadMessage` with its rank, and runs no code of the peer's choosing.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import BadMessage
from megatron.elastic.comm.fabric import Fabric

__all__ = ["LONGEST", "decode", "encode", "receive", "send"]

T = TypeVar("T")

LONGEST = 1 << 30
"""The most bytes that a receiver allocates for one message."""


def encode(value: object) -> bytes:
    """``value`` as bytes. Raises ``TypeError`` where it has no such form, ``OverflowError`` beyond 64-bit integers."""
    return msgspec.msgpack.encode(value)


def decode(kind: Any, data: bytes, rank: int) -> Any:
    """Inverse of :func:`encode` for a value of type ``kind`` from ``rank``. Raises :class:`BadMessage`."""
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(rank, f"not a {getattr(kind, '__name__', kind)}: {error}") from None


def send(fabric: Fabric, to: int, value: object) -> None:
    """Send ``value`` to rank ``to``, which calls :func:`receive`."""
    data = encode(value)
    dist.send(torch.tensor([len(data)], dtype=torch.int64), dst=to, group=fabric.world)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst=to, group=fabric.world)


def receive(fabric: Fabric, source: int, kind: type[T]) -> T:
    """A value of type ``kind`` from rank ``source``. Raises :class:`BadMessage`."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, src=source, group=fabric.world)
    size = int(length)
    if not 0 < size <= LONGEST:
        raise BadMessage(source, f"a message of {size} bytes announced; the limit is {LONGEST}")
    data = torch.empty(size, dtype=torch.uint8)
    dist.recv(data, src=source, group=fabric.world)
    found: T = decode(kind, data.numpy().tobytes(), source)
    return found


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)
