"""The actions of a table after which the gradient of a unit is final, and one order of units for all ranks.

A unit's gradient is final on a rank after the last action of its cell's table that computes a part of it: a backward,
or the weight part of a split one. A rank may then contribute it to the sum over the unit's group.

All ranks start these sums in one order, so that they cannot wait for one another in a circle, whatever their transport
runs one after the other: of all sums under way, the first in the order has been started by every member that has
finished its gradients, and no member holds it back behind a later one. The order is that in which the plan finishes
units on all their cells, as far as tables of different cells can be compared: by the number of actions that follow.
It is a function of the plan, which is equal on all ranks; a poor estimate costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron.elastic.plan.model import Op, Plan

__all__ = ["GRADIENT_OPS", "final_actions", "finishing_order"]

GRADIENT_OPS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
"""Actions that compute gradients of parameters: the input part of a split backward has those that are not deferred."""


def final_actions(plan: Plan, cell: int) -> Mapping[int, frozenset[int]]:
    """Return index in the table of ``cell`` → the compute units whose gradients are final after that action."""
    pieces = {piece.id: piece for piece in plan.pieces}
    last = {
        unit: index
        for index, action in enumerate(plan.table(cell))
        if action.op in GRADIENT_OPS
        for unit in range(pieces[action.piece].first, pieces[action.piece].end)
    }
    found: dict[int, set[int]] = {}
    for unit, index in last.items():
        found.setdefault(index, set()).add(unit)
    return {index: frozenset(units) for index, units in found.items()}


def finishing_order(plan: Plan, units: Iterable[int], compute_units: int) -> tuple[int, ...]:
    """Return ``units`` in the order in which their sums are started; equal on all ranks.

    State-only units (``compute_units`` and beyond) come last: their gradients are final with those of all users. Units
    that one action finishes come in the order of its backward, the last unit first.
    """
    following: dict[int, int] = {}
    for cell, table in plan.tables:
        for index, finished in final_actions(plan, cell).items():
            for unit in finished:
                after = len(table) - 1 - index
                following[unit] = min(after, following.get(unit, after))
    longest = max((len(table) for _, table in plan.tables), default=0)
    return tuple(
        sorted(units, key=lambda unit: (unit >= compute_units, -following.get(unit, longest), -unit)),
    )
