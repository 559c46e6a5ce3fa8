"""ElasWave (arXiv 2510.00606): four axes (docs/design.md §7), each of which can be left out."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.planner import instant_plan
from megatron.elastic.plan.policies.base import STOPPED, Policy, PolicyOutcome, TableOptions
from megatron.elastic.plan.search.steady import DecisionOptions, decide

__all__ = ["ElasWave"]


@dataclass(frozen=True)
class ElasWave(Policy):
    """All axes, or those that ``options`` leave on."""

    summary = "other ranks of its stage compute them"
    moves_units = True
    options: DecisionOptions = field(default_factory=DecisionOptions)

    def instant(self, topology: Topology, profile: Profile, options: TableOptions) -> Plan:
        return instant_plan(
            topology, profile, split_backward=options.split_backward, cut_microbatches=options.cut_microbatches
        )

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        try:
            decision = decide(topology, profile, self.options)
        except PlanError:
            return STOPPED
        answer = decision.steady if decision.steady is not None else decision.instant
        step = decision.steady_ns if decision.steady is not None else decision.instant_ns
        return PolicyOutcome(
            answer,
            step,
            topology.grid.global_batch_size,
            instant=decision.instant,
            instant_ns=decision.instant_ns,
            moves=decision.moves,
            migration_ns=decision.migration_ns,
        )
