"""The request for other parallel sizes, at a boundary of one rank (docs/design.md §7).

Every vote carries the open request. At the boundary behind a vote in which all ranks knew it, all decide alike. Either
the sizes are in force, or they are impossible, or ranks have yet to come, or the migration to them begins. The request
stays open until a rank tells the agents that it is over. So a loss on the way needs no rule of its own: the next vote
agrees on the request again.
"""

from __future__ import annotations

from megatron.elastic.control.requests import ParallelSizes, ReshapeState
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.plan.dataflow import PlanError

__all__ = ["Reshaping"]


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
        at, number, sizes = self._context, agreed[0], ParallelSizes(*agreed[1:])
        present, living = at.view.assignment, at.view.living
        if present.base.sizes == sizes and not present.broken(living):
            self._tell(number, "in force", f"{sizes} since step {at.record.version}")
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
        sizes, version = ParallelSizes(*agreed[1:]), self._context.record.version
        gained = target.gained(self._context.view.assignment)
        self._context.listener.reshapes(len(frozenset[int]().union(*gained.values())))
        line = f"{sizes}: state moves beside steps since step {version}"
        self._notice(agreed[0], f"reshape to {line}")
        self._tell(agreed[0], "under way", line)

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
