"""The streams of one migration: copies are sent while steps go on (docs/design.md §6; rules in ``state.transfer``).

    begin     at a boundary every rank derives the same :class:`Migration`; sources and
              destinations start one thread a peer and do not wait. If layers move, the streams
              are held for one step, during which memory, modules and the plan are prepared
    ready     each vote counts the ranks whose bases are sent, or will be while the next step is computed
    conclude  at the boundary after a vote in which all ranks were ready: the streams send the rest,
              including the record and the gradients of that step, while the next step is computed
    arrive    added copies count, and receive gradients of that step instead of the copies that leave
    switch    the vote of that step names the target: it is in force, and the other copies are dropped

Copies that a loss left missing are *urgent*. The survivors begin them in the recovery, before any other
migration, and their streams also send while a step communicates. Between reducing and shipping all ranks
agree whether these copies have nearly arrived (:meth:`Migrator.agree`). If so, the vote of this step names them.

A loss before that vote is known leaves the old configuration in force, with every old copy
(:mod:`configuration`). The migration ends, and the next generation begins one for the copies that are
missing then. Copies that arrived whole are kept and count (``BlockReceiver.keep``, ``protocol.all_copies``).

Between the end of a rank's computation and its gather, the step itself uses the full link. A stream that sent
then would delay the step, so streams send while their rank computes. Then too a rank sends messages: those between the
ranks of its cell and to the next stage. Its streams take turns, so that such a message waits for one piece of a stream
(``comm/side_channel.py``) and not for one piece a peer. Urgent streams, and those that all ranks wait for, do not.

Memory: a sender holds one block and at most ``window_bytes`` of gradients, a
receiver one message beside the copies it has received.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.side_channel import SideChannel
from megatron.elastic.engine.generation.migration import Migration
from megatron.elastic.platform.threads import OS_THREADS, Event, Threads
from megatron.elastic.state.block_copy import BlockCopy
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.receiver import BlockReceiver
from megatron.elastic.state.record import StepRecord
from megatron.elastic.state.sender import BlockSender

__all__ = ["Moved", "Streams"]

_PATIENCE = 0.05
"""Seconds after which a waiting sender checks again whether it has to send."""


@dataclass(frozen=True)
class Moved:
    """A migration that has ended, with this rank's times."""

    migration: Migration
    bytes_received: int
    """Bytes of state in added copies."""
    background: float
    """Seconds from its begin to the end of the step whose vote named its target, without the time of waiting."""
    seconds: Mapping[str, float]
    """Seconds this rank waited, by stage: ``finish`` (the last bytes, before shipping), ``switch`` (plan, modules
    and groups, after the vote), ``certificate`` (after the step's gather)."""

    @property
    def stall(self) -> float:
        """Seconds this rank waited in all."""
        return sum(self.seconds.values())


class _Incoming:
    """One receiver on a thread of its own."""

    def __init__(
        self,
        receiver: BlockReceiver,
        blocks: tuple[BlockKey, ...],
        idle: Event,
        urgent: bool,
        threads: Threads,
    ) -> None:
        self.receiver, self.blocks, self._idle, self._urgent = receiver, blocks, idle, urgent
        self.error: Exception | None = None
        self.thread = threads.start(f"elastic-from-{receiver.source}", self._run)

    def _run(self) -> None:
        try:
            while self.receiver.take():
                if self._urgent:  # a recovery can use a copy as soon as it is verified
                    self.receiver.verify()
            if not self._urgent:
                self._idle.wait()
            self.receiver.verify()
        except Exception as error:  # raised again on the training thread
            self.error = error


class _Turns:
    """Lets one sender of a rank send at a time, so that a step's message waits for one piece of all its streams."""

    def __init__(self, threads: Threads, over: bool) -> None:
        self._changed = threads.condition()
        self._taken, self._over = False, over

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for this thread's turn, which is that of no other thread inside the context."""
        with self._changed:
            while self._taken and not self._over:
                self._changed.wait(_PATIENCE)
            self._taken = mine = not self._over
        try:
            yield
        finally:
            if mine:
                with self._changed:
                    self._taken = False
                    self._changed.notify_all()

    def end(self) -> None:
        """Let all senders send at once from now on: no step is under way beside them."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class _Outgoing:
    """One sender on a thread of its own."""

    def __init__(
        self,
        sender: BlockSender,
        channel: SideChannel,
        given_up: Event,
        link_is_free: Event,
        turns: _Turns,
        threads: Threads,
    ) -> None:
        self.sender, self._channel, self._turns = sender, channel, turns
        self._given_up, self._link_is_free, self._threads = given_up, link_is_free, threads
        self.bytes, self.seconds = 0, 0.0
        """Bytes of the bases that were sent, and the seconds it took."""
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
        with self._turns.taken():
            moved = self.sender.pump()
        left = before - self.sender.pending_bytes
        if moved and left > 0:
            self.bytes, self.seconds = self.bytes + left, self.seconds + self._threads.monotonic() - began
        return moved


class Streams:
    """This rank's streams in one migration. For the training thread.

    Every member makes one at the same boundary, even if it neither sends nor receives.
    """

    def __init__(
        self,
        migration: Migration,
        pool: StatePool,
        fabric: Fabric,
        number: int,
        window_bytes: int,
        held: bool = False,
        threads: Threads = OS_THREADS,
    ) -> None:
        """Start the streams. ``held``: nothing is sent before :meth:`release`."""
        self.migration = migration
        self.began = threads.monotonic()
        self._given_up = threads.event()
        self._link_is_free = threads.event()
        self._idle = threads.event()
        """Set once this rank has computed and has processor time to spare."""
        self._held, self._free = held, True
        if not held:
            self._link_is_free.set()
        urgent = migration.urgent
        self._turns = _Turns(threads, over=urgent)
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
                self._outgoing.append(
                    _Outgoing(sender, channel, self._given_up, self._link_is_free, self._turns, threads)
                )

    def prepare(self) -> None:
        """Allocate memory for the copies and bases of held streams. On any thread, beside a step."""
        if self._held:
            for arriving in self._incoming:
                arriving.receiver.prepare(arriving.blocks)
            for leaving in self._outgoing:
                leaving.sender.allocate()

    @property
    def held(self) -> bool:
        """True if nothing may be sent yet."""
        return self._held

    def copy_bases(self) -> None:
        """Copy the bases that this rank sends. On any thread, beside a committed step."""
        for part in self._outgoing:
            part.sender.prepare()

    def release(self) -> None:
        """Start held streams. Idempotent."""
        self._held = False
        self.link_is_free(self._free)

    def ready(self, seconds: float, bytes_a_second: float) -> bool:
        """Return whether this rank's bases are sent, or should be within about ``seconds`` of computing.

        What is late is waited for by all ranks. A further step costs the gradients of the bases that are sent, which
        travel beside its successor. Raises the error of a thread that failed.
        """
        self._raise_findings()
        pending = sum(part.sender.pending_bytes for part in self._outgoing)
        return pending <= seconds * bytes_a_second

    def pace(self, usual: float) -> float:
        """Return the bytes a second at which this rank sent bases beside steps; ``usual`` if it sent none."""
        seconds = max((part.seconds for part in self._outgoing), default=0.0)
        return sum(part.bytes for part in self._outgoing) / seconds if seconds else usual

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks that this one sends to or receives from."""
        sources = {part.receiver.source for part in self._incoming}
        return tuple(sorted(sources | {part.sender.peer for part in self._outgoing}))

    @property
    def bytes_received(self) -> int:
        """Bytes of state in the copies received so far."""
        return sum(copy.made.state.nbytes for copy in self.received.values())

    @property
    def received(self) -> dict[BlockKey, BlockCopy]:
        """Copies received so far. They do not count yet."""
        return {key: copy for part in self._incoming for key, copy in list(part.receiver.blocks.items())}

    def link_is_free(self, free: bool) -> None:
        """Send only while ``free``, unless gradients pile up or the copies are urgent."""
        self._free = free = free or self.migration.urgent
        (self._idle.clear if free else self._idle.set)()
        (self._link_is_free.set if free and not self._held else self._link_is_free.clear)()

    def conclude(self, version: int) -> None:
        """Have senders bring all added copies to ``version``, the boundary's; the threads send the rest."""
        for leaving in self._outgoing:
            leaving.sender.conclude(version)

    def finish(self) -> None:
        """Wait until all added copies are at that version. Raises ``CommError``, ``TransferError``."""
        self._channel.hurry()
        self._turns.end()
        self.release()
        self.link_is_free(True)
        self._idle.set()
        for thread in (*(part.thread for part in self._outgoing), *(part.thread for part in self._incoming)):
            thread.join()
        self._raise_findings()

    def keep(self, record: StepRecord) -> dict[BlockKey, BlockCopy]:
        """Return the copies that are whole, verified and at ``record``'s version; call after :meth:`abandon`."""
        return {key: copy for part in self._incoming for key, copy in part.receiver.keep(record).items()}

    def abandon(self) -> None:
        """End the streams without waiting for their threads; no copy counts. Idempotent.

        Keep this object until the next edit: messages on their way still use its buffers.
        """
        self._given_up.set()
        self._idle.set()
        self._turns.end()
        self._channel.give_up()
        for part in self._outgoing:
            part.sender.close()

    def _raise_findings(self) -> None:
        ends = [part.error for part in self._incoming] + [part.error for part in self._outgoing]
        errors = [error for error in ends if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, CommError)):
            raise error
