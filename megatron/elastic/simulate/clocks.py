"""The frequency axis in the ablation: energy that lower clocks save, time that higher clocks save.

Idea: the policy plans its answer to a loss without regard to clocks. Clocks (``plan.clocks``) then compensate the
imbalance that whole units and whole micro-batches leave. They are lowered on cells that wait (same step, less energy)
or raised on cells for which all others wait (shorter step). The plan's own tables time both.

Assumptions, not measured on an accelerator
- Time is ``t(f) = a/f + b``, where ``b``, the part that does not depend on the clock, is a fifth.
- Clocks are 60% to 110% of the nominal one, in steps of 5%.
- Power is ``idle + (busy - idle) (f / f0)^3`` of a busy cell and ``idle`` of a waiting one, with the watts of
  ``goodput.Assumptions``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.elastic.plan.clocks import with_clocks
from megatron.elastic.plan.cost import plan_costs
from megatron.elastic.plan.frequency import ClockFit, ClockRange
from megatron.elastic.plan.model import Plan, Profile
from megatron.elastic.plan.policies.elaswave import ElasWave
from megatron.elastic.plan.schedule.timing import execute
from megatron.elastic.simulate.goodput import Assumptions
from megatron.elastic.simulate.scenarios import FULL, Scenario, layer_profile, scenario_topology

__all__ = ["Clocked", "clock_ablation"]

NOMINAL_KHZ = 1_000_000
CLOCKS = ClockRange(tuple(range(600_000, 1_150_000, 50_000)), NOMINAL_KHZ)
FIXED_SHARE = 0.2


@dataclass(frozen=True)
class Clocked:
    """Means over scenarios, relative to the same plans at the nominal clock."""

    throughput: float
    energy: float
    """Of a step."""


def clock_ablation(scenarios: Sequence[Scenario]) -> dict[str, Clocked]:
    """Clocks lowered where cells wait, and raised where the others wait for them."""
    found: dict[str, list[tuple[float, float]]] = {"lowered": [], "raised": []}
    for scenario in scenarios:
        _, after = scenario_topology(scenario)
        profile = layer_profile(scenario.layers)
        plan = ElasWave(FULL).respond(after, profile).plan(after, profile, FULL.split_backward)
        fits = _fits(plan, profile)
        ranges = dict.fromkeys(fits, CLOCKS)
        before = _step(plan, profile, fits)
        for name, boost in (("lowered", False), ("raised", True)):
            time, joules = _step(with_clocks(plan, profile, fits, ranges, boost), profile, fits)
            found[name].append((before[0] / time, joules / before[1]))
    return {
        name: Clocked(sum(t for t, _ in values) / len(values), sum(e for _, e in values) / len(values))
        for name, values in found.items()
    }


def _fits(plan: Plan, profile: Profile) -> dict[int, ClockFit]:
    """Time of one row through a cell's units, by clock."""
    fits = {}
    for piece in plan.pieces:
        units = profile.units[piece.first : piece.end]
        time = sum(unit.forward_ns + unit.backward_ns for unit in units)
        fixed = round(FIXED_SHARE * time)
        fits[piece.cell] = ClockFit((time - fixed) * NOMINAL_KHZ, fixed)
    return fits


def _step(plan: Plan, profile: Profile, fits: dict[int, ClockFit]) -> tuple[float, float]:
    """(step in ns, joules a step up to a constant factor) with the plan's clocks."""
    clocks, assumed = dict(plan.frequencies_khz), Assumptions()
    cells = tuple(
        replace(
            cell,
            speed_ppm=cell.speed_ppm
            * fits[cell.id].time_ns(NOMINAL_KHZ)
            // fits[cell.id].time_ns(clocks.get(cell.id, NOMINAL_KHZ)),
        )
        if cell.id in fits
        else cell
        for cell in plan.cells
    )
    run = execute(plan, plan_costs(plan.pieces, plan.edges, cells, profile))
    joules = assumed.idle_watts * run.makespan * len(plan.cells)
    for cell, busy in run.busy.items():
        speed = clocks.get(cell, NOMINAL_KHZ) / NOMINAL_KHZ
        joules += (assumed.busy_watts - assumed.idle_watts) * speed**3 * busy
    return float(run.makespan), joules
