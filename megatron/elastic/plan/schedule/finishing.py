"""The actions of a table after which the gradient of a unit is final, and one order of units for all ranks.

A unit's gradient is final on a rank after the last action of its cell's table that computes a part of it: a backward,
or the weight part of a split one. A rank may then contribute it to the sum over the unit's group.

All ranks start these sums in one order, so that they cannot wait for one another in a circle, whatever their transport
runs one after the other. Of all sums under way, the first in the order has been started by every member that has
finished its gradients, and no member holds it back behind a later one. The order is that in which the plan finishes
units on all their cells, as far as tables of different cells can be compared: by the number of actions that follow.
It is a function of the plan, which is equal on all ranks; a poor estimate costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from megatron.elastic.plan.model import Action, Op, Plan

__all__ = ["GRADIENT_OPS", "final_actions", "finishing_order"]

GRADIENT_OPS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
"""Actions that compute gradients of parameters: the input part of a split backward has those that are not deferred."""


def final_actions(plan: Plan, cell: int) -> Mapping[int, frozenset[int]]:
    """Return index in the table of ``cell`` → the compute units whose gradients are final after that action."""
    last: dict[int, int] = {}
    for index, units in _last_of_each(plan, plan.table(cell), _ranges_of(plan).get(cell, ())):
        for unit in units:
            last.setdefault(unit, index)
    found: dict[int, set[int]] = {}
    for unit, index in last.items():
        found.setdefault(index, set()).add(unit)
    return {index: frozenset(units) for index, units in found.items()}


def finishing_order(plan: Plan, units: Iterable[int], compute_units: int) -> tuple[int, ...]:
    """Return ``units`` in the order in which their sums are started; equal on all ranks.

    State-only units (``compute_units`` and beyond) come last: their gradients are final with those of all users. Units
    that one action finishes come in the order of its backward, the last unit first.
    """
    ranges, following = _ranges_of(plan), dict[int, int]()
    for cell, table in plan.tables:
        for index, finished in _last_of_each(plan, table, ranges[cell]):
            after = len(table) - 1 - index
            for unit in finished:
                following[unit] = min(after, following.get(unit, after))
    longest = max((len(table) for _, table in plan.tables), default=0)
    return tuple(
        sorted(units, key=lambda unit: (unit >= compute_units, -following.get(unit, longest), -unit)),
    )


def _ranges_of(plan: Plan) -> Mapping[int, frozenset[range]]:
    """Return cell → the unit ranges of its pieces; cells without pieces are left out."""
    found: dict[int, set[tuple[int, int]]] = {}
    for piece in plan.pieces:
        found.setdefault(piece.cell, set()).add((piece.first, piece.end))
    return {cell: frozenset(range(*one) for one in mine) for cell, mine in found.items()}


def _last_of_each(plan: Plan, table: Sequence[Action], ranges: Collection[range]) -> Iterator[tuple[int, range]]:
    """Yield each of ``ranges`` with the index of the last action that computes gradients of it, the latest first.

    From the end, where they are found after a few actions: all ranks walk the tables of all cells.
    """
    left = set(ranges)
    for index in reversed(range(len(table))):
        if not left:
            return
        if table[index].op in GRADIENT_OPS:
            piece = plan.pieces[table[index].piece]
            units = range(piece.first, piece.end)
            if units in left:
                left.remove(units)
                yield index, units
