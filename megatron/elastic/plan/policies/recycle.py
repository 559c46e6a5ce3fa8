"""ReCycle (arXiv 2405.14009): whole micro-batches rerouted to peers that hold the stage; nothing moves.

The backward is split into input and weight gradients, which fill bubbles. In the simulator, stages step their
optimizers by themselves, so that steps overlap: ``step_ns`` is then what a step takes in the long run
(``schedule.stagger``), and ``ideal_ns`` its limit, the work of the busiest cell. In the engine the vote is the
barrier between steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.elastic.plan.cost import plan_costs
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.planner import draft_instant, instant_plan
from megatron.elastic.plan.policies.base import STOPPED, Policy, PolicyOutcome, TableOptions, damaged_replicas
from megatron.elastic.plan.schedule.orders import ORDERINGS
from megatron.elastic.plan.schedule.stagger import regime
from megatron.elastic.plan.schedule.timing import execute

__all__ = ["ReCycle"]


@dataclass(frozen=True)
class ReCycle(Policy):
    """Reroute with decoupled backward and staggered optimizer, each of which can be left out.

    Tables are chosen for what steps take: one after the other, or ``staggered``.
    """

    summary = "the same with whole micro-batches, and the backward in two parts"
    split_backward: bool = True
    staggered: bool = True

    def instant(self, topology: Topology, profile: Profile, options: TableOptions) -> Plan:
        decoupled = options.split_backward or bool(damaged_replicas(topology))
        return replace(instant_plan(topology, profile, "reroute", split_backward=decoupled), labels=("recycle",))

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        try:
            plan, step = self._fastest(topology, profile)
        except PlanError:
            return STOPPED
        busiest = max(execute(plan, plan_costs(plan.pieces, plan.edges, plan.cells, profile)).busy.values())
        rows = topology.grid.global_batch_size
        return PolicyOutcome(plan, step, rows, ideal_ns=busiest, instant=plan, instant_ns=step)

    def _fastest(self, topology: Topology, profile: Profile) -> tuple[Plan, int]:
        if not self.staggered:
            draft = draft_instant(topology, profile, "reroute", split_backward=self.split_backward)
            return draft.plan, draft.time_ns
        plans = [
            draft_instant(topology, profile, "reroute", split_backward=self.split_backward, ordering=ordering).plan
            for ordering in ORDERINGS
        ]
        return min(((plan, regime(plan, profile, topology.tied).period_ns) for plan in plans), key=lambda one: one[1])
