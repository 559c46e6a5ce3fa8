"""Measured speeds of the cells, and the change of the plan that follows at the next boundary (docs/design.md §7).

Every rank takes in the same sums of votes and computes the new plan at the same boundary
without a message; the next vote compares the plans. A new generation keeps the speeds that
the record carries. It discards the measurements behind them, which newcomers lack.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from megatron.elastic.engine.compute.clocks import Clocks
from megatron.elastic.engine.compute.vote import Tally
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.view import with_plan
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.plan.model import Cell, Profile
from megatron.elastic.plan.pace import Pace, measured_profile

__all__ = ["Rebalancer"]


@dataclass
class Rebalancer:
    """Speeds, costs and clocks of the cells of one generation."""

    context: Context
    pace: Pace = field(default_factory=Pace)
    """Measured speeds of the cells, from the votes of this generation."""
    clocks: Clocks | None = None
    """The frequency axis; None where it is off."""
    measured: Profile | None = None
    """Measured costs of units in this generation; None until a vote in which all ranks had steady clocks."""
    _clocked: tuple[tuple[int, int], ...] | None = None
    """(cell, kHz) to set at the next boundary, if the clocks change."""
    _changed: bool = False
    """True if published speeds changed, so that the next boundary plans again."""

    def clocked_cells(self) -> tuple[int, ...]:
        """Cells that have a slot for their clock in the vote."""
        return () if self.clocks is None else tuple(cell.id for cell in self.context.view.plan.cells)

    def add_to(self, tally: Tally) -> None:
        """Add this rank's clock to its tally."""
        cell = self.context.view.cell
        if self.clocks is not None and cell is not None:
            tally.clocks = {cell.id: self.clocks.state()}

    def observe(self, total: Tally) -> None:
        """Take in a vote's sum. The next boundary acts on it, alike on every rank."""
        plan, times, profile = self.context.view.plan, total.times, self.context.views.profile
        if self.clocks is not None:
            base = self.context.view.assignment.base
            short = _ranks(plan.cells) < _ranks(base.cells[: base.computing])
            chosen = self.clocks.observe(plan, times, total.clocks, profile, short)
            self._clocked = None if chosen is None else chosen.frequencies_khz
            times = self.clocks.at_nominal(times)
        if total.steady == total.voters:
            self.measured = measured_profile(plan, times, profile)
            self._changed = self.pace.observe(plan, times) or self._changed

    def follow(self, target: Assignment) -> None:
        """Discard the speeds of cells that have other ranks under ``target``, which the vote's record is to name."""
        before, now = self.context.view.assignment.cells, target.cells
        same = {number for number in before.keys() & now if before[number].ranks == now[number].ranks}
        self.pace.tracker.forget((before.keys() | now) - same)  # a reshape has other cells altogether

    def at_boundary(self) -> None:
        """Plan again if speeds changed, and set this rank's clock."""
        at, clocked = self.context, self._clocked
        if self._changed:
            self._replan()
        elif clocked is not None:
            at.view = with_plan(at.view, replace(at.view.plan, frequencies_khz=clocked))
        if self.clocks is not None:
            self.clocks.apply(at.view.plan, at.view.cell)
        self._clocked = None

    def _replan(self) -> None:
        at, before, self._changed = self.context, self.context.view, False
        with at.timer.phase("plan"):
            at.view = at.views.replan(before, at.record)
        at.listener.paced(at.record, before, at.view)

    def renew(self) -> None:
        """Begin a generation: keep its record's speeds and discard measurements."""
        at = self.context
        self._changed, self._clocked, self.measured = False, None, None
        if self.clocks is not None:
            self.clocks.forget()
        self.pace.resume(at.view.speeds(), at.record.version)

    def close(self) -> None:
        """Restore this rank's clock before it leaves. Idempotent."""
        if self.clocks is not None:
            self.clocks.restore()


def _ranks(cells: Iterable[Cell]) -> int:
    return sum(len(cell.ranks) for cell in cells)
