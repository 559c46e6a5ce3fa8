"""Homes of experts that follow the measured load, at a boundary of one rank (``--elastic-expert-balance``).

The record has the load, so all ranks choose the same homes at the same boundary, newcomers too. Experts then move as
layers do: a migration beside the steps, until a vote names the new assignment. A loss on the way leaves the homes
as they were.

Homes are reviewed once in :data:`SPAN` steps, the time over which the load is a mean: the mean then has forgotten most
of the load under which they were chosen.
"""

from __future__ import annotations

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.state.expert_load import SPAN

__all__ = ["EvenHomes"]


class EvenHomes:
    """One rank's choice of homes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._reviewed = 0
        """Version at which the homes were reviewed last. A new generation begins to count when it settles."""

    def target(self) -> Assignment | None:
        """Return the assignment to move to; None: keep the present homes."""
        at, version = self._context, self._context.record.version
        load, steps = at.tools.settings.hyper.load, at.tools.settings.steps
        if at.views.config.expert_balance == "off" or load is None:
            return None
        ending = steps is not None and steps - version < SPAN  # experts would move for the last few steps
        if ending or version - max(self._reviewed, at.settled_at) < SPAN:
            return None
        self._reviewed = version
        tokens, present = load.tokens(at.record.expert_load), at.view.assignment
        target = present.evened(tokens)
        if target == present:
            return None
        at.listener.rehomes(at.record, at.view, present.imbalance(tokens), target.imbalance(tokens))
        return target
