"""Whether units should change place, and where to: the steady answer to who is here.

Pure functions of what every rank knows alike (assignment, living ranks, agreed
costs), evaluated at the same boundary everywhere. The instant answer needs no
unit to move and is already running; the steady one is taken when it pays back
(``plan/search/steady.py``), and the launch's own cut as soon as there are cells enough for it again, whichever.
With more cells than at launch the best cut of all of them is asked for: usually
further replicas.

Before anything is measured, a unit's cost is taken from what it multiplies: two
floating-point operations a parameter and position forward, four backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Profile, UnitCost
from megatron.elastic.plan.search.steady import DecisionOptions, decide
from megatron.elastic.plan.topology import with_speeds
from megatron.elastic.state.layout import UnitLayout

__all__ = ["Recut", "better_assignment", "everybody_is_here", "unmeasured_profile"]

_OPERATIONS_PER_NS = 10
"""Assumed speed of a cell before anything is measured; ratios between units do not depend on it."""
_GRADIENT_BYTES = 4
_NO_WORK_SHARE = 20
"""A unit that multiplies nothing (an embedding looks rows up) costs a layer's time over this."""


@dataclass(frozen=True)
class Recut:
    """A change of assignment that pays back. Times in ns a step, 0 where there is no way to go on without it."""

    target: Assignment
    now_ns: int
    then_ns: int
    moved_units: int
    """(unit, cell) pairs that are new."""


def everybody_is_here(assignment: Assignment, living: Collection[int]) -> bool:
    """Whether there are as many whole cells as at launch."""
    return len(assignment.whole(living)) >= assignment.launch_topology.data * assignment.launch_topology.pipeline


def better_assignment(
    assignment: Assignment,
    living: Collection[int],
    profile: Profile,
    memory_bytes: int,
    speeds: Mapping[int, int] | None = None,
    options: DecisionOptions | None = None,
) -> Recut | None:
    """The assignment to move to, or ``None`` to stay.

    ``memory_bytes``: what a rank has; ``speeds``: ppm of cells slower than their peers; ``options``: how long a cut is
    expected to be of use.

    With as many cells as at launch that is the launch's cut. Raises :class:`PlanError` when some
    unit has no living holder and no shape of the living cells fits their memory.
    """
    launch_topology = assignment.launch_topology
    if len(assignment.whole(living)) == launch_topology.data * launch_topology.pipeline:
        launch = Assignment.at_launch(launch_topology)
        if assignment.cut == launch.cut and not assignment.broken(living):
            return None
        return _recut(assignment, launch.seated(living), 0, 0)
    topology = with_speeds(assignment.topology(living), dict(speeds or {}))
    topology = replace(topology, cells=tuple(replace(cell, memory_bytes=memory_bytes) for cell in topology.cells))
    if not topology.cells:
        raise PlanError("no tensor-parallel group is whole: nothing can be computed")
    decision = decide(topology, profile, options)
    if decision.steady is None:
        return None
    target = Assignment(assignment.launch_topology, decision.steady.replicas())
    return None if target == assignment else _recut(assignment, target, decision.instant_ns, decision.steady_ns)


def _recut(before: Assignment, target: Assignment, now_ns: int, then_ns: int) -> Recut:
    moved = sum(
        len(set(target.units_of(cell.ranks[0])) - set(before.units_of(cell.ranks[0]))) for cell in target.cells.values()
    )
    return Recut(target, now_ns, then_ns, moved)


def unmeasured_profile(
    launch_topology: LaunchTopology,
    layouts: Mapping[tuple[int, int], UnitLayout],
    sequence: int,
    boundary_bytes: int,
    itemsize: int,
    activation_bytes: Callable[[int], int],
    state_bytes: int,
) -> Profile:
    """Costs from sizes alone: ``sequence`` positions and ``boundary_bytes`` a row, ``itemsize`` bytes a parameter.

    ``activation_bytes(unit)``: what a row's forward keeps; ``state_bytes``: what all copies of a parameter's
    optimizer state take together.
    """
    multiplied = [_multiplied(launch_topology, layouts, unit) for unit in range(launch_topology.compute_units)]
    typical = sorted(multiplied)[len(multiplied) // 2]
    units = []
    for unit, parameters in enumerate(multiplied):
        looks_up = unit == 0 or not parameters
        work = max(1, typical // _NO_WORK_SHARE if looks_up else parameters)
        forward = max(1, 2 * work * sequence // _OPERATIONS_PER_NS)
        size = layouts[unit, 0].numel
        if launch_topology.tied_unit is not None and unit in (0, launch_topology.compute_units - 1):
            size += layouts[launch_topology.tied_unit, 0].numel
        units.append(
            UnitCost(
                forward_ns=forward,
                backward_ns=2 * forward,
                weight_grad_ns=forward,
                param_bytes=size * (itemsize + _GRADIENT_BYTES),
                state_bytes=size * state_bytes,
                activation_bytes=activation_bytes(unit),
                boundary_bytes=boundary_bytes,
            )
        )
    return Profile(tuple(units))


def _multiplied(launch_topology: LaunchTopology, layouts: Mapping[tuple[int, int], UnitLayout], unit: int) -> int:
    """Elements of a unit's matrices on one shard; the head's is the tied one where embeddings are tied."""
    own = [slot.spec for slot in layouts[unit, 0].slots]
    if unit == launch_topology.compute_units - 1 and launch_topology.tied_unit is not None:
        own += [slot.spec for slot in layouts[launch_topology.tied_unit, 0].slots]
    return sum(spec.numel for spec in own if len(spec.shape) > 1)
