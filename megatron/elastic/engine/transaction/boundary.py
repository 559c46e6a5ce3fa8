"""Between two steps: everything that changes who is here, who holds what and who computes what (DESIGN §6, §7).

    come and go   newcomers are let in as the last vote agreed, who was asked to leave goes
    proceed       of a movement that all are ready for the last follows: the vote of this step names its target
    move          copies that are missing begin; else what balance, a better cut or a leaving rank ask for
    pace          plans and clocks follow measured speeds

Every rank decides from the record and from what all know alike, so nobody asks anybody.
"""

from __future__ import annotations

from megatron.elastic.comm.errors import CommError
from megatron.elastic.engine.compute.vote import leaving_of
from megatron.elastic.engine.generation.repartition import Recut, better_assignment, everybody_is_here
from megatron.elastic.engine.transaction.context import Position
from megatron.elastic.engine.transaction.migrate import Mover
from megatron.elastic.engine.transaction.rebalance import Pacing
from megatron.elastic.engine.transaction.recover import Regroup
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.search.steady import DecisionOptions

__all__ = ["Boundary"]


class Boundary:
    """``considered``: the generation in which units are where they should be to begin with, or -1."""

    def __init__(self, position: Position, mover: Mover, pacing: Pacing, regroup: Regroup, considered: int) -> None:
        self._position = position
        self._mover = mover
        self._pacing = pacing
        self._regroup = regroup
        self._considered = considered
        """Generation in which it was last asked whether units should change place."""
        self._refused: tuple[int, ...] = ()
        """Ranks whose wish to leave was turned down last."""

    def cross(self) -> None:
        """Pass this boundary. Raises ``Released`` on ranks that leave here, and what a recovery raises."""
        at = self._position
        agreed = at.record.agreed if at.heeded < at.record.version else ()
        at.heeded = at.record.version
        if "join" in agreed:
            # No phase of its own, nor is leaving: whoever is kept from it by a loss is not a phase behind afterwards.
            self._regroup.ask("join")
        self._mover.proceed()
        self._move(self._part(leaving_of(agreed)))
        self._pacing.at_boundary()

    def _wait_for_movement(self) -> None:
        at = self._position
        with at.timer.phase("movement"):
            try:
                self._mover.conclude()
                self._mover.arrive()
            except CommError as error:
                self._regroup.recover(error)

    def _move(self, leaving: tuple[int, ...]) -> None:
        """Begin what is asked for, unless something moves already."""
        at = self._position
        if self._mover.under_way:
            return
        # Some hear of a loss between steps, others in one: the first boundary that is the same for all follows a vote.
        unsettled = at.unsettled and at.record.version > at.settled_at
        if unsettled and self._mover.replenish():
            return
        recut = None if leaving else self._recut()
        if recut is not None:
            at.listener.recut(at.record, at.standing, recut)
        if recut is not None or unsettled or self._holds_state(leaving):
            target = None if recut is None else recut.target
            begun = self._mover.begin(at.recovery.movement(at.standing, target, leaving))
            at.unsettled = False
            if begun and at.recovery.config.migration == "blocking":
                self._wait_for_movement()

    def _recut(self) -> Recut | None:
        """Units that should change place; asked once a generation, when it is time, by all ranks at one boundary."""
        recovery, standing = self._position.recovery, self._position.standing
        asked, patience = self._considered == standing.generation, recovery.config.steps_before_migration
        if asked or patience < 0 or recovery.config.policy != "elaswave":
            return None
        steps = self._position.record.version - self._position.settled_at
        due = everybody_is_here(standing.assignment, standing.living) or steps >= patience
        if not due or steps == 0:  # before a vote of this generation not everybody knows the same measurements
            return None
        self._considered = standing.generation
        costs = self._pacing.measured or recovery.profile
        speeds = dict(standing.speeds())
        try:
            return better_assignment(
                standing.assignment, standing.living, costs, recovery.machine.memory_bytes, speeds, self._outlook()
            )
        except PlanError:  # nothing better is known to fit; the plan that runs goes on
            return None

    def _outlook(self) -> DecisionOptions:
        """How long a cut made now is of use: to the next expected change, or to the end of the run."""
        at = self._position
        steps = at.tools.settings.steps
        return DecisionOptions(
            horizon_ns=round(at.recovery.config.mean_time_between_losses * 1e9),
            horizon_steps=None if steps is None else max(0, steps - at.record.version),
        )

    def _part(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks leave on request, once nothing is left of them; returns those whose state has to move first."""
        at = self._position
        leaving = tuple(rank for rank in asked if rank in at.standing.living)
        obstacle = at.recovery.indispensable(at.standing, leaving) if leaving else ""
        if obstacle:
            if self._refused != leaving:
                at.listener.noticed(f"ranks {', '.join(map(str, leaving))} cannot leave: {obstacle}")
            self._refused = leaving
            at.recovery.membership.request("stay")
            return ()
        if leaving and not self._mover.under_way and not self._holds_state(leaving):
            self._regroup.ask("leave")
        return leaving

    def _holds_state(self, ranks: tuple[int, ...]) -> bool:
        copies = self._position.standing.placement.copies.values()
        return bool(ranks) and any(rank in copy.ranks for copy in copies for rank in ranks)
