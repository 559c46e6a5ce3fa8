"""The reduced blocks of one computation of a step, on their way from owners to mirrors, each with a checksum.

Each owner has one or several messages for a mirror (:func:`~megatron.elastic.engine.generation.buckets.messages_of`).
Where blocks are reduced beside the backward, it sends each as soon as it retains the sums of all its blocks and a
device has brought them to host memory; it waits for the device at the end alone. The mirror retains them as they come.
The checksums are those of :mod:`block_checksums`. Messages of one pair have one tag and one order, so the transport's
order is theirs.

Invariant: both ends make the same messages, from placement and plan alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
    """The messages of one rank: (peer, memory) of each, those of a peer in the order in which they are sent."""

    group: dist.ProcessGroup
    outgoing: tuple[tuple[int, BufferPool], ...]
    incoming: tuple[tuple[int, BufferPool], ...]

    @cached_property
    def rooms(self) -> Mapping[BlockKey, tuple[int, int]]:
        """Owned block → number of its message among the outgoing ones, and of the block within it."""
        return {
            block.key: (message, number)
            for message, (_, buffers) in enumerate(self.outgoing)
            for number, block in enumerate(buffers.blocks)
        }

    def prepare(self) -> None:
        """Allocate memory for all of them beside earlier steps. On any thread."""
        for _, buffers in (*self.outgoing, *self.incoming):
            buffers.prepare()


def plan_shipment(way: Routes, cut: Cut, memory: MessageMemory, fabric: Fabric) -> ShipmentPlan:
    """Return the messages in which this rank's blocks go their ``way``, in one generation of ``fabric``."""

    def messages(by_peer: Mapping[int, tuple[StateBlock, ...]], kind: Kind) -> tuple[tuple[int, BufferPool], ...]:
        return tuple((peer, kind(part)) for peer, blocks in by_peer.items() for part in messages_of(blocks, cut))

    group = fabric.group("mirror", range(fabric.slots))
    return ShipmentPlan(group, messages(way.outgoing, memory.outgoing), messages(way.incoming, memory.incoming))


def way_to(tools: Tools, view: View, named: Placement) -> Routes:
    """Return this rank's messages from the owners of ``view`` to the copies of the placement ``named``.

    In ``state`` mode blocks go only to future owners.
    """
    holders = named if tools.pool.snapshot == "gradient" else named.owners_only()
    return routes(tools.fabric.rank, view.placement, holders, tools.layouts)


class Shipment:
    """See the module docstring. ``interval``: of comparisons. It receives from :meth:`post` on."""

    def __init__(self, tools: Tools, plan: ShipmentPlan, key: GradientKey, interval: int, tag: int) -> None:
        self._tools, self._key, self.interval = tools, key, interval
        self._plan = plan
        self.disputes = Disputes()
        """Copies of this rank that differ from their owners', so far."""
        self._transfers = tools.fabric.transfers(plan.group, tag)
        self._outgoing = [buffers.take() for _, buffers in plan.outgoing]
        self.unsent = list(range(len(self._outgoing)))
        """Numbers of the messages that have yet to be sent."""
        self._arriving: dict[int, GradientMessage] | None = None
        """Memory for what is to come, if it does not come as a loan, by the number of its receive. None before."""

    def post(self) -> None:
        """Post the receives, so that what comes is taken in beside other work."""
        arriving = [buffers.take() for _, buffers in self._plan.incoming]
        self._transfers.receive([message.whole for message in arriving], [owner for owner, _ in self._plan.incoming])
        self._arriving = dict(enumerate(arriving))

    def room(self, key: BlockKey) -> Lent | None:
        """Return the memory of a message for the gradient of an owned block; None if it goes to no mirror."""
        found = self._plan.rooms.get(key)
        return None if found is None else self._outgoing[found[0]].lend(found[1])

    def advance(self) -> None:
        """Send the messages whose sums are in host memory, and take in those that have come. Raises ``CommError``."""
        unsent, self.unsent, behind = self.unsent, [], set[int]()
        for number in unsent:
            peer = self._plan.outgoing[number][0]
            if peer not in behind and self._is_here(self._outgoing[number]):
                self._send(number)
            else:
                behind.add(peer)
                self.unsent.append(number)
        if self._arriving:
            self._take(self._arriving, self._transfers.come())

    def _is_here(self, message: GradientMessage) -> bool:
        return all(self._tools.pool.get(block.key).has_come(self._key) for block in message.blocks)

    def _send(self, number: int) -> None:
        message = self._outgoing[number]
        pool = self._tools.pool
        for block, part in zip(message.blocks, message.parts, strict=True):
            retained = pool.get(block.key).gradients.get(self._key)
            if retained is None:
                raise RuntimeError(f"step {self._key.step + 1}: blocks are to be shipped that were not reduced")
            if retained.values is not part:
                part.copy_(retained.on_host())
        message.checksums[:] = block_checksums(pool, message.blocks, self._key, self.interval)
        message.written = True
        self._transfers.send(message.whole, self._plan.outgoing[number][0])

    def _take(self, arriving: dict[int, GradientMessage], received: Sequence[int]) -> None:
        pool = self._tools.pool
        for one in received:
            message = arriving.pop(one)
            loan = self._transfers.loan(one)
            if loan is None:
                message.written = True
            else:
                message.let_go()
                message = self._plan.incoming[one][1].borrowed(loan)
            for number, block in enumerate(message.blocks):
                pool.retain(block.key, self._key, message.parts[number], message.lend(number))
            found = disputes(pool, message.blocks, self._key, self.interval, message.checksums)
            pool.doubt(found.contents, self._plan.incoming[one][0])
            self.disputes.add(found)
            message.let_go()

    def complete(self) -> None:
        """Wait until the mirrors have this rank's messages, and it has theirs. All its blocks are reduced."""
        if self._arriving is None:
            self.post()
        arriving = self._arriving or {}
        for number in self.unsent:
            self._send(number)
        self.unsent = []
        if arriving:
            self._tools.publish("mirror", tuple({self._plan.incoming[one][0] for one in arriving}))
        while arriving:
            self._take(arriving, self._transfers.wait())
        self._transfers.wait()
        for message in self._outgoing:
            message.let_go()
