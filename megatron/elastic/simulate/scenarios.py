"""Policies side by side on fixed damage: the throughput table.

Idea: for each (DP, PP, layers, losses, pattern) every policy answers the same
topology; its answer's tables are executed, and rows per second are divided by
those of the undamaged nominal 1F1B plan. Only ``recycle`` has no barrier between its steps. Three bounds are given too:

- ``bound.schedule_bound``: no set of pipelines is faster under the same memory in steps with a barrier;
- ``graph.pipeline_bound``: the best set of 1F1B pipelines, for tables without the split backward;
- the work bound: every living cell is always busy, which no schedule reaches.

Costs: equal layers, forward 1, backward 2 (half of it the weight gradient),
transfers free, micro-batch size 1, embedding and head not counted; memory is
``headroom`` times what the neediest nominal stage uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from megatron.elastic.plan.cost import PPM
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Topology, UnitCost
from megatron.elastic.plan.planner import nominal_plan
from megatron.elastic.plan.policies.base import Policy, PolicyOutcome
from megatron.elastic.plan.policies.elaswave import ElasWave
from megatron.elastic.plan.policies.recycle import ReCycle
from megatron.elastic.plan.policies.registry import POLICIES
from megatron.elastic.plan.schedule.stagger import regime
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.search.bound import schedule_bound
from megatron.elastic.plan.search.graph import GraphOptions, pipeline_bound, work_bound
from megatron.elastic.plan.search.partition import Model
from megatron.elastic.plan.search.steady import DecisionOptions
from megatron.elastic.plan.topology import regular_topology, without_cells

__all__ = [
    "ABLATIONS",
    "PEERS",
    "Scenario",
    "ScenarioRow",
    "layer_profile",
    "run_ablation",
    "run_scenario",
    "scenario_list",
    "scenario_topology",
]

Pattern = Literal["spread", "concentrated"]

NEVER_PAYS = 10**18
"""A horizon long enough for any migration: the table compares steady states."""

PEERS: Mapping[str, Policy] = {
    **{name: make() for name, make in POLICIES.items() if name != "elaswave"},
    "recycle-barrier": ReCycle(staggered=False),
}
"""Policies that ``elaswave`` is compared with."""

PLAIN = DecisionOptions(horizon_ns=NEVER_PAYS)
FULL = DecisionOptions(horizon_ns=NEVER_PAYS, split_backward=True)
ABLATIONS: tuple[tuple[str, DecisionOptions], ...] = (
    ("all axes", FULL),
    ("no graph", replace(FULL, graph=None)),
    ("graph: alike only", replace(FULL, graph=GraphOptions(recut=False, pool=False))),
    ("graph: recut only", replace(FULL, graph=GraphOptions(alike=False, pool=False))),
    ("no dataflow", replace(FULL, graph=GraphOptions(even_quotas=True), reroute=False, resize=False)),
    ("no split backward", PLAIN),
    ("no graph, no dataflow", replace(FULL, graph=None, reroute=False, resize=False)),
)


@dataclass(frozen=True)
class Scenario:
    """One damage. Losing one of a cell's ``tp`` devices loses the cell, unless it ``lives_on`` with the others."""

    dp: int
    pp: int
    layers: int
    losses: int
    pattern: Pattern
    waves: int = 16
    tp: int = 1
    headroom: float = 1.25
    lives_on: bool = False


@dataclass(frozen=True)
class ScenarioRow:
    """Throughput of each policy relative to before the loss (0: stopped), and the bounds."""

    scenario: Scenario
    elaswave: float
    """All axes; the backward split after the loss, as ReCycle does."""
    elaswave_1f1b: float
    """Without the split: whole-backward tables before and after."""
    elaswave_staggered: float
    """The tables of ``elaswave`` if no stage waited for the vote: shows the cost of the vote."""
    instant: float
    kind: str
    kind_1f1b: str
    peers: Mapping[str, float]
    ideal_reroute: float
    """ReCycle's limit: the busiest cell never waits."""
    bound: float
    """Bound for any set of pipelines under the same memory, with any schedule (``plan.bound``)."""
    bound_1f1b: float
    """Best set of 1F1B pipelines by their closed form."""
    work_bound: float
    bubble_before: float

    def flat(self) -> dict[str, Any]:
        """One level of keys, for JSON and tables."""
        return {**asdict(self.scenario), **{k: v for k, v in asdict(self).items() if k != "scenario"}}

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> ScenarioRow:
        """Inverse of :meth:`flat`."""
        names = {field.name for field in fields(Scenario)} & flat.keys()
        rest = {key: value for key, value in flat.items() if key not in names}
        return cls(Scenario(**{name: flat[name] for name in names}), **rest)


def layer_profile(layers: int) -> Profile:
    """Equal layers; bytes in the proportions of bf16 weights with fp32 Adam state."""
    return Profile((UnitCost(1000, 2000, 1000, 2_000, 12_000, 600, 0),) * layers, latency_ns=0)


def scenario_topology(scenario: Scenario) -> tuple[Topology, Topology]:
    """(before, after) the losses."""
    profile = layer_profile(scenario.layers)
    model = Model(profile, 1, scenario.dp)
    widest = -(-scenario.layers // scenario.pp)
    memory = int(model.stage_bytes(0, widest, min(scenario.pp, scenario.waves)) * scenario.headroom)
    before = regular_topology(
        scenario.dp, scenario.pp, scenario.layers, waves=scenario.waves, tp=scenario.tp, memory_bytes=memory
    )
    lost = lost_cells(scenario)
    if not scenario.lives_on or scenario.tp == 1:
        return before, without_cells(before, lost)
    left = scenario.tp - 1
    cells = tuple(
        replace(
            cell,
            ranks=cell.ranks[:left],
            nominal_ppm=PPM * left // scenario.tp,
            memory_bytes=cell.memory_bytes * left // scenario.tp,
        )
        if cell.id in lost
        else cell
        for cell in before.cells
    )
    return before, replace(before, cells=cells)


def lost_cells(scenario: Scenario) -> list[int]:
    """Spread: another replica each time, stages far apart. Concentrated: adjacent cells, replica by replica."""
    if scenario.pattern == "concentrated":
        return list(range(scenario.losses))
    stride = max(1, scenario.pp // 2 - 1)
    lost: list[int] = []
    for number in range(scenario.losses):
        replica, stage = number % scenario.dp, (1 + number * stride) % scenario.pp
        while replica * scenario.pp + stage in lost:
            stage = (stage + 1) % scenario.pp
        lost.append(replica * scenario.pp + stage)
    return lost


def scenario_list(devices: int = 96) -> list[Scenario]:
    """DP 2, 3, 4, 8, 12 with the PP that fills up to ``devices`` (at most one layer a stage), and PP 8 with TP."""
    shapes = [(dp, devices // dp, 1) for dp in (2, 3, 4, 8, 12)] + [(2, 8, 6), (3, 8, 4), (4, 8, 3)]
    return [
        Scenario(dp, min(pp, layers), layers, losses, pattern, tp=tp)
        for layers in (32, 40)
        for dp, pp, tp in shapes
        for losses in (1, 2, 4, 8)
        for pattern in _patterns(losses)
    ]


def _patterns(losses: int) -> Iterator[Pattern]:
    yield "spread"
    if losses > 1:
        yield "concentrated"


def run_scenario(scenario: Scenario) -> ScenarioRow:
    """All policies and bounds on one damage."""
    before, after = scenario_topology(scenario)
    profile = layer_profile(scenario.layers)
    rows = before.grid.global_batch_size
    nominal = _nominal_ns(before, profile)
    full, plain = ElasWave(FULL).respond(after, profile), ElasWave(PLAIN).respond(after, profile)
    peers = {name: policy.respond(after, profile) for name, policy in PEERS.items()}
    ideal = peers["recycle"].ideal_ns
    return ScenarioRow(
        scenario,
        _relative(full, nominal, rows),
        _relative(plain, nominal, rows),
        _staggered(full, after, profile, nominal),
        nominal / full.instant_ns if full.instant_ns else 0.0,
        _kind(full),
        _kind(plain),
        {name: _relative(outcome, nominal, rows) for name, outcome in peers.items()},
        nominal / ideal if ideal else 0.0,
        nominal / schedule_bound(after, profile, split_backward=True),
        nominal / _best_1f1b(after, profile),
        nominal / work_bound(after, profile),
        1 - work_bound(before, profile) / nominal,
    )


def _nominal_ns(before: Topology, profile: Profile) -> int:
    """Megatron's own plan, undamaged."""
    stages = len(before.replicas[0].segments)
    waves = before.grid.global_batch_size // before.grid.data_parallel_size
    single = regular_topology(1, stages, before.units, waves=waves)
    return plan_time(nominal_plan(single, profile), profile)


def _best_1f1b(after: Topology, profile: Profile) -> int:
    try:
        return pipeline_bound(after, profile)
    except PlanError:
        return 1 << 62


def _relative(outcome: PolicyOutcome, nominal: int, rows: int) -> float:
    """Rows a second against the nominal plan (0: stopped). Restarts count with what they run afterwards."""
    return outcome.rate() * nominal / rows


def _staggered(outcome: PolicyOutcome, after: Topology, profile: Profile, nominal: int) -> float:
    """Throughput of the answer's tables without a barrier between steps."""
    if outcome.answer is None:
        return 0.0
    return nominal / regime(outcome.plan(after, profile, FULL.split_backward), profile, after.tied).period_ns


def _kind(outcome: PolicyOutcome) -> str:
    if outcome.answer is None:
        return "stopped"
    return outcome.answer.labels[0] if isinstance(outcome.answer, Plan) else outcome.answer.kind


def run_ablation(scenarios: Sequence[Scenario]) -> dict[str, float]:
    """Mean relative throughput with each axis off, over the scenarios where it runs at all."""
    result = {}
    for name, options in ABLATIONS:
        values = []
        for scenario in scenarios:
            before, after = scenario_topology(scenario)
            profile = layer_profile(scenario.layers)
            outcome = ElasWave(options).respond(after, profile)
            values.append(_relative(outcome, _nominal_ns(before, profile), before.grid.global_batch_size))
        result[name] = sum(values) / len(values)
    return result
