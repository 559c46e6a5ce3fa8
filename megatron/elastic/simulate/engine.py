"""One step of a plan with costs instead of kernels.

Idea: the pipeline phase is the plan's own tables, executed exactly
(``plan.timing``). What follows it is bounded by the busiest cell: reduce-scatter
of the gradients of the units it holds, update of the blocks it owns, all-gather
of their parameters (docs/design.md §3), each overlapping between cells.

Ring costs: a group of ``n`` moves ``(n - 1) / n`` of the bytes once for a
reduce-scatter and once for an all-gather (Thakur et al., IJHPCA 2005).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.elastic.plan.cost import plan_costs
from megatron.elastic.plan.model import Plan, Profile
from megatron.elastic.plan.schedule.timing import TimedTables, execute

__all__ = ["StepCosts", "StepTime", "simulate_step"]


@dataclass(frozen=True)
class StepCosts:
    """Costs outside the pipeline. ``gradient_bytes_per_param_byte``: fp32 gradients of bf16 weights are 2."""

    gradient_bytes_per_param_byte: int = 2
    update_ns_per_state_byte: float = 0.0
    vote_ns: int = 0


@dataclass(frozen=True)
class StepTime:
    """Phases of one step, ns; ``total`` is their sum since each waits for the slowest cell."""

    pipeline: int
    reduce: int
    vote: int
    update: int
    gather: int
    timeline: TimedTables

    @property
    def total(self) -> int:
        """Whole step."""
        return self.pipeline + self.reduce + self.vote + self.update + self.gather


def simulate_step(plan: Plan, profile: Profile, costs: StepCosts | None = None, record: bool = False) -> StepTime:
    """Time one step of ``plan``. ``record`` keeps every interval (for pictures)."""
    costs = costs or StepCosts()
    timeline = execute(plan, plan_costs(plan.pieces, plan.edges, plan.cells, profile), record)
    holders: dict[int, set[int]] = {}
    for replica in plan.replicas:
        for segment in replica.segments:
            for unit in range(segment.first, segment.end):
                holders.setdefault(unit, set()).add(segment.cell)
    sent: dict[int, int] = {}
    owned: dict[int, int] = {}
    for unit, cells in holders.items():
        size, count = profile.units[unit], len(cells)
        for cell in cells:
            sent[cell] = sent.get(cell, 0) + size.param_bytes * (count - 1) // count
            owned[cell] = owned.get(cell, 0) + -(-size.state_bytes // count)
    busiest = max(sent.values(), default=0)
    gather = busiest * 1_000_000_000 // profile.link_bytes_per_s
    update = int(max(owned.values(), default=0) * costs.update_ns_per_state_byte)
    reduce = gather * costs.gradient_bytes_per_param_byte
    return StepTime(timeline.makespan, reduce, costs.vote_ns, update, gather, timeline)
