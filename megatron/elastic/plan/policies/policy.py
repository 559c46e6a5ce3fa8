"""Policies behind one interface: what each system does when cells are lost.

Idea: a policy maps (topology, profile) to an :class:`PolicyOutcome`: what runs at
once, what runs after migration, how many rows a step still computes. The same
objects serve the engine (``--elastic-policy``) and the simulator, so that peers
are compared on the same tables and costs, each in its best light:

* ``elaswave``: four axes (docs/design.md §7); :class:`DecisionOptions` switches them off.
* ``recycle`` (arXiv 2405.14009): whole micro-batches rerouted to peers that hold
  the stage, backward split into input and weight gradient, nothing moves. Stages
  step their optimizers by themselves, so that steps overlap: ``step_ns`` is what a
  step takes then (``stagger``), ``ideal_ns`` the limit of it, the work of the
  busiest cell.
* ``torchft``: a replica that lost a cell is dropped; the batch shrinks
  (``torchft``) or the others take its micro-batches (``torchft-batch``).
* ``mindspeed``: a lost DP domain's micro-batches go to the others, once; a second
  loss in another domain ends in a restart.
* ``restart``: the job ends and starts again without the damaged replicas, from
  the last checkpoint.
* ``spares``: waiting cells take the places of lost ones; when none is left,
  as ``restart``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

from megatron.elastic.plan.cost import plan_costs
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.planner import draft_instant
from megatron.elastic.plan.schedule.orders import ORDERINGS
from megatron.elastic.plan.schedule.stagger import regime
from megatron.elastic.plan.schedule.timing import execute
from megatron.elastic.plan.search.graph import GraphOptions, Shape, candidate_shapes
from megatron.elastic.plan.search.steady import DecisionOptions, Move, decide, shape_plan

__all__ = [
    "POLICIES",
    "CheckpointRestart",
    "ElasWave",
    "MindSpeed",
    "Policy",
    "PolicyOutcome",
    "ReCycle",
    "Spares",
    "TorchFT",
    "damaged_replicas",
]


@dataclass(frozen=True)
class PolicyOutcome:
    """A policy's answer. ``answer`` is None when it cannot go on without a restart from a checkpoint."""

    answer: Plan | Shape | None
    step_ns: int
    rows: int
    """Rows of the global batch a step computes (fewer than nominal when the batch shrinks)."""
    restarts: bool = False
    """Every process starts anew from the last checkpoint."""
    ideal_ns: int = 0
    """Lower limit of ``step_ns`` where the policy overlaps steps, else 0."""
    instant: Plan | Shape | None = None
    instant_ns: int = 0
    """What runs until units have moved; equal to the answer when nothing moves."""
    moves: tuple[Move, ...] = ()
    migration_ns: int = 0

    def rate(self) -> float:
        """Rows per ns; 0 when stopped."""
        return self.rows / self.step_ns if self.step_ns else 0.0

    def plan(self, topology: Topology, profile: Profile, split_backward: bool = False) -> Plan:
        """The answer as a plan. Raises :class:`PlanError` when there is none."""
        if self.answer is None:
            raise PlanError("this policy needs a restart from a checkpoint")
        if isinstance(self.answer, Plan):
            return self.answer
        return shape_plan(topology, self.answer, profile, split_backward)


class Policy(Protocol):
    """What to run on what is left."""

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        """Answer to the present topology (dead cells' segments still listed in its replicas)."""


STOPPED = PolicyOutcome(None, 0, 0, restarts=True)
STILL = GraphOptions(alike=False, recut=False, pool=False, drop=True)


def damaged_replicas(topology: Topology) -> list[int]:
    """Replicas that lost a cell."""
    alive = {cell.id for cell in topology.cells}
    return [n for n, replica in enumerate(topology.replicas) if any(s.cell not in alive for s in replica.segments)]


def _dropped(topology: Topology, profile: Profile) -> PolicyOutcome:
    """Damaged replicas rest, the others take their micro-batches."""
    if len(damaged_replicas(topology)) == len(topology.replicas):
        return STOPPED
    whole = [shape for shape in _still_shapes(topology, profile) if shape.kind in ("drop", "keep")]
    if not whole:
        return STOPPED
    shape = whole[0]
    return PolicyOutcome(shape, shape.time_ns, topology.grid.global_batch_size, instant=shape, instant_ns=shape.time_ns)


def _still_shapes(topology: Topology, profile: Profile) -> list[Shape]:
    wanted = STILL if damaged_replicas(topology) else replace(STILL, recut=True)
    even = replace(topology, cells=tuple(replace(cell, speed_ppm=1_000_000) for cell in topology.cells))
    try:
        return candidate_shapes(even, profile, wanted)
    except PlanError:
        return []


@dataclass(frozen=True)
class ElasWave:
    """All axes, or those ``options`` leave on."""

    options: DecisionOptions = field(default_factory=DecisionOptions)

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


@dataclass(frozen=True)
class ReCycle:
    """Reroute with decoupled backward and staggered optimizer, each of which can be left out.

    Tables are chosen for what steps take: one after the other, or ``staggered``.
    """

    split_backward: bool = True
    staggered: bool = True

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        try:
            plan, step = self._fastest(topology, profile)
        except PlanError:
            return STOPPED
        busiest = max(execute(plan, plan_costs(plan.pieces, plan.edges, plan.cells, profile)).busy.values())
        return PolicyOutcome(
            plan, step, topology.grid.global_batch_size, ideal_ns=busiest, instant=plan, instant_ns=step
        )

    def _fastest(self, topology: Topology, profile: Profile) -> tuple[Plan, int]:
        if not self.staggered:
            draft = draft_instant(topology, profile, "reroute", split_backward=self.split_backward)
            return draft.plan, draft.time_ns
        plans = [
            draft_instant(topology, profile, "reroute", split_backward=self.split_backward, ordering=ordering).plan
            for ordering in ORDERINGS
        ]
        return min(((plan, regime(plan, profile, topology.tied).period_ns) for plan in plans), key=lambda one: one[1])


@dataclass(frozen=True)
class TorchFT:
    """The replica is the unit of loss; ``keep_batch`` spreads its micro-batches, otherwise the batch shrinks."""

    keep_batch: bool = False

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        whole = _dropped(topology, profile)
        if self.keep_batch or whole.answer is None or not isinstance(whole.answer, Shape):
            return whole
        lost = len(damaged_replicas(topology))
        left = len(topology.replicas) - lost
        rows = topology.grid.global_batch_size * left // len(topology.replicas)
        nominal = rows // left // topology.grid.micro_batch_size
        quotas = [
            pipeline if not pipeline.quota else replace(pipeline, quota=nominal) for pipeline in whole.answer.pipelines
        ]
        shrunk = replace(topology, grid=replace(topology.grid, global_batch_size=rows))
        plan = shape_plan(shrunk, Shape(tuple(quotas), 0, "torchft"), profile)
        run = execute(plan, plan_costs(plan.pieces, plan.edges, plan.cells, profile))
        shape = Shape(tuple(quotas), run.makespan, "torchft")
        return PolicyOutcome(shape, run.makespan, rows, instant=shape, instant_ns=run.makespan)


@dataclass(frozen=True)
class MindSpeed:
    """One DP domain may go, its micro-batches are redistributed; more than one is a restart."""

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        whole = _dropped(topology, profile)
        return whole if len(damaged_replicas(topology)) <= 1 else replace(whole, restarts=True)


@dataclass(frozen=True)
class CheckpointRestart:
    """Any loss ends the job; it starts again with the replicas that are whole."""

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        whole = _dropped(topology, profile)
        return replace(whole, restarts=True) if damaged_replicas(topology) else whole


@dataclass(frozen=True)
class Spares:
    """``count`` cells wait; a lost cell's place is taken (its state comes from mirrors), then as ``restart``."""

    count: int = 1

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        alive = {cell.id for cell in topology.cells}
        lost = sorted({s.cell for r in topology.replicas for s in r.segments} - alive)
        if len(lost) > self.count:
            return CheckpointRestart().respond(topology, profile)
        model = topology.cells[0]
        standins = tuple(replace(model, id=cell, ranks=(), speed_ppm=1_000_000) for cell in lost)
        full = replace(topology, cells=tuple(sorted((*topology.cells, *standins), key=lambda cell: cell.id)))
        return _dropped(full, profile)


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "elaswave": ElasWave,
        "recycle": ReCycle,
        "torchft": TorchFT,
        "torchft-batch": lambda: TorchFT(keep_batch=True),
        "mindspeed": MindSpeed,
        "restart": CheckpointRestart,
        "spares": Spares,
    }
)
