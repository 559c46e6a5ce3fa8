"""MindSpeed's elastic training: one data-parallel domain may go, once; a second loss in another one is a restart."""

from __future__ import annotations

from dataclasses import replace

from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.planner import instant_plan
from megatron.elastic.plan.policies.base import Policy, PolicyOutcome, TableOptions, damaged_replicas
from megatron.elastic.plan.policies.whole_replicas import without_damaged

__all__ = ["MindSpeed"]


class MindSpeed(Policy):
    """The micro-batches of one damaged replica are redistributed; more than one is a restart."""

    summary = "its replica is left out, once; a second damaged replica ends the job"

    def instant(self, topology: Topology, profile: Profile, options: TableOptions) -> Plan:
        if not (damaged := damaged_replicas(topology)):
            return instant_plan(topology, profile, split_backward=options.split_backward)
        outcome = self.respond(topology, profile)
        if outcome.restarts or outcome.answer is None:
            raise PlanError(
                f"policy mindspeed: replicas {damaged} have lost ranks, it goes on without one of "
                f"{len(topology.replicas)} at most; it restarts from the last checkpoint"
            )
        return replace(outcome.plan(topology, profile, options.split_backward), labels=("mindspeed",))

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        whole = without_damaged(topology, profile)
        return whole if len(damaged_replicas(topology)) <= 1 else replace(whole, restarts=True)
