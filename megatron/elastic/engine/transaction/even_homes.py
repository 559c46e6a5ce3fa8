"""Homes and replicas of experts by their measured load, at a boundary of one rank (``--elastic-expert-balance``).

The record has the load, so all ranks choose the same homes at the same boundary, newcomers too. Experts then move as
layers do: a migration beside the steps, until a vote names the new assignment. A loss on the way leaves the homes
as they were.

Homes are reviewed once in :data:`SPAN` steps, the time over which the load is a mean: the mean then has forgotten most
of the load under which they were chosen.

A change of homes moves no state but changes which ranks compute an expert: each of its homes adds a part of its
gradient to the sum, the block's owner steps, and all homes receive the parameters.
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
        self._told = False
        """True once this rank has learned that memory is missing for replicas."""

    def target(self) -> Assignment | None:
        """Return the assignment to move to; None: keep the present homes."""
        at, version = self._context, self._context.record.version
        load, steps = at.tools.settings.hyper.load, at.tools.settings.steps
        policy = at.views.config.expert_balance
        if policy == "off" or load is None:
            return None
        ending = steps is not None and steps - version < SPAN  # experts would move for the last few steps
        if ending or version - max(self._reviewed, at.settled_at) < SPAN:
            return None
        self._reviewed = version
        tokens, present = load.tokens(at.record.expert_load), at.view.assignment
        target = present.balanced(tokens, policy)
        if target == present or self._lacks_memory(target):
            return None
        replicas = max((count for unit in tokens for count in target.expert_replicas(unit)), default=1)
        at.listener.rehomes(at.record, at.view, present.imbalance(tokens), target.imbalance(tokens), replicas)
        return target

    def _lacks_memory(self, target: Assignment) -> bool:
        """Return whether ranks lack the memory for the replicas that they may have. Says so once."""
        at = self._context
        missing = at.views.lacking_for_replicas(target, at.view.living)
        if missing and not self._told and at.view.lowest:
            gib = missing / 2**30
            at.listener.noticed(
                f"no expert has replicas: a rank would lack {gib:.1f} GiB; lower --elastic-expert-replicas"
            )
        self._told |= missing > 0
        return missing > 0
