"""A policy: the plans that a system runs when cells are lost.

Idea: a policy gives two answers for a topology and a profile. The engine runs the plan of :meth:`Policy.instant` at
once, while units stay where they are. The simulator asks :meth:`Policy.respond`, which may also migrate units, and
gives the time of a step before and after. Both use the same tables and costs, so the engine runs the policy that the
simulator and the documentation describe.

The topology contains the layout before the loss: segments of dead cells are still listed. So both answers depend on
their arguments alone, and every process computes the same, also one that has just joined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.search.graph import Shape
from megatron.elastic.plan.search.steady import Move, shape_plan

__all__ = ["STOPPED", "Policy", "PolicyOutcome", "TableOptions", "damaged_replicas"]


@dataclass(frozen=True)
class TableOptions:
    """Options that all tables of a job share."""

    split_backward: bool = False
    """Every backward in two parts: input gradients, then weight gradients."""
    cut_microbatches: bool = False
    """Rows count by themselves (loss per token), so that a micro-batch may be shared to the row."""


@dataclass(frozen=True)
class PolicyOutcome:
    """Everything a policy does. ``answer`` is None when it cannot go on without a restart from a checkpoint."""

    answer: Plan | Shape | None
    step_ns: int
    rows: int
    """Rows of the global batch a step computes (fewer than nominal when the batch shrinks)."""
    restarts: bool = False
    """Every process starts anew from the last checkpoint."""
    ideal_ns: int = 0
    """Lower limit of ``step_ns`` where the policy overlaps steps, else 0."""
    instant: Plan | Shape | None = None
    instant_ns: int = 0
    """The plan that runs until units have moved; equal to the answer when nothing moves."""
    moves: tuple[Move, ...] = ()
    migration_ns: int = 0

    def rate(self) -> float:
        """Rows per ns; 0 when stopped."""
        return self.rows / self.step_ns if self.step_ns else 0.0

    def plan(self, topology: Topology, profile: Profile, split_backward: bool = False) -> Plan:
        """The answer as a plan. Raises :class:`PlanError` when there is none."""
        if self.answer is None:
            raise PlanError("this policy needs a restart from a checkpoint")
        if isinstance(self.answer, Plan):
            return self.answer
        return shape_plan(topology, self.answer, profile, split_backward)


STOPPED = PolicyOutcome(None, 0, 0, restarts=True)


class Policy(ABC):
    """One system's answer to a loss. Pure: equal arguments, equal answers."""

    summary: ClassVar[str]
    """The treatment of a lost rank's samples, in one clause: for the flag and the documentation."""
    in_engine: ClassVar[bool] = True
    """True if ``--elastic-policy`` offers it; otherwise only the simulator has it."""
    moves_units: ClassVar[bool] = False
    """True if units may change place later (``--elastic-migrate-after``)."""
    smaller_cells: ClassVar[Literal["never", "uses", "needs"]] = "never"
    """Whether tensor-parallel groups go on with fewer ranks where ``--elastic-tensor`` is 'auto'. 'needs': the
    policy is nothing without, so 'park' is refused."""
    keeps_batch: ClassVar[bool] = True
    """True if every row of the global batch is computed after a loss."""

    @abstractmethod
    def instant(self, topology: Topology, profile: Profile, options: TableOptions) -> Plan:
        """The plan to run at once. Raises :class:`PlanError` when the policy cannot go on with the living cells.

        Rows that no cell computes are in ``Plan.skipped``: they are consumed, and loss weights and ledger know.
        """

    @abstractmethod
    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        """Everything the policy does, in the simulator."""


def damaged_replicas(topology: Topology) -> list[int]:
    """Replicas that lost a cell."""
    alive = {cell.id for cell in topology.cells}
    return [n for n, replica in enumerate(topology.replicas) if any(s.cell not in alive for s in replica.segments)]
