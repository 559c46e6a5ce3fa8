"""Copies change place while steps go on (docs/design.md §6; the rules are those of ``state.transfer``).

    begin     at a boundary every rank derives the same :class:`Migration`; sources and
              destinations start one thread a peer, and nobody waits. Where layers change place
              streams are held for a step, beside which memory, modules and the plan are made
    ready     each vote counts the ranks whose bases have left, or are to leave while the next step is computed
    conclude  at the boundary after a vote in which all have: what is left is on its way, the
              record and the gradients of that step among it, while the next one is computed
    arrive    added copies count, and get gradients of that step in place of those that leave
    switch    with its vote, which names the target, the others go and the target is in force

Copies that a loss left missing are *urgent*: they begin in the recovery itself, on the survivors, and nothing
else moves before. Their streams send whatever the step does; between reducing and shipping all ranks ask one
another whether the copies are there, or nearly (:meth:`Migrator.agree`). Then this very step's vote names them.

A loss at any instant before that vote is known leaves the old placement in force, with every
old copy there (:mod:`configuration`): an unfinished migration ends, and the next generation begins one for what is
missing.
Copies that came whole by then are kept, and count (``BlockReceiver.keep``, ``protocol.all_copies``).

Between the last of a rank's computing and its gather, steps send as fast as they can; a stream that sent then
would make them wait for every byte of it. It sends while its rank computes.

In memory: a sender holds one block and at most ``window_bytes`` of gradients, a
receiver one message beside the copies it has taken in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.side_channel import SideChannel
from megatron.elastic.engine.generation.migration import Migration
from megatron.elastic.platform.threads import OS_THREADS, Event, Threads
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.pool import BlockCopy, StatePool
from megatron.elastic.state.receiver import BlockReceiver
from megatron.elastic.state.record import StepRecord
from megatron.elastic.state.sender import BlockSender

__all__ = ["Moved", "Streams"]

_OVERRUN = 4 / 3
"""Bases that leave a step before their vote are followed by its gradients, a third of their bytes: as much may be
late instead, and be waited for."""
_PATIENCE = 0.05
"""Seconds after which a sender that was told nothing looks whether it should send all the same."""


@dataclass(frozen=True)
class Moved:
    """A migration that has ended, as this rank saw it."""

    migration: Migration
    bytes_received: int
    """Of state, in added copies."""
    background: float
    """Seconds from its begin to the end of the step whose vote named its target, without those this rank waited."""
    seconds: Mapping[str, float]
    """What this rank waited for it, by what for: ``finish`` (the last bytes, before shipping), ``build_view`` (plan,
    modules, groups, after the vote), ``certificate`` (after the step's gather)."""

    @property
    def stall(self) -> float:
        """Seconds this rank waited for it."""
        return sum(self.seconds.values())


class _Incoming:
    """One receiver on a thread of its own."""

    def __init__(
        self, receiver: BlockReceiver, blocks: tuple[BlockKey, ...], idle: Event, urgent: bool,
        threads: Threads,
    ) -> None:
        self.receiver, self.blocks, self._idle, self._urgent = receiver, blocks, idle, urgent
        self.error: Exception | None = None
        self.thread = threads.start(f"elastic-from-{receiver.source}", self._run)

    def _run(self) -> None:
        try:
            while self.receiver.take():
                if self._urgent:  # a copy is of use to a recovery as soon as it is verified
                    self.receiver.verify()
            if not self._urgent:
                self._idle.wait()
            self.receiver.verify()
        except Exception as error:  # raised again on the training thread
            self.error = error


class _Outgoing:
    """One sender on a thread of its own."""

    def __init__(
        self, sender: BlockSender, channel: SideChannel, given_up: Event, link_is_free: Event,
        threads: Threads,
    ) -> None:
        self.sender, self._channel = sender, channel
        self._given_up, self._link_is_free, self._threads = given_up, link_is_free, threads
        self.bytes, self.seconds = 0, 0.0
        """Of bases that were sent, and what that took."""
        self.error: Exception | None = None
        self.thread = threads.start(f"elastic-to-{sender.peer}", self._run)

    def _run(self) -> None:
        try:
            while not self._given_up.is_set() and not self.sender.ended:
                if not (self._link_is_free.is_set() or self.sender.pressed):
                    self._link_is_free.wait(_PATIENCE)
                elif not self._pump():
                    self.sender.wait(_PATIENCE)
            if self.sender.ended:
                self._channel.drain(self.sender.peer)
        except Exception as error:  # raised again on the training thread
            self.error = error

    def _pump(self) -> bool:
        before, began = self.sender.pending_bytes, self._threads.monotonic()
        moved = self.sender.pump()
        left = before - self.sender.pending_bytes
        if moved and left > 0:
            self.bytes, self.seconds = self.bytes + left, self.seconds + self._threads.monotonic() - began
        return moved


class Streams:
    """This rank's part in one migration, from its begin to its end.

    Every member makes one at the same boundary, also without a part in it. Belongs to
    the training thread.
    """

    def __init__(
        self, migration: Migration, pool: StatePool, fabric: Fabric, number: int, window_bytes: int, held: bool = False,
        threads: Threads = OS_THREADS,
    ) -> None:
        """``held``: nothing is sent before :meth:`release`."""
        self.migration = migration
        self.began = time.monotonic()
        self._given_up = threads.event()
        self._link_is_free = threads.event()
        self._idle = threads.event()
        """This rank has computed: there is processor time."""
        self._held, self._free = held, True
        if not held:
            self._link_is_free.set()
        urgent = migration.urgent
        self._incoming: list[_Incoming] = []
        self._outgoing: list[_Outgoing] = []
        self._channel = channel = fabric.side_channel(number)
        for (source, destination), blocks in migration.adds().items():
            if destination == fabric.rank:
                receiver = BlockReceiver(pool, channel, source)
                self._incoming.append(_Incoming(receiver, blocks, self._idle, urgent, threads))
            elif source == fabric.rank:
                sender = BlockSender(pool, channel, destination, window_bytes, threads)
                sender.offer(blocks)
                self._outgoing.append(_Outgoing(sender, channel, self._given_up, self._link_is_free, threads))

    def prepare(self) -> None:
        """Have memory for all that is to come, if nothing does yet. On any thread, beside a step."""
        if self._held:
            for part in self._incoming:
                part.receiver.prepare(part.blocks)

    @property
    def held(self) -> bool:
        """Whether nothing may be sent yet."""
        return self._held

    def copy_bases(self) -> None:
        """Have what is to be sent from here ready for it. On any thread, beside a step that is committed."""
        for part in self._outgoing:
            part.sender.prepare()

    def release(self) -> None:
        """Streams that were held begin. Idempotent."""
        self._held = False
        self.link_is_free(self._free)

    def ready(self, seconds: float, bytes_a_second: float) -> bool:
        """Whether the bases sent from here have left, or about should within ``seconds``, those of a step's computing.

        Raises what a thread ran into.
        """
        self._raise_findings()
        pending = sum(part.sender.pending_bytes for part in self._outgoing)
        return pending <= _OVERRUN * seconds * bytes_a_second

    def pace(self, usual: float) -> float:
        """Bytes a second at which bases left here beside steps; ``usual`` where none did."""
        seconds = max((part.seconds for part in self._outgoing), default=0.0)
        return sum(part.bytes for part in self._outgoing) / seconds if seconds else usual

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks this one sends to or receives from."""
        sources = {part.receiver.source for part in self._incoming}
        return tuple(sorted(sources | {part.sender.peer for part in self._outgoing}))

    @property
    def bytes_received(self) -> int:
        """Bytes of state in the copies that have arrived here."""
        return sum(copy.state.nbytes for copy in self.received.values())

    @property
    def received(self) -> dict[BlockKey, BlockCopy]:
        """Copies taken in so far, uncounted."""
        return {key: copy for part in self._incoming for key, copy in list(part.receiver.blocks.items())}

    def link_is_free(self, free: bool) -> None:
        """Send only while ``free``, unless gradients pile up, or the copies are urgent."""
        self._free = free = free or self.migration.urgent
        (self._idle.clear if free else self._idle.set)()
        (self._link_is_free.set if free and not self._held else self._link_is_free.clear)()

    def conclude(self, version: int) -> None:
        """All added copies are to be brought to ``version``, that of the boundary: what is left follows by itself."""
        for leaving in self._outgoing:
            leaving.sender.conclude(version)

    def finish(self) -> None:
        """Wait until they are. Raises ``CommError``, ``TransferError``."""
        self._channel.hurry()
        self.release()
        self.link_is_free(True)
        self._idle.set()
        for thread in (*(part.thread for part in self._outgoing), *(part.thread for part in self._incoming)):
            thread.join()
        self._raise_findings()

    def keep(self, record: StepRecord) -> dict[BlockKey, BlockCopy]:
        """After :meth:`abandon`: copies that are whole, verified and at ``record``'s version."""
        return {key: copy for part in self._incoming for key, copy in part.receiver.keep(record).items()}

    def abandon(self) -> None:
        """Forget the migration: threads end by themselves, no copy counts. Idempotent, returns at once.

        Keep this object until the next edit: messages under way still use its buffers.
        """
        self._given_up.set()
        self._idle.set()
        self._channel.give_up()
        for part in self._outgoing:
            part.sender.close()

    def _raise_findings(self) -> None:
        ends = [part.error for part in self._incoming] + [part.error for part in self._outgoing]
        errors = [error for error in ends if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, CommError)):
            raise error
