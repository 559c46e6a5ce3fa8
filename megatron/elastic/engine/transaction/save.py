"""The transfer of one version's state to the ranks that write a checkpoint, while steps go on (docs/design.md §6).

Owners hold blocks; a checkpoint has whole parameters. Each rank states the ranges of the
units' flat state that it will write (:class:`Want`). Owners send exactly these, so each value
is sent and written once. A :class:`StateStream` is opened between two steps and run by a
thread. Owners read from a copy-on-write view of their pool, so a block takes extra memory
only if it is updated before it is sent.

Invariant: sender and receiver derive every message (pieces, order, length) from the
same table of wants and the placement at opening. A new generation voids the stream:
its communication fails in every thread, and the view is released.

An edit ends the waits of its time. A thread that begins a message later would wait for
peers that have given up. So each wait looks at the generation too, and a message's tag
has it: what a void stream has left behind is taken for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import GenerationChanged
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.waits import wait_unless
from megatron.elastic.engine.compute.point_to_point import started
from megatron.elastic.state.checkpoint_view import CheckpointView
from megatron.elastic.state.hashing import content_hash
from megatron.elastic.state.layout import BlockKey, StateBlock, UnitLayout, UnitShard
from megatron.elastic.state.placement import Placement
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import StepRecord

__all__ = ["StateStream", "Want"]

_TAG = (1 << 30) + 0x400


@dataclass(frozen=True, order=True)
class Want:
    """Elements ``[start, stop)`` of one row of a unit's flat state. Rows: 0 master, 1 exp_avg, 2 exp_avg_sq."""

    unit: int
    shard: int
    start: int
    stop: int
    row: int


@dataclass(frozen=True)
class _Piece:
    """The part of a want that lies in one block."""

    want: Want
    block: StateBlock

    @property
    def start(self) -> int:
        """First element, counted in the unit."""
        return max(self.want.start, self.block.start)

    @property
    def stop(self) -> int:
        """End (exclusive), counted in the unit."""
        return min(self.want.stop, self.block.stop)


class StateStream:
    """The transfer of one version. Open and abandon it on the training thread.

    ``wants``: rank → ranges that it writes, the same table on every rank.
    """

    def __init__(
        self,
        fabric: Fabric,
        pool: StatePool,
        placement: Placement,
        layouts: Mapping[UnitShard, UnitLayout],
        record: StepRecord,
        wants: Mapping[int, Sequence[Want]],
    ) -> None:
        self._fabric = fabric
        self._rank, self._generation = fabric.rank, fabric.generation
        self._tag = _TAG + (self._generation & 0xFF)
        self._placement = placement
        self._layouts = layouts
        self._wants = {rank: tuple(sorted(set(wanted))) for rank, wanted in sorted(wants.items())}
        self._units = sorted({(want.unit, want.shard) for wanted in self._wants.values() for want in wanted})
        # A separate group keeps the thread's messages apart from those of the steps.
        self._group = fabric.group("save", range(fabric.slots))
        mine = {
            piece.block.key
            for rank in self._wants
            for unit in self._units
            for owner, pieces in self._pieces(unit, rank).items()
            if owner == self._rank
            for piece in pieces
        }
        self._view = CheckpointView(pool, mine, record)
        self.contents: dict[BlockKey, str] = {}
        """Hashes of the blocks that this rank has sent, as it read them; complete when :meth:`run` returns."""

    def run(self, deliver: Callable[[Want, torch.Tensor], None]) -> None:
        """Send and receive all wants. Calls ``deliver(want, values)``, fp32 ``[stop − start]``, which has to copy.

        For one thread a rank. Raises the communicator's typed errors and ``ViewAbandoned``.
        """
        for unit in self._units:
            blocks = dict[BlockKey, torch.Tensor]()
            leaving = [
                (started(dist.isend(packed, dst=rank, group=self._group, tag=self._tag)), packed)
                for rank, packed in self._outgoing(unit, blocks)
            ]
            whole = {want: torch.empty(want.stop - want.start) for want in self._wanted(unit, self._rank)}
            arriving = [
                (started(dist.irecv(buffer, src=owner, group=self._group, tag=self._tag)), buffer, pieces)
                for owner, pieces in self._pieces(unit, self._rank).items()
                if owner != self._rank
                for buffer in (torch.empty(sum(piece.stop - piece.start for piece in pieces)),)
            ]
            for piece in self._pieces(unit, self._rank).get(self._rank, ()):
                _place(whole, piece, self._cut(piece, blocks))
            for work, buffer, pieces in arriving:
                self._wait(work)
                for piece, part in zip(pieces, buffer.split([p.stop - p.start for p in pieces]), strict=True):
                    _place(whole, piece, part)
            for want, values in whole.items():
                deliver(want, values)
            for work, _ in leaving:
                self._wait(work)

    def _wait(self, work: dist.Work) -> None:
        """Wait for a message. Raises ``GenerationChanged`` in a newer generation, though the message is of no other."""
        if not wait_unless(work, lambda: self._fabric.generation != self._generation):
            raise GenerationChanged(self._fabric.generation)

    def abandon(self, why: str) -> None:
        """Void the stream: a reading thread raises ``ViewAbandoned``. Idempotent."""
        self._view.abandon(why)

    def _outgoing(self, unit: UnitShard, blocks: dict[BlockKey, torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        for rank in self._wants:
            pieces = self._pieces(unit, rank).get(self._rank, ())
            if pieces and rank != self._rank:
                yield rank, torch.cat([self._cut(piece, blocks) for piece in pieces])

    def _cut(self, piece: _Piece, blocks: dict[BlockKey, torch.Tensor]) -> torch.Tensor:
        """Return the values of a piece of an owned block; each block is read from the view once."""
        key = piece.block.key
        if key not in blocks:
            blocks[key] = self._view.read(key)
            self.contents[key] = content_hash(key, blocks[key])
        return blocks[key][piece.want.row, piece.start - piece.block.start : piece.stop - piece.block.start]

    def _wanted(self, unit: UnitShard, rank: int) -> Iterator[Want]:
        return (want for want in self._wants.get(rank, ()) if (want.unit, want.shard) == unit)

    def _pieces(self, unit: UnitShard, rank: int) -> dict[int, tuple[_Piece, ...]]:
        """Return owner → the pieces of ``unit`` that it sends to ``rank``, in the order of the message."""
        table: dict[int, list[_Piece]] = {}
        for want in self._wanted(unit, rank):
            for block in self._layouts[unit].blocks:
                if block.start < want.stop and want.start < block.stop:
                    table.setdefault(self._placement.owner(block.key), []).append(_Piece(want, block))
        return {owner: tuple(table[owner]) for owner in sorted(table)}


def _place(whole: Mapping[Want, torch.Tensor], piece: _Piece, values: torch.Tensor) -> None:
    want = piece.want
    whole[want][piece.start - want.start : piece.stop - want.start] = values
