"""The boundary between two steps: changes of membership, placement and plan (docs/design.md §6, §7).

    membership   admit newcomers as the last vote agreed; release ranks that were asked to leave
    proceed      conclude a migration that all ranks are ready for: the vote of the next step names its target
    move         begin missing copies; else a migration for balance, for a leaving rank, for other sizes, a better cut,
                 or more even homes of experts
    rebalance    change plans and clocks according to measured speeds

Every rank decides from the record and from values that are equal on all ranks, so no message is needed.
"""

from __future__ import annotations

from megatron.elastic.comm.errors import CommError
from megatron.elastic.control.requests import Request
from megatron.elastic.engine.generation.repartition import Recut, all_cells_present, better_assignment
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.engine.transaction.even_homes import EvenHomes
from megatron.elastic.engine.transaction.migrate import Migrator
from megatron.elastic.engine.transaction.rebalance import Rebalancer
from megatron.elastic.engine.transaction.recover import Recovery
from megatron.elastic.engine.transaction.reshape import Reshaping
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.search.steady import DecisionOptions
from megatron.elastic.platform.garbage import garbage_later
from megatron.elastic.state.record import Agreed

__all__ = ["Boundary"]


class Boundary:
    """The changes of one rank at a boundary. ``considered``: generation whose cut needs no review, or -1."""

    def __init__(
        self, context: Context, migrator: Migrator, rebalancer: Rebalancer, recovery: Recovery, considered: int
    ) -> None:
        self._context = context
        self._migrator = migrator
        self._rebalancer = rebalancer
        self._recovery = recovery
        self._considered = considered
        """Generation in which the cut was last reviewed."""
        self._refused: tuple[int, ...] = ()
        """Ranks whose request to leave was refused last."""
        self._reshaping = Reshaping(context)
        self._homes = EvenHomes(context)

    @garbage_later()
    def cross(self) -> None:
        """Pass this boundary. Raises ``Released`` on ranks that leave here, and the errors of a recovery."""
        at = self._context
        agreed = at.record.agreed if at.acted_on < at.record.version else Agreed()
        at.acted_on = at.record.version
        if agreed.join:
            # Neither joining nor leaving is a phase: a rank that a loss keeps from it is not a phase behind afterwards.
            self._recovery.ask(Request.JOIN)
            agreed = Agreed()  # newcomers begin behind this boundary: what else was agreed waits for a vote of theirs
        self._migrator.proceed()
        self._move(self._part(agreed.leave), agreed.reshape)
        self._rebalancer.at_boundary()

    def _wait_for_migration(self) -> None:
        at = self._context
        with at.timer.phase("migration"):
            try:
                self._migrator.conclude()
                self._migrator.arrive()
            except CommError as error:
                self._recovery.recover(error)

    def _move(self, leaving: tuple[int, ...], reshape: tuple[int, ...]) -> None:
        """Begin the migration that is due, unless one is under way."""
        at = self._context
        if self._migrator.under_way:
            return
        # Some ranks learn of a loss between steps, others in one: the first boundary common to all follows a vote.
        needs_rebalance = at.needs_rebalance and at.record.version > at.settled_at
        if needs_rebalance and self._migrator.replenish():
            return
        reshaped = None if leaving else self._reshaping.target(reshape)
        recut = None if leaving or reshaped else self._recut()
        if recut is not None:
            at.listener.recut(at.record, at.view, recut)
        target = reshaped if recut is None else recut.target
        if target is None and not leaving and not needs_rebalance:
            target = self._homes.target()
        if target is not None or needs_rebalance or self._holds_state(leaving):
            begun = self._migrator.begin(at.views.migration(at.view, target, leaving))
            if begun and reshaped is not None:
                self._reshaping.begun(reshape, reshaped)
            at.needs_rebalance = False
            if begun and at.views.config.migration == "blocking":
                self._wait_for_migration()

    def _recut(self) -> Recut | None:
        """Return the better cut, if any. Computed once a generation, by all ranks at the same boundary."""
        views, view = self._context.views, self._context.view
        asked, patience = self._considered == view.generation, views.config.steps_before_migration
        if asked or not views.moves_units:
            return None
        steps = self._context.record.version - self._context.settled_at
        due = all_cells_present(view.assignment, view.living) or steps >= patience
        if not due or steps == 0:  # before a vote of this generation measurements differ between ranks
            return None
        self._considered = view.generation
        costs = self._rebalancer.measured or views.profile
        speeds = dict(view.speeds())
        try:
            memory, sizes = views.hardware.memory_bytes, views.sizes
            return better_assignment(view.assignment, view.living, costs, memory, speeds, self._outlook(), sizes)
        except PlanError:  # no better cut fits; the present plan goes on
            return None

    def _outlook(self) -> DecisionOptions:
        """The time over which a new cut must pay off: to the next expected loss, or to the end of the run."""
        at = self._context
        steps = at.tools.settings.steps
        return DecisionOptions(
            horizon_ns=round(at.views.config.mean_time_between_losses * 1e9),
            horizon_steps=None if steps is None else max(0, steps - at.record.version),
        )

    def _part(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """Release ranks that were asked to leave and hold no copies; return those whose copies have to move first."""
        at = self._context
        leaving = tuple(rank for rank in asked if rank in at.view.living)
        obstacle = at.views.indispensable(at.view, leaving) if leaving else ""
        if obstacle:
            if self._refused != leaving:
                at.listener.noticed(f"ranks {', '.join(map(str, leaving))} cannot leave: {obstacle}")
            self._refused = leaving
            at.agreement.membership.request(Request.STAY)
            return ()
        if leaving and not self._migrator.under_way and not self._holds_state(leaving):
            self._recovery.ask(Request.LEAVE)
        return leaving

    def _holds_state(self, ranks: tuple[int, ...]) -> bool:
        copies = self._context.view.placement.copies.values()
        return bool(ranks) and any(rank in copy.ranks for copy in copies for rank in ranks)
