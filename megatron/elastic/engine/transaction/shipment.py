"""The reduced blocks of one computation of a step, on their way from owners to mirrors, each with a checksum.

Each owner has one or several messages for a mirror (:func:`~megatron.elastic.engine.generation.buckets.messages_of`).
Where blocks are reduced beside the backward, it sends each as soon as it retains the sums of all its blocks and a
device has brought them to host memory; it waits for the device at the end alone. The mirror retains them as they come.
The checksums are those of :mod:`block_checksums`. Messages of one pair have one tag and one order, so the transport's
order is theirs.

Invariant: both ends make the same messages, from placement and plan alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.compute.block_checksums import Disputes, block_checksums, disputes
from megatron.elastic.engine.compute.message_memory import BufferPool, GradientMessage, MessageMemory
from megatron.elastic.engine.generation.buckets import Cut, messages_of
from megatron.elastic.engine.generation.view import Routes, View, routes
from megatron.elastic.engine.transaction.tools import Tools
from megatron.elastic.state.layout import BlockKey, StateBlock
from megatron.elastic.state.placement import Placement
from megatron.elastic.state.record import GradientKey
from megatron.elastic.state.retained import Lent

__all__ = ["Shipment", "ShipmentPlan", "plan_shipment", "way_to"]

Kind = Callable[[tuple[StateBlock, ...]], BufferPool]


@dataclass(frozen=True)
class ShipmentPlan:
    """The messages of one rank, by peer."""

    group: dist.ProcessGroup
    outgoing: Mapping[int, tuple[BufferPool, ...]]
    incoming: Mapping[int, tuple[BufferPool, ...]]

    def prepare(self) -> None:
        """Allocate memory for all of them beside earlier steps. On any thread."""
        for pools in (*self.outgoing.values(), *self.incoming.values()):
            for buffers in pools:
                buffers.prepare()


def plan_shipment(way: Routes, cut: Cut, memory: MessageMemory, fabric: Fabric) -> ShipmentPlan:
    """Return the messages in which this rank's blocks go their ``way``, in one generation of ``fabric``."""

    def pools(by_peer: Mapping[int, tuple[StateBlock, ...]], kind: Kind) -> dict[int, tuple[BufferPool, ...]]:
        return {peer: tuple(map(kind, messages_of(blocks, cut))) for peer, blocks in by_peer.items()}

    group = fabric.group("mirror", range(fabric.slots))
    return ShipmentPlan(group, pools(way.outgoing, memory.outgoing), pools(way.incoming, memory.incoming))


def way_to(tools: Tools, view: View, named: Placement) -> Routes:
    """Return this rank's messages from the owners of ``view`` to the copies of the placement ``named``.

    In ``state`` mode blocks go only to future owners.
    """
    holders = named if tools.pool.snapshot == "gradient" else named.owners_only()
    return routes(tools.fabric.rank, view.placement, holders, tools.layouts)


class _Arriving(NamedTuple):
    """A message that is to come. ``message``: memory for it, if it does not come as a loan."""

    owner: int
    buffers: BufferPool
    message: GradientMessage


class Shipment:
    """See the module docstring. ``interval``: of comparisons. It receives from :meth:`post` on."""

    def __init__(self, tools: Tools, plan: ShipmentPlan, key: GradientKey, interval: int, tag: int) -> None:
        self._tools, self._key, self._interval = tools, key, interval
        self._plan = plan
        self.disputes = Disputes()
        """Copies of this rank that differ from their owners'."""
        self._transfers = tools.fabric.transfers(plan.group, tag)
        self._outgoing = {peer: deque([buffers.take() for buffers in pools]) for peer, pools in plan.outgoing.items()}
        self._rooms: dict[BlockKey, tuple[GradientMessage, int]] = {}
        for messages in self._outgoing.values():
            for message in messages:
                self._rooms.update((block.key, (message, number)) for number, block in enumerate(message.blocks))
        self._leaving: list[GradientMessage] = []
        self._arriving: dict[int, _Arriving] | None = None
        """By the number of its receive; None before :meth:`post`."""

    def post(self) -> None:
        """Post the receives, so that what comes is taken in beside other work."""
        incoming = [(owner, buffers) for owner, pools in self._plan.incoming.items() for buffers in pools]
        arriving = [_Arriving(owner, buffers, buffers.take()) for owner, buffers in incoming]
        self._transfers.receive([one.message.whole for one in arriving], [one.owner for one in arriving])
        self._arriving = dict(enumerate(arriving))

    def room(self, key: BlockKey) -> Lent | None:
        """Return the memory of a message for the gradient of an owned block; None if it goes to no mirror."""
        found = self._rooms.get(key)
        return None if found is None else found[0].lend(found[1])

    def advance(self) -> None:
        """Send the messages whose sums are in host memory, and take in those that have come. Raises ``CommError``."""
        for peer, messages in self._outgoing.items():
            while messages and self._is_here(messages[0]):
                self._send(peer, messages.popleft())
        if self._arriving:
            self._take(self._arriving, self._transfers.come())

    def _is_here(self, message: GradientMessage) -> bool:
        return all(self._tools.pool.get(block.key).has_come(self._key) for block in message.blocks)

    def _send(self, peer: int, message: GradientMessage) -> None:
        pool = self._tools.pool
        for block, part in zip(message.blocks, message.parts, strict=True):
            retained = pool.get(block.key).gradients.get(self._key)
            if retained is None:
                raise RuntimeError(f"step {self._key.step + 1}: blocks are to be shipped that were not reduced")
            if retained.values is not part:
                part.copy_(retained.on_host())
        message.checksums[:] = block_checksums(pool, message.blocks, self._key, self._interval)
        message.written = True
        self._transfers.send(message.whole, peer)
        self._leaving.append(message)

    def _take(self, arriving: dict[int, _Arriving], received: Sequence[int]) -> None:
        pool = self._tools.pool
        for one in received:
            _, buffers, message = arriving.pop(one)
            loan = self._transfers.loan(one)
            if loan is None:
                message.written = True
            else:
                message.let_go()
                message = buffers.borrowed(loan)
            for number, block in enumerate(message.blocks):
                pool.retain(block.key, self._key, message.parts[number], message.lend(number))
            self.disputes.add(disputes(pool, message.blocks, self._key, self._interval, message.checksums))
            message.let_go()

    def complete(self) -> None:
        """Wait until the mirrors have this rank's messages, and it has theirs. All its blocks are reduced."""
        if self._arriving is None:
            self.post()
        arriving = self._arriving or {}
        for peer, messages in self._outgoing.items():
            while messages:
                self._send(peer, messages.popleft())
        while arriving:
            self._tools.publish("mirror", tuple({one.owner for one in arriving.values()}))
            self._take(arriving, self._transfers.wait())
        self._transfers.wait()
        for message in self._leaving:
            message.let_go()
