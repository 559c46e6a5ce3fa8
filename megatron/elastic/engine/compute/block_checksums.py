"""The checksums that an owner ships with a block's reduced gradient, and their comparison by the mirror.

Each message ends with two checksums a block:

    mark      lineage of the copy and hash of the gradient. If marks are equal, both copies have the
              same history and make the same update (``state.hashing``). If they differ, there is a bug,
              and the vote refuses this step
    contents  hash of the state itself, for a share of the blocks each step (``state.verify.due``). If
              contents differ but marks are equal, memory has changed by itself

Lineages are thus compared in every step and contents once in ``interval`` steps, without an
extra message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.elastic.state.hashing import content_hash, history_mark
from megatron.elastic.state.layout import BlockKey, StateBlock
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import GradientKey
from megatron.elastic.state.verify import due

__all__ = ["CHECKSUM_SLOTS", "Disputes", "block_checksums", "disputes"]

CHECKSUM_SLOTS = 4
"""fp32 slots that one block's checksums take in a message."""
_NOT_DUE = bytes(8)


@dataclass
class Disputes:
    """Blocks whose copies on this rank and on their owner differ."""

    marks: tuple[BlockKey, ...] = ()
    """Blocks whose histories differ: made from other state or another gradient."""
    contents: tuple[BlockKey, ...] = ()
    """Blocks with the same history whose contents differ."""

    def add(self, other: Disputes) -> None:
        """Add the blocks of ``other``."""
        self.marks += other.marks
        self.contents += other.contents


def block_checksums(pool: StatePool, blocks: Sequence[StateBlock], gradient: GradientKey, interval: int) -> bytes:
    """Return the checksums of this rank's copies of ``blocks``, which keep ``gradient``, 16 bytes each."""
    words = []
    for block in blocks:
        copy = pool.get(block.key)
        words.append(history_mark(copy.lineage, copy.gradient_hash(gradient)))
        looked_at = due(block.key, copy.version, interval)
        words.append(_short(content_hash(block.key, copy.store.on_host())) if looked_at else _NOT_DUE)
    return b"".join(words)


def disputes(
    pool: StatePool, blocks: Sequence[StateBlock], gradient: GradientKey, interval: int, received: bytes | memoryview
) -> Disputes:
    """Compare the owner's checksums (of :func:`block_checksums`) with those of this rank's copies."""
    ours = block_checksums(pool, blocks, gradient, interval)
    if ours == received:
        return Disputes()
    at = {block.key: 16 * i for i, block in enumerate(blocks)}
    unlike = tuple(key for key, i in at.items() if ours[i : i + 8] != received[i : i + 8])
    changed = tuple(key for key, i in at.items() if ours[i + 8 : i + 16] != received[i + 8 : i + 16])
    return Disputes(unlike, tuple(key for key in changed if key not in unlike))


def _short(digest: str) -> bytes:
    return bytes.fromhex(digest[:16])
