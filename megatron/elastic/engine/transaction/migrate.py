"""One migration after the other, as one rank takes part in them (the stages are those of :mod:`migration`).

replenish in a recovery: copies that are missing begin at once, before anything else moves
begin     at a boundary; its streams run beside the steps, where layers change place from the next boundary on
agree     in a step, where copies were missing: when all are ready, this step's vote names the target
conclude  at the boundary after the vote in which all were ready: the next one names the target
arrive    in that step, before it is shipped: added copies count, though no vote has named them
confirm   the vote: everybody stands on the target, copies that were to go are gone
prove     parameters are gathered under it: a certificate
forget    the generation ended before the vote: what was in force still is, and copies that came whole are kept
"""

from __future__ import annotations

import time
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
from megatron.elastic.engine.transaction.protection import Exposure, Protected
from megatron.elastic.engine.transaction.streams import Moved, Streams
from megatron.elastic.state.transfer import commit, prune

__all__ = ["Migrator"]

_WINDOW_BYTES = 64 << 20
"""Gradients kept for copies under way to one rank, before blocks are given up and sent again later."""


class Migrator:
    """Belongs to the training thread; every method but ``forget`` is called at the same place on every rank."""

    def __init__(self, context: Context, certifier: Certifier) -> None:
        self._context = context
        self._certifier = certifier
        self.due = False
        """All ranks are ready: the vote of the next step is to name the target."""
        self._streams: Streams | None = None
        """The migration under way."""
        self._concluded = False
        """The vote of the present step is to name its target."""
        self._seconds: dict[str, float] = {}
        """What this rank has waited for it."""
        self._ended: Streams | None = None
        """A migration that the vote of the present step has ended."""
        self.came = frozenset[int]()
        """Units that came to somebody with it."""
        self._prepared = False
        """Storage and modules for its target are made, or being made."""
        self._begun = 0
        """Migrations of this generation."""
        self._common = -1
        """Newest version that all ranks were known to have when the migration under way began, or was concluded."""
        self._pace = float(context.views.hardware.link_bytes_per_s)
        """Bytes a second at which state leaves this rank beside a step."""
        self._abandoned: list[Streams] = []
        """Kept until the next edit has made sure that nobody writes into their buffers."""
        self._exposure = Exposure(context.tools.fabric.rank)
        self._arrived = 0
        self._gone: list[object] = []
        """Memory that nobody uses any more: the kernel takes milliseconds to take it back."""

    @property
    def under_way(self) -> bool:
        """Whether a migration has begun that no vote has ended yet."""
        return self._streams is not None

    @property
    def heading(self) -> Configuration:
        """What the vote of the present step is to name."""
        view = self._context.view
        return self._under_way().migration.target if self._concluded else view.configuration

    def ready(self, seconds: float) -> bool:
        """Whether this rank's part is done, or should be while the next step computes ``seconds``, as this one did.

        Raises what a stream ran into.
        """
        if self._streams is None:
            return False
        return self._streams.ready(seconds, self._streams.pace(self._pace))

    @property
    def bytes_received(self) -> int:
        """Bytes of state received in added copies so far, used or not."""
        return self._arrived + (0 if self._streams is None else self._streams.bytes_received)

    def begin(self, migration: Migration) -> bool:
        """Start ``migration`` in the background; with none under way. False where there is nothing to do."""
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
        """Begin the copies that a loss left missing; with none under way. False where none is missing."""
        migration = self._context.views.replenishment(self._context.view)
        return migration is not None and self.begin(migration)

    def exposed(self, since: float, newcomers: Collection[int] = ()) -> None:
        """Copies were lost, noticed at ``since`` (monotonic seconds): time until they are made anew counts from there.

        ``newcomers`` came later.
        """
        at = self._context
        self._tell(self._exposure.settled(self._short(), at.view.living, at.record.version, since, newcomers))

    def _short(self) -> int:
        return len(self._context.views.short_of_mirrors(self._context.view))

    def _tell(self, protected: Protected | None) -> None:
        if protected is not None:
            self._context.listener.protected(self._context.record, self._context.view, protected)

    def agree(self, seconds: float) -> None:
        """Between reducing and shipping: urgent copies that are here, or nearly, on all ranks count from here on.

        What is left is waited for, about ``seconds`` at most: what this step took to compute. Else streams go on beside
        the next step. Collective where urgent copies are under way. Raises ``CommError``.
        """
        streams, at = self._streams, self._context
        if streams is None or self._concluded or not streams.migration.urgent:
            return
        at.tools.publish("migration", at.view.living)
        ready = torch.tensor([float(self.ready(seconds))], dtype=torch.float64)
        dist.all_reduce(ready, group=at.tools.fabric.world)
        if int(ready.item()) == len(at.view.living):
            self.conclude()

    def link_is_free(self) -> None:
        """This rank computes, or is between steps: streams are in nobody's way."""
        if self._streams is not None:
            self._streams.link_is_free(True)

    def link_is_taken(self) -> None:
        """This rank has computed and waits for messages of the step: it is processor time that there is now."""
        self._gone.clear()
        if self._streams is None:
            return
        at = self._context
        self._streams.link_is_free(at.view.cell is None)
        if not self._prepared and not self._concluded:  # else it could be late
            made = partial(self._prepare, self._streams, at.view)
            at.tools.threads.start("elastic-prepare", made)
            self._prepared = True

    def updated(self) -> None:
        """State stays as it is until the next vote, and this rank waits for parameters."""
        if self._streams is not None and self._streams.held:
            self._context.tools.threads.start("elastic-bases", self._streams.copy_bases)

    def voted(self, ready: bool) -> None:
        """The vote of a step is known; ``ready``: all were, so that the next one may end the migration."""
        self.due = ready and self._streams is not None and not self._concluded

    def proceed(self) -> None:
        """At a boundary: what all ranks are ready for is concluded, what was held begins."""
        if self.due:
            self.conclude()
        elif self._streams is not None:
            self._streams.release()

    def conclude(self) -> None:
        """At a boundary, or between reducing and shipping, as all ranks agreed."""
        self.due = False  # no phase of its own: whoever was kept from it by a loss does not come back to it
        streams, at = self._under_way(), self._context
        at.history.enter(streams.migration.target)
        self._common = at.record.version
        streams.conclude(at.record.version)
        streams.release()
        self._concluded, self._seconds = True, {}

    def arrive(self) -> None:
        """Added copies count from here on; nothing to do where none are due. Raises ``CommError``."""
        if not self._concluded or "finish" in self._seconds:
            return
        streams, at = self._under_way(), self._context
        with _timed(self._seconds, "finish"):
            at.tools.publish("migration", streams.peers)
            at.tools.reach("in_migration_finish", at.record.version)
            streams.finish()
            commit(at.tools.pool, streams.migration.changes, streams.received, at.record.version)

    def gather_owners(self) -> None:
        """Blocks that only ranks elsewhere kept come to those who compute their units, now: nobody can go on before.

        What they leave stays as it is until the next vote, which does not name it.
        """
        views, view = self._context.views, self._context.view
        if views.owner_is_outside_group(view):
            self.begin(views.migration(view))
            self.conclude()
            self.arrive()
            self._build_view()

    def confirm(self) -> None:
        """The vote has named :attr:`heading`: everybody stands on that, and other copies go."""
        at, version = self._context, self._context.record.version
        at.history.confirm(self.heading)
        at.tools.pool.forget_torn()
        self._gone.append(prune(at.tools.pool, self.heading.placement))
        if self._concluded:
            streams, before = self._under_way(), at.view.assignment
            with _timed(self._seconds, "stand"):
                self._build_view()
            gained = streams.migration.target.assignment.gained(before)
            self._ended, self.came = streams, frozenset[int]().union(*gained.values())
            at.tools.reach("in_migration_switch", version)
        if self._exposure.open:
            self._tell(self._exposure.voted(self._short(), version))

    def prove(self) -> None:
        """The step is over that ended a migration: all compare what they hold. Raises ``CertificateError``."""
        if self._ended is None:
            return
        at, streams, seconds = self._context, self._ended, self._seconds
        blocks = {change.block for change in streams.migration.changes if change.kind != "drop"}
        blocks |= {key for key in at.view.placement.copies if key[0] in self.came}
        with at.timer.phase("migration"), _timed(seconds, "certificate"):
            self._certifier.certify("migration", blocks)
        self._ended, self.came = None, frozenset()
        beside = time.monotonic() - streams.began - sum(seconds.values())
        at.listener.moved(at.record, at.view, Moved(streams.migration, streams.bytes_received, beside, seconds))

    def forget(self, keep: bool = True) -> None:
        """The generation ends: the next one begins what it lacks. Idempotent.

        Copies that have come whole stay: they count from here on, as they would after :meth:`arrive`. Not without
        ``keep``: the generation goes on, whose placement does not name them.
        """
        if self._streams is not None:
            at, streams = self._context, self._streams
            self._abandoned.append(streams)
            self._end(streams)
            pool, kept = at.tools.pool, streams.keep(at.record)
            # In ``state`` mode others may go back behind a version that not all have; a copy that came cannot.
            keep = keep and (pool.snapshot == "gradient" or at.record.version == self._common)
            for copy in (copy for key, copy in kept.items() if keep and key not in pool):
                pool.take_in(copy)
        self._ended, self.came, self.due = None, frozenset(), False
        self._context.tools.arena.spare = None

    def renew(self) -> None:
        """The next generation's links are edited: nothing of the last one writes here any more."""
        self._abandoned.clear()
        self._begun = 0

    def _prepare(self, streams: Streams, view: View) -> None:
        self._context.views.prepare(view, streams.migration.target.assignment)
        streams.prepare()

    def _build_view(self) -> None:
        """The target of what moved is what everybody works under."""
        streams, arena = self._under_way(), self._context.tools.arena
        self._end(streams)
        if arena.device.type == "cpu":  # a device's memory is taken back at once, and scarce
            self._gone.append((arena.parameters, arena.gradients))
        self._context.take_configuration(streams.migration.target)

    def _end(self, streams: Streams) -> None:
        streams.abandon()
        self._gone.append(streams)
        self._pace = streams.pace(self._pace)
        self._arrived += streams.bytes_received
        self._streams, self._concluded = None, False

    def _under_way(self) -> Streams:
        if self._streams is None:
            raise RuntimeError("no migration is under way: ranks are counted ready only while something moves")
        return self._streams


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began
