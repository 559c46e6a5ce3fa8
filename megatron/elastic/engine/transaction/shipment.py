"""The reduced blocks of one computation of a step, on their way from owners to mirrors while others are reduced.

Each owner cuts its blocks for a mirror into messages (:func:`~megatron.elastic.engine.generation.buckets.messages_of`)
and sends each as soon as it retains the sums of all its blocks and a device has brought them to host memory. It waits
for the device at the end alone. The mirror retains them as they come. They go to the copies of the present placement,
with the checksums of :mod:`block_checksums`. Messages of one pair have one tag and one order, so the transport's order
is theirs.

Invariant: both ends make the same messages, from placement and plan alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.elastic.engine.compute.block_checksums import CHECKSUM_SLOTS, Disputes, block_checksums, disputes
from megatron.elastic.engine.compute.message_memory import MessageMemory
from megatron.elastic.engine.compute.point_to_point import started
from megatron.elastic.engine.generation.buckets import Cut, messages_of
from megatron.elastic.engine.generation.view import Routes, View, routes
from megatron.elastic.engine.transaction.tools import Tools
from megatron.elastic.state.layout import StateBlock
from megatron.elastic.state.placement import Placement
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import GradientKey

__all__ = ["Shipment", "packed_gradients", "sizes_of", "take_gradients", "way_to"]

Message = tuple[StateBlock, ...]


class Shipment:
    """See the module docstring. Made before any rank sends: it posts the receives. ``interval``: of comparisons."""

    def __init__(self, tools: Tools, way: Routes, key: GradientKey, cut: Cut, interval: int, tag: int) -> None:
        self._tools, self._key, self._interval, self._tag = tools, key, interval, tag
        self._group = tools.fabric.group("mirror", range(tools.fabric.slots))
        self.disputes = Disputes()
        """Copies of this rank that differ from their owners'."""
        self._outgoing = {peer: deque(messages_of(blocks, cut)) for peer, blocks in way.outgoing.items()}
        self._leaving: list[tuple[dist.Work, torch.Tensor]] = []
        self._arriving = {
            owner: deque(self._posted(owner, message) for message in messages_of(blocks, cut))
            for owner, blocks in way.incoming.items()
        }

    def _posted(self, owner: int, message: Message) -> tuple[dist.Work, torch.Tensor, Message]:
        length = sum(block.numel + CHECKSUM_SLOTS for block in message)
        buffer = torch.empty(length, dtype=torch.float32)
        work = started(dist.irecv(buffer, src=owner, group=self._group, tag=self._tag))
        return work, buffer, message

    def advance(self) -> None:
        """Send the messages whose sums are in host memory, and take in those that have come. Raises ``CommError``."""
        for peer, messages in self._outgoing.items():
            while messages and self._is_reduced(messages[0]) and self._is_here(messages[0]):
                self._send(peer, messages.popleft())
        for arriving in self._arriving.values():
            while arriving and arriving[0][0].is_completed():
                self._take(*arriving.popleft())

    def _is_reduced(self, message: Message) -> bool:
        return all(self._key in self._tools.pool.get(block.key).gradients for block in message)

    def _is_here(self, message: Message) -> bool:
        return all(self._tools.pool.get(block.key).has_come(self._key) for block in message)

    def _send(self, peer: int, message: Message) -> None:
        tools = self._tools
        packed = packed_gradients(tools.pool, message, self._key, self._interval, tools.messages)
        work = started(dist.isend(packed, dst=peer, group=self._group, tag=self._tag))
        self._leaving.append((work, packed))

    def _take(self, work: dist.Work, buffer: torch.Tensor, message: Message) -> None:
        work.wait()
        *parts, checksums = buffer.split([*(block.numel for block in message), CHECKSUM_SLOTS * len(message)])
        self.disputes.add(take_gradients(self._tools.pool, message, self._key, self._interval, parts, checksums))

    def complete(self) -> None:
        """Wait until the mirrors have this rank's messages, and it has theirs. All its blocks are reduced."""
        for peer, messages in self._outgoing.items():
            while messages:
                if not self._is_reduced(messages[0]):
                    raise RuntimeError(f"step {self._key.step + 1}: blocks are to be shipped that were not reduced")
                self._send(peer, messages.popleft())
        for owner, arriving in self._arriving.items():
            while arriving:
                self._tools.publish("mirror", (owner,))
                self._take(*arriving.popleft())
        for work, _ in self._leaving:
            work.wait()


def way_to(tools: Tools, view: View, named: Placement) -> Routes:
    """Return this rank's messages from the owners of ``view`` to the copies of the placement ``named``.

    In ``state`` mode blocks go only to future owners.
    """
    holders = named if tools.pool.snapshot == "gradient" else named.owners_only()
    return routes(tools.fabric.rank, view.placement, holders, tools.layouts)


def sizes_of(way: Routes) -> list[int]:
    """Return the fp32 elements of each message of ``way`` that carries reduced blocks."""
    messages = (*way.outgoing.values(), *way.incoming.values())
    return [sum(block.numel + CHECKSUM_SLOTS for block in blocks) for blocks in messages]


def packed_gradients(
    pool: StatePool, blocks: Message, key: GradientKey, interval: int, memory: MessageMemory
) -> torch.Tensor:
    """Return the message with the gradients of ``blocks``, fp32, and their checksums behind them, in ``memory``."""
    parts = [pool.get(block.key).host_gradient(key) for block in blocks]
    parts.append(block_checksums(pool, [block.key for block in blocks], key, interval))
    return torch.cat(parts, out=memory.take(sum(part.numel() for part in parts)))


def take_gradients(
    pool: StatePool,
    blocks: Message,
    key: GradientKey,
    interval: int,
    gradients: Sequence[torch.Tensor],
    checksums: torch.Tensor,
) -> Disputes:
    """Retain the received ``gradients`` of ``blocks`` where they lie.

    The message stays in memory until its last block is updated. Returns the copies here that differ from the owner's.
    """
    for block, gradient in zip(blocks, gradients, strict=True):
        pool.retain(block.key, key, gradient, given=True)
    return disputes(pool, [block.key for block in blocks], key, interval, checksums)
