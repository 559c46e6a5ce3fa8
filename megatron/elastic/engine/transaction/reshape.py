"""The request for other parallel sizes, at a boundary of one rank (docs/design.md §7).

Every vote carries the open request. At the boundary behind a vote in which all ranks knew it, all decide alike. Either
the sizes are in force, or they are impossible, or ranks have yet to come, or the migration to them begins. The request
stays open until a rank tells the agents that it is over. So a loss on the way needs no rule of its own: the next vote
agrees on the request again. A rank that alone knows why the sizes cannot be has it refused before it is agreed on: it
does not vote for it.
"""

from __future__ import annotations

import msgspec

from megatron.elastic.control.requests import ParallelSizes, Pending, ReshapeState
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.plan.dataflow import PlanError

__all__ = ["Reshaping", "open_requests"]

_MEAN_LOSS = "ranks that share the sequence need a loss function that returns (sum, tokens, report), not a mean"


def open_requests(context: Context) -> Pending:
    """Return the requests for which this rank votes: the pending ones, but not for sizes that it cannot compute."""
    membership = context.agreement.membership
    found = membership.pending()
    asked = found.reshape
    why = "" if asked is None else context.tools.interface.objection(asked.context)
    if asked is None or not why:
        return found
    membership.reshape_is(asked.number, "refused", f"{asked.sizes}: {why}")
    return msgspec.structs.replace(found, reshape=None)


class Reshaping:
    """One rank's answers to the open request, each told once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._told: tuple[int, int, ReshapeState] | None = None
        """(generation, number of the request, how it stands) of the newest news."""
        self._noticed: tuple[int, str] | None = None
        """(number of the request, line) of the newest notice."""

    def target(self, agreed: tuple[int, ...]) -> Assignment | None:
        """Return the assignment to move to for the request ``agreed`` (:attr:`Agreed.reshape`); None: nothing to do."""
        if not agreed:
            return None
        at, number, sizes = self._context, agreed[0], self._sizes(agreed)
        present, living = at.view.assignment, at.view.living
        if present.base.sizes == sizes and not present.broken(living):
            self._tell(number, "in force", f"{sizes} since step {at.record.version}")
            return None
        if sizes.context > 1 and not at.record.tokens:  # without tokens the loss was a mean, or a step was left out
            if not at.record.skipped:
                self._refuse(number, f"{sizes}: {_MEAN_LOSS}")
            return None
        if sizes.ranks > len(living):
            missing = f"{sizes} takes {sizes.ranks} ranks, and {len(living)} are members"
            asked = at.agreement.membership.pending().reshape
            if asked is not None and asked.number == number and asked.hopeless:
                self._refuse(number, f"{missing}; no more are expected")
            else:
                self._notice(number, f"reshape: {missing}: waiting for ranks")
            return None
        try:
            return at.views.reshaped(living, sizes)
        except PlanError as error:
            self._refuse(number, f"{sizes}: {error}")
            return None

    def begun(self, agreed: tuple[int, ...], target: Assignment) -> None:
        """The migration to the sizes has begun, to ``target``."""
        sizes, version = self._sizes(agreed), self._context.record.version
        gained = target.gained(self._context.view.assignment)
        self._context.listener.reshapes(len(frozenset[int]().union(*gained.values())))
        line = f"{sizes}: state moves beside steps since step {version}"
        self._notice(agreed[0], f"reshape to {line}")
        self._tell(agreed[0], "under way", line)

    def _sizes(self, agreed: tuple[int, ...]) -> ParallelSizes:
        """Return the sizes that were agreed on; as for experts those of the launch, if none were named."""
        sizes, launch = ParallelSizes(*agreed[1:]), self._context.view.assignment.launch_topology
        return sizes if sizes.experts else sizes._replace(experts=launch.expert_homes if launch.experts else 1)

    def _refuse(self, number: int, why: str) -> None:
        self._notice(number, f"reshape refused: {why}")
        self._tell(number, "refused", why)

    def _notice(self, number: int, line: str) -> None:
        if self._noticed != (number, line):
            self._context.listener.noticed(line)
        self._noticed = number, line

    def _tell(self, number: int, state: ReshapeState, text: str) -> None:
        """Have one rank tell the agents, once a generation."""
        at = self._context
        news = at.view.generation, number, state
        if news != self._told and at.view.lowest:
            at.agreement.membership.reshape_is(number, state, text)
            if state == "in force":
                at.listener.noticed(f"reshape: {text}")
        self._told = news
