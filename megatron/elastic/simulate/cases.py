"""Cases that emulation and simulation both run: a damage, a policy's answer, and the length of waits.

Idea: the emulated job (``tools/bench/throughput.py``) and the simulator are given
one :class:`Case` and derive plans from it by the same pure functions, so that
only execution differs: processes, links and timed waits there, arithmetic here.

Costs are those of the damage table (``scenarios``): equal layers, forward 1,
backward 2. The length of a wait is chosen so that the shortest piece of either
plan takes ``piece_ms``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from megatron.elastic.plan.cost import piece_costs
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.planner import instant_plan, nominal_plan
from megatron.elastic.plan.policies.base import Policy, damaged_replicas
from megatron.elastic.plan.policies.elaswave import ElasWave
from megatron.elastic.plan.policies.mindspeed import MindSpeed
from megatron.elastic.plan.policies.recycle import ReCycle
from megatron.elastic.plan.policies.registry import choice_of
from megatron.elastic.plan.policies.torchft import TorchFT, TorchFTBatch
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.search.graph import GraphOptions
from megatron.elastic.plan.search.steady import DecisionOptions
from megatron.elastic.plan.tensor import reduced_cells
from megatron.elastic.simulate.scenarios import NEVER_PAYS, Scenario, layer_profile, lost_cells, scenario_topology

__all__ = ["ANSWERS", "Case", "Predicted", "answer", "predict"]


def _policy(policy: Policy, split_backward: bool = False) -> Callable[[Topology, Profile], Plan]:
    return lambda topology, profile: policy.respond(topology, profile).plan(topology, profile, split_backward)


_PLAIN = DecisionOptions(horizon_ns=NEVER_PAYS)
_SPLIT = replace(_PLAIN, split_backward=True)
ANSWERS: dict[str, Callable[[Topology, Profile], Plan]] = {
    "elaswave": _policy(ElasWave(_PLAIN)),
    "elaswave-split": _policy(ElasWave(_SPLIT), True),
    "alike": _policy(ElasWave(replace(_PLAIN, graph=GraphOptions(recut=False, pool=False)))),
    "instant": lambda topology, profile: instant_plan(topology, profile),
    "recycle": _policy(ReCycle(split_backward=False, staggered=False)),
    "recycle-split": _policy(ReCycle(staggered=False)),
    "torchft": choice_of(TorchFT()),
    "torchft-batch": choice_of(TorchFTBatch()),
    "mindspeed": choice_of(MindSpeed()),
}
"""Plans after the loss, once units have moved. ``-split``: with a backward in two parts.

The engine that is emulated takes a vote between steps: ``recycle`` without its staggered optimizer.
"""


@dataclass(frozen=True)
class Case:
    """One damage and one policy; ``piece_ms`` is how long the shortest wait lasts."""

    scenario: Scenario
    policy: str
    piece_ms: float = 100.0

    def to_json(self) -> str:
        """One line, for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Inverse of :meth:`to_json`."""
        raw = json.loads(text)
        return cls(Scenario(**raw["scenario"]), raw["policy"], raw["piece_ms"])

    @property
    def profile(self) -> Profile:
        """Costs in the units of the damage table."""
        return layer_profile(self.scenario.layers)

    def lost_ranks(self) -> list[int]:
        """The last rank of each lost cell, numbered as Megatron does (tensor before data before pipeline)."""
        pp, dp, tp = self.scenario.pp, self.scenario.dp, self.scenario.tp
        return sorted(tp - 1 + tp * (cell // pp + dp * (cell % pp)) for cell in lost_cells(self.scenario))

    def seconds_per_ns(self) -> float:
        """Length of one ns of the profile, so that no piece of either plan is shorter than ``piece_ms``."""
        before, after = scenario_topology(self.scenario)
        plans = (nominal_plan(before, self.profile), answer(self.policy, after, self.profile))
        shortest = min(cost.forward for plan in plans for cost in piece_costs(plan.pieces, plan.cells, self.profile))
        return self.piece_ms / 1e3 / shortest


@dataclass(frozen=True)
class Predicted:
    """The simulator's word: seconds a step before and after, and rows a second after over before."""

    before_s: float
    after_s: float
    relative: float


def answer(policy: str, topology: Topology, profile: Profile) -> Plan:
    """The plan of ``policy``; Megatron's own while nothing is lost. Raises :class:`PlanError` when it stops."""
    if policy not in ANSWERS:
        raise PlanError(f"unknown policy {policy!r}: one of {', '.join(ANSWERS)}")
    if not damaged_replicas(topology) and not reduced_cells(topology):
        return nominal_plan(topology, profile)
    return ANSWERS[policy](topology, profile)


def predict(case: Case) -> Predicted:
    """The simulator's result for ``case``."""
    before, after = scenario_topology(case.scenario)
    second = case.seconds_per_ns()
    whole, damaged = nominal_plan(before, case.profile), answer(case.policy, after, case.profile)
    times = plan_time(whole, case.profile) * second, plan_time(damaged, case.profile) * second
    return Predicted(times[0], times[1], (damaged.rows / times[1]) / (whole.rows / times[0]))
