"""Exchange of one message of every living rank with all: one collective where they are short.

``torch.distributed.all_gather_object`` takes two, the first for lengths, and ranks that share cores wait for one
another in each. Here the first carries lengths and what fits beside them; a second one is for what does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import BadMessage
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.messages import LONGEST, decode, encode

__all__ = ["gather_messages"]

_LENGTH_BYTES = 8
_BESIDE_LENGTH, _IN_ALL = 16 << 10, 1 << 20
"""Bytes that the first collective carries: of one rank, and of all together."""


def gather_messages(fabric: Fabric, kind: Any, mine: Any) -> dict[int, Any]:
    """``mine``, a value of type ``kind``, of every living rank, by rank. Collective.

    Raises :class:`BadMessage` naming a rank that sent anything else.
    """
    text = encode(mine)
    room = min(_BESIDE_LENGTH, _IN_ALL // fabric.slots)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text[:room].ljust(room, b"\0")
    heads = _gathered(fabric, head)
    lengths = {rank: int.from_bytes(head[:_LENGTH_BYTES], "little") for rank, head in heads.items()}
    for rank, length in lengths.items():
        if length > LONGEST:
            raise BadMessage(rank, f"a message of {length} bytes announced; the limit is {LONGEST}")
    longest, rests = max(lengths.values()) - room, dict.fromkeys(heads, b"")
    if longest > 0:
        rests = _gathered(fabric, text[room:].ljust(longest, b"\0"))
    texts = {rank: (head[_LENGTH_BYTES:] + rests[rank])[: lengths[rank]] for rank, head in heads.items()}
    return {rank: decode(kind, text, rank) for rank, text in texts.items()}


def _gathered(fabric: Fabric, mine: bytes) -> dict[int, bytes]:
    """Of all living ranks, each as long as ``mine``."""
    into: Sequence[torch.Tensor] = torch.zeros((fabric.slots, len(mine)), dtype=torch.uint8).unbind()
    dist.all_gather(list(into), torch.frombuffer(bytearray(mine), dtype=torch.uint8), group=fabric.world)
    return {rank: into[rank].numpy().tobytes() for rank in fabric.alive}
