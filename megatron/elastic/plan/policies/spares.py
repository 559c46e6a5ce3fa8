"""Spare cells take the places of lost ones; when none is left, the job restarts from the last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.planner import instant_plan
from megatron.elastic.plan.policies.base import Policy, PolicyOutcome, TableOptions, damaged_replicas
from megatron.elastic.plan.policies.restart import CheckpointRestart
from megatron.elastic.plan.policies.whole_replicas import without_damaged

__all__ = ["Spares"]


@dataclass(frozen=True)
class Spares(Policy):
    """``count`` cells wait; a lost cell's place is taken (its state comes from mirrors), then as ``restart``.

    In the engine, waiting cells have taken lost places before the policy is asked.
    """

    summary = "a spare takes its place (--elastic-spares); without one the job ends"
    count: int = 1

    def instant(self, topology: Topology, profile: Profile, options: TableOptions) -> Plan:
        if damaged := damaged_replicas(topology):
            raise PlanError(
                f"policy spares: replicas {damaged} have lost ranks and no spare is ready; "
                "it restarts from the last checkpoint"
            )
        plan = instant_plan(topology, profile, split_backward=options.split_backward)
        return replace(plan, labels=("spares",))

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        alive = {cell.id for cell in topology.cells}
        lost = sorted({s.cell for r in topology.replicas for s in r.segments} - alive)
        if len(lost) > self.count:
            return CheckpointRestart().respond(topology, profile)
        model = topology.cells[0]
        standins = tuple(replace(model, id=cell, ranks=(), speed_ppm=1_000_000, nominal_ppm=1_000_000) for cell in lost)
        full = replace(topology, cells=tuple(sorted((*topology.cells, *standins), key=lambda cell: cell.id)))
        return without_damaged(full, profile)
