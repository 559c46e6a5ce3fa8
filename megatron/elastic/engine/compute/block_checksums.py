"""What an owner says of a block when it ships the reduced gradient, and what its mirror finds.

Sixteen bytes a block ride at the end of each message:

    mark      lineage of the copy and hash of the gradient. Equal marks: both copies were made
              alike and will be made alike by this step (``state.hashing``). Unequal: a bug, and
              the vote of this very step says so, before it is committed
    contents  of a share of the blocks, taking turns (``state.verify.due``), the hash of the state
              itself. Unequal with equal marks: memory has changed by itself

so that lineages are compared in every step, contents once in ``interval`` steps, and
nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.elastic.state.hashing import content_hash, text_hash
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import GradientKey
from megatron.elastic.state.verify import due

__all__ = ["CHECKSUM_SLOTS", "Disputes", "block_checksums", "disputes"]

CHECKSUM_SLOTS = 4
"""fp32 slots of a message that one block's seal takes."""
_NOT_DUE = bytes(8)


@dataclass
class Disputes:
    """Blocks on which this rank and their owner do not agree."""

    marks: tuple[BlockKey, ...] = ()
    """Made from other state or another gradient."""
    contents: tuple[BlockKey, ...] = ()
    """Made alike, and yet different."""

    def add(self, other: Disputes) -> None:
        """Extend by what another message showed."""
        self.marks += other.marks
        self.contents += other.contents


def block_checksums(pool: StatePool, keys: Sequence[BlockKey], gradient: GradientKey, interval: int) -> torch.Tensor:
    """fp32 ``[CHECKSUM_SLOTS · blocks]`` (bits, not numbers) over this rank's copies, which retain ``gradient``."""
    words = bytearray()
    for key in keys:
        copy = pool.get(key)
        words += _short(text_hash(f"{copy.lineage}|{copy.gradient_hash(gradient)}"))
        looked_at = due(key, copy.version, interval)
        words += _short(content_hash(key, copy.state)) if looked_at else _NOT_DUE
    return torch.frombuffer(words, dtype=torch.float32) if words else torch.empty(0)


def disputes(
    pool: StatePool, keys: Sequence[BlockKey], gradient: GradientKey, interval: int, received: torch.Tensor
) -> Disputes:
    """Compare the owner's seals (as :func:`block_checksums` made them) with those of the copies here."""
    theirs = received.contiguous().view(torch.uint8).numpy().tobytes()
    ours = block_checksums(pool, keys, gradient, interval).view(torch.uint8).numpy().tobytes()
    if ours == theirs:
        return Disputes()
    at = {key: 16 * i for i, key in enumerate(keys)}
    unlike = tuple(key for key, i in at.items() if ours[i : i + 8] != theirs[i : i + 8])
    changed = tuple(key for key, i in at.items() if ours[i + 8 : i + 16] != theirs[i + 8 : i + 16])
    return Disputes(unlike, tuple(key for key in changed if key not in unlike))


def _short(digest: str) -> bytes:
    return bytes.fromhex(digest[:16])
