"""Add, promote, drop: how copies of state blocks change place (DESIGN §6).

All movement happens between two steps, as one repeatable action: new copies are
streamed first, each whole message checked against the hash its source sent; when
every rank has all of its own, promotions and drops take effect everywhere at
once. A change of membership before that point leaves the old placement in force,
and the added copies are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.transport import started
from megatron.elastic.state.hashing import tensor_hash
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.placement import Placement, Transition
from megatron.elastic.state.pool import StatePool

__all__ = ["Movement", "settle_movement", "stream", "undo_movement"]

_TAG = (1 << 30) + 0x200
_DIGEST_WORDS = 4
"""fp32 slots at the end of a message that carry the 128-bit hash of what precedes them."""


@dataclass(frozen=True)
class Movement:
    """A placement to reach, and the changes that lead there."""

    target: Placement
    changes: tuple[Transition, ...]

    def adds(self) -> dict[tuple[int, int], tuple[BlockKey, ...]]:
        """(source, destination) → blocks, ascending."""
        pairs: dict[tuple[int, int], list[BlockKey]] = {}
        for change in self.changes:
            if change.kind == "add":
                pairs.setdefault((change.source, change.rank), []).append(change.block)
        return {pair: tuple(sorted(blocks)) for pair, blocks in sorted(pairs.items())}


def stream(movement: Movement, pool: StatePool, fabric: Fabric, version: int) -> int:
    """Send and receive every added copy that concerns this rank; returns bytes received.

    A copy whose hash does not match what its source sent raises ``RuntimeError``.
    """
    group = fabric.group("move", range(fabric.slots))
    arriving: list[tuple[dist.Work, torch.Tensor, tuple[BlockKey, ...]]] = []
    leaving: list[tuple[dist.Work, torch.Tensor]] = []
    for (source, destination), blocks in movement.adds().items():
        if destination == fabric.rank:
            size = sum(3 * pool.block(key).numel for key in blocks) + _DIGEST_WORDS
            buffer = torch.empty(size, dtype=torch.float32)
            arriving.append((started(dist.irecv(buffer, src=source, group=group, tag=_TAG)), buffer, blocks))
        elif source == fabric.rank:
            packed = _sealed([pool.get(key).state.reshape(-1) for key in blocks])
            leaving.append((started(dist.isend(packed, dst=destination, group=group, tag=_TAG)), packed))
    received = 0
    for work, buffer, blocks in arriving:
        work.wait()
        received += buffer.nbytes
        _unpack(_opened(buffer), blocks, pool, version)
    for work, _ in leaving:
        work.wait()
    return received


def settle_movement(movement: Movement, pool: StatePool, rank: int) -> None:
    """Every rank has its added copies: forget the dropped ones. Local."""
    for change in movement.changes:
        if change.rank == rank and change.kind == "drop":
            pool.drop(change.block)


def undo_movement(movement: Movement, pool: StatePool, rank: int) -> None:
    """The generation ended first: forget the added copies, whole or half-finished. Local."""
    for change in movement.changes:
        if change.rank == rank and change.kind == "add" and change.block in pool:
            pool.drop(change.block)


def _unpack(state: torch.Tensor, blocks: Sequence[BlockKey], pool: StatePool, version: int) -> None:
    for key, part in zip(blocks, state.split([3 * pool.block(key).numel for key in blocks]), strict=True):
        master, exp_avg, exp_avg_sq = part.view(3, -1)
        pool.put(key, master, version, exp_avg, exp_avg_sq)


def _sealed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    body = torch.cat([*parts, torch.empty(_DIGEST_WORDS)])
    digest = bytearray.fromhex(tensor_hash(body[:-_DIGEST_WORDS]))
    body[-_DIGEST_WORDS:].view(torch.uint8).copy_(torch.frombuffer(digest, dtype=torch.uint8))
    return body


def _opened(message: torch.Tensor) -> torch.Tensor:
    body, seal = message[:-_DIGEST_WORDS], bytes(message[-_DIGEST_WORDS:].view(torch.uint8).tolist())
    if bytes.fromhex(tensor_hash(body)) != seal:
        raise RuntimeError("a state block arrived with another hash than it was sent with")
    return body
