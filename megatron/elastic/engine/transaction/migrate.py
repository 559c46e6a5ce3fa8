"""The migrations of one rank, one after the other (:mod:`streams` describes the stages).

Their calls, in order::

    replenish in a recovery: begin the missing copies at once, before any other migration
    begin     at a boundary: start the streams, which run beside the steps; if layers move, from the next boundary on
    agree     in a step, for missing copies: once all ranks are ready, the vote of this step names the target
    conclude  at the boundary after the vote in which all ranks were ready: the next vote names the target
    arrive    in that step, before it is shipped: added copies count, though no vote has named them
    confirm   after the vote: every rank works under the target and drops the copies that leave
    prove     after the gather of that step: take a certificate
    forget    if the generation ends before the vote: keep the old configuration and the copies that arrived whole
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from megatron.elastic.engine.generation.configuration import Configuration
from megatron.elastic.engine.generation.migration import Migration
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.transaction.certify import Certifier
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.engine.transaction.phases import StepBody
from megatron.elastic.engine.transaction.protection import Exposure, Protected
from megatron.elastic.engine.transaction.streams import Moved, Streams
from megatron.elastic.platform.threads import Threads
from megatron.elastic.state.redundancy import short_of_mirrors
from megatron.elastic.state.transfer import commit, prune

__all__ = ["Migrator"]

_WINDOW_BYTES = 64 << 20
"""Bytes of gradients kept for copies on their way to one rank. Beyond that, blocks are sent anew later."""


class Migrator:
    """The migrations of one rank. For the training thread.

    Every rank calls every method except ``forget`` at the same place of the loop.
    """

    def __init__(self, context: Context, certifier: Certifier) -> None:
        self._context = context
        self._certifier = certifier
        self.due = False
        """True if all ranks are ready, so that the vote of the next step is to name the target."""
        self.coming: bool | None = None
        """Whether this rank said in :meth:`agree` of the present step that its part of missing copies is nearly there.
        None: the ranks did not have to agree on that."""
        self._streams: Streams | None = None
        """The migration under way."""
        self._concluded = False
        """True if the vote of the present step is to name its target."""
        self._seconds: dict[str, float] = {}
        """Seconds this rank has waited for it, by stage."""
        self._ended: Streams | None = None
        """A migration that the vote of the present step has ended."""
        self.came = frozenset[int]()
        """Units that some cell gained with it."""
        self._prepared = False
        """True if storage and modules for its target are made, or being made."""
        self._begun = 0
        """Number of migrations begun in this generation."""
        self._common = -1
        """Newest version that all ranks were known to have when the migration began or, later, was concluded."""
        self._pace = float(context.views.hardware.link_bytes_per_s)
        """Bytes a second at which state leaves this rank beside a step."""
        self._abandoned: list[Streams] = []
        """Kept until the next edit: only then does no peer write into their buffers."""
        self._exposure = Exposure(context.tools.fabric.rank, context.tools.threads.monotonic)
        self._arrived = 0
        self._gone: list[object] = []
        """Unused memory. It is released while this rank waits, since the kernel takes milliseconds to reclaim it."""

    @property
    def under_way(self) -> bool:
        """True if a migration has begun that no vote has ended yet."""
        return self._streams is not None

    @property
    def heading(self) -> Configuration:
        """The configuration that the vote of the present step is to name."""
        view = self._context.view
        return self._under_way().migration.target if self._concluded else view.configuration

    @property
    def has_ended(self) -> bool:
        """True if the vote of the present step has ended a migration."""
        return self._ended is not None

    def ready(self, seconds: float) -> bool:
        """Return whether this rank's part is done, or should be after ``seconds``, the computing time of a step.

        Raises the error of a stream that failed.
        """
        if self._streams is None:
            return False
        return self._streams.ready(seconds, self._streams.pace(self._pace))

    @property
    def bytes_received(self) -> int:
        """Bytes of state received in added copies so far, used or not."""
        return self._arrived + (0 if self._streams is None else self._streams.bytes_received)

    def begin(self, migration: Migration) -> bool:
        """Start ``migration`` in the background; none may be under way. Returns False if there is nothing to do."""
        if self._streams is not None:
            raise RuntimeError("a migration is under way")
        at = self._context
        if not migration.changes and migration.target.assignment == at.view.assignment:
            return False
        self._begun += 1
        self._common = at.record.version
        self._prepared = False
        held = migration.target.assignment != at.view.assignment
        self._streams = Streams(
            migration, at.tools.pool, at.tools.fabric, self._begun, _WINDOW_BYTES, held, at.tools.threads
        )
        at.tools.reach("in_migration_begin", at.record.version)
        return True

    def replenish(self) -> bool:
        """Begin the copies that a loss left missing; no migration may be under way. False if none is missing."""
        migration = self._context.views.replenishment(self._context.view)
        return migration is not None and self.begin(migration)

    def exposed(self, since: float, newcomers: Collection[int] = ()) -> None:
        """Start to measure the time with too few copies: their loss was noticed at ``since`` (monotonic seconds).

        ``newcomers`` joined after that.
        """
        at = self._context
        self._tell(self._exposure.settled(self._short(), at.view.living, at.record.version, since, newcomers))

    def _short(self) -> int:
        return len(self._context.views.short_of_mirrors(self._context.view))

    def _tell(self, protected: Protected | None) -> None:
        if protected is not None:
            self._context.listener.protected(self._context.record, self._context.view, protected)

    def agree(self, seconds: float) -> None:
        """Conclude an urgent migration between reducing and shipping, if all ranks have nearly sent their copies.

        The rest should take at most about ``seconds``, the computing time of this step; :meth:`arrive` waits for it.
        Otherwise the streams go on beside the next step. Collective if an urgent migration is under way. Raises
        ``CommError``.
        """
        streams, self.coming = self._streams, None
        if streams is None or self._concluded or not streams.migration.urgent:
            return
        self.coming = self.ready(seconds)
        if self._all_say(self.coming):
            self.conclude()

    def _all_say(self, coming: bool) -> bool:
        """Return whether ``coming`` is true on all living ranks. Collective."""
        at = self._context
        at.tools.publish("migration", at.view.living)
        ready = torch.tensor([float(coming)], dtype=torch.float64)
        dist.all_reduce(ready, group=at.tools.fabric.world)
        return int(ready.item()) == len(at.view.living)

    def named_in_time(self) -> tuple[bool | None, int]:
        """Return :attr:`coming`, and where that is not None the blocks that lack mirrors by :attr:`heading`."""
        if self.coming is None:
            return None, 0
        at = self._context
        return self.coming, len(short_of_mirrors(self.heading.placement, at.views.config.mirrors, at.view.living))

    def link_is_free(self) -> None:
        """Let streams send: this rank computes or is between steps and does not need the link.

        Memory, modules and the plan of the target are made now too: an accelerator leaves the processor idle, and
        after computing the reduction needs it.
        """
        if self._streams is None:
            return
        self._streams.link_is_free(True)
        if not self._prepared and not self._concluded:  # else it could be late
            made = partial(self._prepare, self._streams, self._context.view, self._context.body)
            self._context.tools.threads.start("elastic-prepare", made)
            self._prepared = True

    def link_is_taken(self) -> None:
        """Have streams pause: the step's messages need the link now."""
        self._gone.clear()
        if self._streams is None:
            return
        at = self._context
        self._streams.link_is_free(at.view.cell is None)

    def updated(self) -> None:
        """Copy the bases of a held migration while this rank waits for parameters: state is constant until the vote."""
        if self._streams is not None and self._streams.held:
            self._context.tools.threads.start("elastic-bases", self._streams.copy_bases)

    def voted(self, ready: bool) -> None:
        """Take in a vote. ``ready``: all ranks were ready, so the next vote may end the migration."""
        self.due = ready and self._streams is not None and not self._concluded

    def proceed(self) -> None:
        """At a boundary: conclude a migration that all ranks are ready for, else release held streams."""
        if self.due:
            self.conclude()
        elif self._streams is not None:
            self._streams.release()

    def conclude(self) -> None:
        """Have the next vote name the target; at a boundary or between reducing and shipping, as all ranks agreed."""
        self.due = False  # not a phase: a rank that a loss keeps from it does not repeat it
        streams, at = self._under_way(), self._context
        at.history.enter(streams.migration.target)
        self._common = at.record.version
        streams.conclude(at.record.version)
        streams.release()
        self._concluded, self._seconds = True, {}

    def arrive(self) -> None:
        """Wait for the added copies and count them from now on, if they are due. Raises ``CommError``."""
        if not self._concluded or "finish" in self._seconds:
            return
        streams, at = self._under_way(), self._context
        with _timed(self._seconds, "finish", at.tools.threads):
            at.tools.publish("migration", streams.peers)
            at.tools.reach("in_migration_finish", at.record.version)
            streams.finish()
            commit(at.tools.pool, streams.migration.changes, streams.received, at.record.version)

    def confirm(self) -> None:
        """Work under :attr:`heading`, which the vote has named, and drop all other copies."""
        at, version = self._context, self._context.record.version
        at.history.confirm(self.heading)
        at.tools.pool.forget_torn()
        self._gone.append(prune(at.tools.pool, self.heading.placement))
        if self._concluded:
            streams, before = self._under_way(), at.view.assignment
            with _timed(self._seconds, "switch", at.tools.threads):
                self._build_view()
            gained = streams.migration.target.assignment.gained(before)
            self._ended, self.came = streams, frozenset[int]().union(*gained.values())
            at.tools.reach("in_migration_switch", version)
        if self._exposure.open:
            self._tell(self._exposure.voted(self._short(), version))

    def prove(self) -> None:
        """Take a certificate after the step that ended a migration. Raises ``CertificateError``."""
        if self._ended is None:
            return
        at, streams, seconds = self._context, self._ended, self._seconds
        blocks = {change.block for change in streams.migration.changes if change.kind != "drop"}
        blocks |= {key for key in at.view.placement.copies if key[0] in self.came}
        with at.timer.phase("migration"), _timed(seconds, "certificate", at.tools.threads):
            self._certifier.certify("migration", blocks)
        self._ended, self.came = None, frozenset()
        beside = at.tools.threads.monotonic() - streams.began - sum(seconds.values())
        at.listener.moved(at.record, at.view, Moved(streams.migration, streams.bytes_received, beside, seconds))

    def forget(self, keep: bool = True) -> None:
        """End the migration under way without a vote, as its generation ends. Idempotent.

        With ``keep``, copies that arrived whole stay and count, as after :meth:`arrive`. Without it they are
        discarded: the generation goes on, and its placement does not name them.
        """
        if self._streams is not None:
            at, streams = self._context, self._streams
            self._abandoned.append(streams)
            self._end(streams)
            pool, kept = at.tools.pool, streams.keep(at.record)
            # In ``state`` mode ranks may go back before a version that not all have; an arrived copy cannot.
            keep = keep and (pool.snapshot == "gradient" or at.record.version == self._common)
            for copy in (copy for key, copy in kept.items() if keep and key not in pool):
                pool.take_in(copy)
        self._ended, self.came, self.due, self.coming = None, frozenset(), False, None
        self._context.tools.arena.spare = None

    def renew(self) -> None:
        """Release the buffers of abandoned migrations: after the edit no peer writes into them."""
        self._abandoned.clear()
        self._begun = 0

    def _prepare(self, streams: Streams, view: View, body: StepBody) -> None:
        at, target = self._context, streams.migration.target
        at.views.prepare(view, target.assignment)
        streams.prepare()
        body.shipment_to(target.placement).prepare()
        if self._streams is not streams:  # it ended meanwhile: nothing will take this memory
            at.tools.messages.clear()

    def _build_view(self) -> None:
        """End the migration and work under its target."""
        streams, arena = self._under_way(), self._context.tools.arena
        self._end(streams)
        if arena.device.type == "cpu":  # device memory is scarce and freed at once
            self._gone.append((arena.parameters, arena.gradients))
        self._context.take_configuration(streams.migration.target)

    def _end(self, streams: Streams) -> None:
        streams.abandon()
        self._gone.append(streams)
        self._pace = streams.pace(self._pace)
        self._arrived += streams.bytes_received
        self._streams, self._concluded = None, False
        self._context.tools.messages.clear()  # the last: a thread that still prepares clears if it sees no streams

    def _under_way(self) -> Streams:
        if self._streams is None:
            raise RuntimeError("no migration is under way, but the vote counted ranks as ready for one")
        return self._streams


@contextmanager
def _timed(seconds: dict[str, float], name: str, threads: Threads) -> Iterator[None]:
    began = threads.monotonic()
    yield
    seconds[name] = threads.monotonic() - began
