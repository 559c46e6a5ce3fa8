"""Exchange of one message of every living rank with all: one collective where they are short.

``torch.distributed.all_gather_object`` takes two, the first for lengths, and ranks that share cores wait for one
another in each. Here the first carries lengths and what fits beside them; a second one is for what does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import BadMessage
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.messages import LONGEST, decode, encode

__all__ = ["Exchange", "begin_exchange", "gather_messages"]

_LENGTH_BYTES = 8
_BESIDE_LENGTH, _IN_ALL = 16 << 10, 1 << 20
"""Bytes that the first collective carries: of one rank, and of all together."""


def gather_messages(fabric: Fabric, kind: Any, mine: Any) -> dict[int, Any]:
    """``mine``, a value of type ``kind``, of every living rank, by rank. Collective.

    Raises :class:`BadMessage` naming a rank that sent anything else.
    """
    return begin_exchange(fabric, kind, mine).complete()


def begin_exchange(fabric: Fabric, kind: Any, mine: Any) -> Exchange:
    """Begin :func:`gather_messages` and return at once. All ranks complete it in the same generation, at one place."""
    text = encode(mine)
    room = min(_BESIDE_LENGTH, _IN_ALL // fabric.slots)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text[:room].ljust(room, b"\0")
    return Exchange(fabric, kind, text[room:], room, _begun(fabric, head))


@dataclass(frozen=True)
class Exchange:
    """An exchange under way."""

    fabric: Fabric
    kind: Any
    rest: bytes
    """The part of this rank's message that the first collective has no room for."""
    room: int
    """Bytes of a message that it has room for."""
    heads: _Gather

    def complete(self) -> dict[int, Any]:
        """Wait for, and return, the messages (:func:`gather_messages`). Raises ``CommError``, :class:`BadMessage`."""
        heads = self.heads.complete(self.fabric)
        lengths = {rank: int.from_bytes(head[:_LENGTH_BYTES], "little") for rank, head in heads.items()}
        for rank, length in lengths.items():
            if length > LONGEST:
                raise BadMessage(rank, f"a message of {length} bytes announced; the limit is {LONGEST}")
        longest, rests = max(lengths.values()) - self.room, dict.fromkeys(heads, b"")
        if longest > 0:
            rests = _begun(self.fabric, self.rest.ljust(longest, b"\0")).complete(self.fabric)
        texts = {rank: (head[_LENGTH_BYTES:] + rests[rank])[: lengths[rank]] for rank, head in heads.items()}
        return {rank: decode(self.kind, text, rank) for rank, text in texts.items()}


@dataclass(frozen=True)
class _Gather:
    """A collective under way: ``into`` receives the bytes of each slot."""

    mine: torch.Tensor
    into: tuple[torch.Tensor, ...]
    work: dist.Work

    def complete(self, fabric: Fabric) -> dict[int, bytes]:
        """Wait for, and return, the bytes of all living ranks."""
        self.work.wait()
        return {rank: self.into[rank].numpy().tobytes() for rank in fabric.alive}


def _begun(fabric: Fabric, mine: bytes) -> _Gather:
    """Begin to gather as many bytes of each living rank as ``mine`` has."""
    into = torch.zeros((fabric.slots, len(mine)), dtype=torch.uint8).unbind()
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    work = dist.all_gather(list(into), own, group=fabric.world, async_op=True)
    assert work is not None, "every living rank is part of the world"
    return _Gather(own, into, work)
