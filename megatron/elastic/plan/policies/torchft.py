"""TorchFT (github.com/pytorch/torchft): the replica is the unit of loss.

A replica that lost a cell is left out. The batch shrinks by its part (``torchft``), or the others take its micro-
batches (``torchft-batch``).
"""

from __future__ import annotations

from dataclasses import replace

from megatron.elastic.plan.cost import plan_costs
from megatron.elastic.plan.dataflow import PlanError, Share, home_rows
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.planner import assemble, instant_plan
from megatron.elastic.plan.policies.base import Policy, PolicyOutcome, TableOptions, damaged_replicas
from megatron.elastic.plan.policies.whole_replicas import without_damaged
from megatron.elastic.plan.schedule.timing import execute
from megatron.elastic.plan.search.graph import Shape
from megatron.elastic.plan.search.steady import shape_plan

__all__ = ["TorchFT", "TorchFTBatch"]


class TorchFT(Policy):
    """A damaged replica's part of the batch is left out with it."""

    summary = "its replica is left out and the batch shrinks"
    keeps_batch = False

    def instant(self, topology: Topology, profile: Profile, options: TableOptions) -> Plan:
        damaged = frozenset(damaged_replicas(topology))
        if not damaged:
            return instant_plan(topology, profile, split_backward=options.split_backward)
        if len(damaged) == len(topology.replicas):
            raise PlanError("policy torchft: every replica has lost a rank; it restarts from the last checkpoint")
        homes = home_rows(topology)
        shares = [
            Share(segment.cell, segment.first, segment.end, rows, wave)
            for number, replica in enumerate(topology.replicas)
            if number not in damaged
            for wave, rows in enumerate(homes[number])
            for segment in replica.segments
        ]
        skipped = sorted(row for number in damaged for rows in homes[number] for row in rows)
        plan = assemble(topology, profile, shares, options.split_backward, ("torchft",))
        return replace(plan, skipped=tuple(skipped))

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        whole = without_damaged(topology, profile)
        if whole.answer is None or not isinstance(whole.answer, Shape):
            return whole
        left = len(topology.replicas) - len(damaged_replicas(topology))
        rows = topology.grid.global_batch_size * left // len(topology.replicas)
        nominal = rows // left // topology.grid.micro_batch_size
        quotas = tuple(
            pipeline if not pipeline.quota else replace(pipeline, quota=nominal) for pipeline in whole.answer.pipelines
        )
        shrunk = replace(topology, grid=replace(topology.grid, global_batch_size=rows))
        plan = shape_plan(shrunk, Shape(quotas, 0, "torchft"), profile)
        run = execute(plan, plan_costs(plan.pieces, plan.edges, plan.cells, profile))
        shape = Shape(quotas, run.makespan, "torchft")
        return PolicyOutcome(shape, run.makespan, rows, instant=shape, instant_ns=run.makespan)


class TorchFTBatch(Policy):
    """A damaged replica is left out, the others take its micro-batches."""

    summary = "its replica is left out, the others take its micro-batches"

    def instant(self, topology: Topology, profile: Profile, options: TableOptions) -> Plan:
        if not damaged_replicas(topology):
            return instant_plan(topology, profile, split_backward=options.split_backward)
        outcome = self.respond(topology, profile)
        if outcome.answer is None:
            raise PlanError("policy torchft-batch: every replica has lost a rank; it restarts from the last checkpoint")
        return replace(outcome.plan(topology, profile, options.split_backward), labels=("torchft-batch",))

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        return without_damaged(topology, profile)
