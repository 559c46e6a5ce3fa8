"""The transfer of an added copy while training goes on: base, then log, then the copy counts.

Every change of placement is made of three transitions (docs/design.md §6). Two
send no bytes: *promote* changes the owner, *drop* forgets a copy. This
is the third. To *add* a copy, a rank that has one (:mod:`sender`) streams

    base    the block's state at the version v that it has when it is sent, with its content hash;
    ahead   for every step after v, in one message, the reduced gradients of all blocks whose base is
            sent. They are sent as soon as this rank retains them, while the step is voted on, applied
            and gathered, so that little is left to send at the boundary;
    steps   for every version after v, once: the StepRecord, with gradients that were not sent ahead

The new holder (:mod:`receiver`) receives the base without counting it, compares it with its hash
before using it, and replays each step with the same kernel as all ranks. A step that is computed again
replaces gradients sent ahead; a skipped step leaves them unused. At a boundary
``BlockSender.conclude`` sets the version at which the transfer ends. The rest is sent beside the
next step. The gradients of that step are shipped to the added copies as to all others, once
:func:`commit` has made them count. The vote of that step names the new placement, and
:func:`prune` drops copies that it does not name. If the generation ends before any rank knows
that vote, the newest record still names the old placement (``StepRecord.placement``), and every old
copy exists, without a gradient of that step. To drop copies before the vote would lose state in
one interleaving, which ``tests/unit/protocol`` finds.

Invariants
- A damaged copy is replaced in place: its drop and its add are one change.
- A copy that the newest record names is not dropped before a newer record does not name it.
- Before ``commit`` a block being added is not reported, voted on, or updated by its rank's own ``apply``. If the
  generation ends earlier, that holds until ``BlockReceiver.keep`` returns it as whole. A base whose hash does not
  match is never used.
- The sender holds one base, or ``memory_bytes`` of bases copied ahead of time
  (``BlockSender.prepare``), and at most ``memory_bytes`` of unsent gradients, ahead or not. If
  steps are faster than the link, the newest blocks are discarded and sent anew
  later, so a slow receiver never stalls the step. The receiver holds one message (a base,
  or one step's gradients), and the gradients received ahead.
- Messages of one transfer arrive in order; any loss ends the transfer with a
  ``CommError``. Copies that are then verified and at the record's version are kept, the others are
  dropped. Nothing has to be undone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megatron.elastic.state.block_copy import BlockCopy
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.placement import Placement, Transition
from megatron.elastic.state.pool import StateError, StatePool

__all__ = ["HEADER_BYTES", "WENT_AHEAD", "Channel", "Header", "TransferError", "commit", "padded", "prune"]

HEADER_BYTES = 512
Kind = Literal["base", "ahead", "steps", "end"]
WENT_AHEAD = -1
"""In place of a gradient's length: the gradient was sent ahead."""


class TransferError(RuntimeError):
    """A block could not be received; names block, source and reason."""


class Channel(Protocol):
    """Ordered, reliable messages between two ranks, implemented over the fabric's links."""

    def send(self, peer: int, payload: torch.Tensor) -> None:
        """Send a contiguous host tensor; it may be reused when this returns. Raises ``CommError``."""

    def recv(self, peer: int, out: torch.Tensor) -> None:
        """Receive the next message of ``peer`` into ``out``, of the sender's size. Raises ``CommError``."""


@dataclass(frozen=True)
class Header:
    """The fixed-size message that goes ahead of every other one of a transfer."""

    kind: Kind
    key: BlockKey = (0, 0, 0)
    version: int = 0
    """base: its version; ahead, steps: the version they lead to; end: the version of all copies."""
    lineage: str = ""
    content: str = ""
    origin: int = -1
    """base: :attr:`BlockCopy.origin` of the sender's copy."""
    length: int = 0
    """base: elements; ahead, steps: bytes of the text with (the record and) the table of the gradients that follow."""

    def pack(self) -> torch.Tensor:
        values = [self.kind, *self.key, self.version, self.lineage, self.content, self.origin, self.length]
        return padded(json.dumps(values, separators=(",", ":")).encode(), HEADER_BYTES)

    @classmethod
    def unpack(cls, raw: torch.Tensor) -> Header:
        kind, unit, shard, index, *rest = json.loads(raw.numpy().tobytes().rstrip(b"\0"))
        return cls(kind, (unit, shard, index), *rest)


def padded(text: bytes, length: int) -> torch.Tensor:
    """Return ``text`` as bytes, filled up with zeros to ``length``. Raises ValueError if it is longer."""
    if len(text) > length:
        raise ValueError(f"message of {len(text)} bytes does not fit {length}")
    return torch.frombuffer(bytearray(text.ljust(length, b"\0")), dtype=torch.uint8)


def commit(
    pool: StatePool, transitions: Iterable[Transition], received: Mapping[BlockKey, BlockCopy], version: int
) -> None:
    """Count this rank's added copies, all of the state at ``version``.

    Raises :class:`StateError` before any change if a copy to be added is missing or not at ``version``.
    """
    added = [change.block for change in transitions if change.kind == "add" and change.rank == pool.rank]
    for key in added:
        copy = received.get(key)
        if copy is None or copy.version != version:
            at = "missing" if copy is None else f"at version {copy.version}"
            raise StateError(f"rank {pool.rank}: block {key} to be added is {at}, the state at {version}")
    for key in added:
        pool.take_in(received[key])


def prune(pool: StatePool, *placements: Placement) -> dict[BlockKey, BlockCopy]:
    """Drop copies that none of ``placements`` names on this rank; call it once the vote or decision is known.

    Returns the dropped copies, whose memory the caller may release when there is time.
    """
    kept = [placement.copies for placement in placements]
    gone = [key for key in pool if not any(key in copies and pool.rank in copies[key].ranks for copies in kept)]
    dropped = {key: pool.get(key) for key in gone}
    for key in gone:
        pool.drop(key)
    return dropped
