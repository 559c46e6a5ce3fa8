"""Steps with no barrier between them: each stage steps its optimizer when its own gradients are there.

Idea: ReCycle's staggered optimizer (Gandhi et al., SOSP 2024, arXiv 2405.14009). A cell begins its next step when every
cell that computes one of its units has the gradients of this step; it does not wait for other stages. So the first
micro-batches of the next step fill the bubbles in which late stages finish this one. The tables are those of one
step, run again and again (``timing.walk``), each cell from the moment at which it may begin.

The begin times of a step follow from those of the step before by maxima and sums alone. Every cell depends on every
other: stages of a pipeline in both directions, replicas through the units that they share. So after finitely many steps
the begin times repeat, shifted by a constant (Baccelli et al., Synchronization and Linearity, 1992, chapter 3). This
constant is exactly the time of a step in the long run; nothing is averaged.

The engine has a barrier: its vote (``docs/planning.md`` says why it stays).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.elastic.plan.cost import plan_costs
from megatron.elastic.plan.model import Plan, Profile
from megatron.elastic.plan.schedule.timing import walk

__all__ = ["Regime", "regime", "unit_peers"]


@dataclass(frozen=True)
class Regime:
    """The regime of staggered steps: every ``steps`` steps all cells begin ``shift_ns`` later than before."""

    shift_ns: int
    steps: int
    begins: Mapping[int, int]
    """By cell, ns after the first cell: when each begins the first of these steps."""
    settled_after: int
    """Steps until then, from one that all cells began together."""

    @property
    def period_ns(self) -> int:
        """Time of a step in the long run, ns (rounded up)."""
        return -(-self.shift_ns // self.steps)


def unit_peers(plan: Plan, tied: Sequence[tuple[int, int]] = ()) -> dict[int, frozenset[int]]:
    """By cell with a table: all cells (itself too) whose gradients its units need. ``tied`` units have one gradient."""
    same = {second: first for first, second in tied}
    spans = {(piece.cell, piece.first, piece.end) for piece in plan.pieces}
    units: dict[int, set[int]] = {cell: set() for cell, _ in plan.tables}
    cells: dict[int, set[int]] = {}
    for cell, first, end in spans:
        for unit in range(first, end):
            unit = same.get(unit, unit)
            units[cell].add(unit)
            cells.setdefault(unit, set()).add(cell)
    return {cell: frozenset().union(*(cells[unit] for unit in own)) for cell, own in units.items()}


def regime(plan: Plan, profile: Profile, tied: Sequence[tuple[int, int]] = ()) -> Regime:
    """The regime of ``plan`` when no step waits for stages that share no unit.

    Reduction and update cost nothing, as in ``timing``. Raises ``ValueError`` if the tables deadlock.
    """
    costs = plan_costs(plan.pieces, plan.edges, plan.cells, profile)
    peers = unit_peers(plan, tied)
    begins = dict.fromkeys(peers, 0)
    seen: dict[tuple[int, ...], tuple[int, int]] = {}
    step = 0
    while True:
        first = min(begins.values())
        offsets = tuple(begin - first for begin in begins.values())
        if offsets in seen:
            before, then = seen[offsets]
            return Regime(first - then, step - before, dict(zip(begins, offsets, strict=True)), before)
        seen[offsets] = step, first
        ends = walk(plan.tables, costs, begins=begins).ends
        done = {group: max(ends[cell] for cell in group) for group in set(peers.values())}
        begins = {cell: done[group] for cell, group in peers.items()}
        step += 1
