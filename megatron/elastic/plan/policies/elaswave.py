"""ElasWave (arXiv 2510.00606): its axes and the tensor axis (docs/design.md §7), each of which can be left out."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.planner import Draft, draft_instant
from megatron.elastic.plan.policies.base import STOPPED, Policy, PolicyOutcome, TableOptions
from megatron.elastic.plan.search.steady import DecisionOptions, decide
from megatron.elastic.plan.tensor import fastest_draft, parked, reduced_cells

__all__ = ["ElasWave"]


@dataclass(frozen=True)
class ElasWave(Policy):
    """All axes, or those that ``options`` leave on."""

    summary = "other ranks of its stage compute them"
    moves_units = True
    smaller_cells = "uses"
    options: DecisionOptions = field(default_factory=DecisionOptions)

    def instant(self, topology: Topology, profile: Profile, options: TableOptions) -> Plan:
        def draft(option: Topology) -> Draft:
            split, cut = options.split_backward, options.cut_microbatches
            return draft_instant(option, profile, "reroute", split_backward=split, cut_microbatches=cut)

        usable = topology if self.options.tensor else parked(topology, reduced_cells(topology))
        return fastest_draft(usable, profile, draft).plan

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
