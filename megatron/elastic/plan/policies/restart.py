"""A restart from the last checkpoint after any loss, with the replicas that are whole, as most jobs do."""

from __future__ import annotations

from dataclasses import replace

from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.policies.base import Policy, PolicyOutcome, TableOptions, damaged_replicas
from megatron.elastic.plan.policies.whole_replicas import without_damaged

__all__ = ["CheckpointRestart"]


class CheckpointRestart(Policy):
    """Any loss ends the job; it starts again with the replicas that are whole."""

    summary = "the job ends and starts again from the last checkpoint"
    in_engine = False

    def instant(self, topology: Topology, profile: Profile, options: TableOptions) -> Plan:
        raise PlanError("policy restart: it restarts from the last checkpoint")

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        whole = without_damaged(topology, profile)
        return replace(whole, restarts=True) if damaged_replicas(topology) else whole
