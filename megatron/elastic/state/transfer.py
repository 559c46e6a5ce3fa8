"""Adding a copy while everybody else trains: base, then log, then it counts.

Every change of placement is made of three transitions (docs/design.md §6). Two
need no bytes: *promote* changes only who is called owner, *drop* forgets. This
is the third. To *add* a copy, a rank that has one (:mod:`sender`) streams

    base    the block's state at the version v it has when its turn comes, copied at
            once, with its content hash;
    ahead   for every step after v, in one piece, the reduced gradients of all blocks whose base is
            over there, as soon as they are retained here: while the step is voted on, applied and
            gathered they travel, so that hardly anything is left to be sent at the boundary;
    steps   for every version after v, once: the StepRecord, with gradients that did not go ahead

and the new holder (:mod:`receiver`) takes the base in uncounted, compares it with its hash
before anything becomes of it, and replays each step with the kernel everybody uses. A step that is computed again
replaces what went ahead; one that is skipped leaves it unused. At a boundary
``BlockSender.conclude`` says at which version the transfer ends: what is left and that version
follow beside the next step, whose gradients go to the added copies in the ordinary way, once
:func:`commit` has made them count. The vote of that step names the new placement, and
:func:`prune` drops what it does not name. Should the generation end before anybody knows that vote,
the newest record still names the old placement (``StepRecord.placement``), and every old
copy is there, without a gradient of that step. Dropping before the vote instead has a
losing interleaving: ``tests/unit/protocol`` finds it.

Invariants
- A damaged copy is replaced in place: its drop and its add are one.
- No copy that the newest record names goes before a newer one does not name it.
- A block being added is not reported, voted on, or stepped by its rank's own
  ``apply`` until ``commit``, or until the generation ends and ``BlockReceiver.keep`` says that it is whole;
  a base whose hash does not match never is.
- The sender holds one base, or ``memory_bytes`` of bases that it was asked to copy ahead
  (``BlockSender.prepare``), and at most ``memory_bytes`` of unsent gradients, ahead or not: when
  steps outrun the link, the last blocks taken up are given up and sent again
  later, so a slow receiver never stalls the step. The receiver holds one message (a base,
  or one step's gradients), and the gradients that came ahead.
- Messages of one transfer arrive in order; any loss ends the transfer with a
  ``CommError``. Copies that are verified and at the record's version then are kept, the others are dropped.
  Nothing needs undoing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.placement import Placement, Transition
from megatron.elastic.state.pool import BlockCopy, StateError, StatePool

__all__ = ["HEADER_BYTES", "WENT_AHEAD", "Channel", "Header", "TransferError", "commit", "padded", "prune"]

HEADER_BYTES = 512
Kind = Literal["base", "ahead", "steps", "end"]
WENT_AHEAD = -1
"""In place of a gradient's length: it is over there."""


class TransferError(RuntimeError):
    """A block could not be taken in; names block, source and reason."""


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
    """base: its version; ahead, steps: the version they lead to; end: the version everything sent has reached."""
    lineage: str = ""
    content: str = ""
    length: int = 0
    """base: elements; ahead, steps: bytes of the text that tells (the record and) which gradients follow."""

    def pack(self) -> torch.Tensor:
        values = [self.kind, *self.key, self.version, self.lineage, self.content, self.length]
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

    Raises :class:`StateError` before anything changes when a copy to be added is not
    there or not at ``version``.
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
    """Drop copies that none of ``placements`` gives this rank; with the vote or the decision known that says so.

    Returns what went, whose memory the caller may hand back when there is time for it.
    """
    kept = [placement.copies for placement in placements]
    gone = [key for key in pool if not any(key in copies and pool.rank in copies[key].ranks for copies in kept)]
    dropped = {key: pool.get(key) for key in gone}
    for key in gone:
        pool.drop(key)
    return dropped
