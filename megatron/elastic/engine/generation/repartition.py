"""The choice of a new assignment for the living ranks: the steady plan.

These are pure functions of values that are equal on every rank (assignment, living ranks,
agreed costs), evaluated at the same boundary. The instant plan moves no unit and already
runs. The steady plan replaces it if it pays off (``plan/search/steady.py``). The cut of the sizes in
force (the launch's, or those of a reshape) is taken as soon as there are as many cells of their size
as they have, whichever cells they are. While some cells have fewer ranks, units are dealt by the
cells' speeds. With more cells than at launch, the best cut for all of them is taken, usually with
further replicas; after a reshape they wait.

Before costs are measured, a unit's cost is estimated from its matrices: two floating-point
operations forward and four backward, for each parameter and position that multiplies it (of
experts some do). So layers of different kinds differ in cost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.cell_sizes import CellSizes
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.shape import CellCut
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Profile, UnitCost
from megatron.elastic.plan.profile import PPM
from megatron.elastic.plan.search.steady import DecisionOptions, decide
from megatron.elastic.plan.topology import with_speeds
from megatron.elastic.state.layout import ParamSpec, UnitLayout, UnitShard

__all__ = ["Recut", "all_cells_present", "better_assignment", "unmeasured_profile"]

_OPERATIONS_PER_NS = 10
"""Assumed speed of a cell before costs are measured; ratios between units do not depend on it."""
_NO_WORK_SHARE = 20
"""Divisor: a unit without matrix products (an embedding) is assumed to cost a layer's time divided by this."""


@dataclass(frozen=True)
class Recut:
    """A change of assignment that pays off. Times in ns a step; 0 if work cannot go on without the change."""

    target: Assignment
    now_ns: int
    then_ns: int
    moved_units: int
    """Number of (unit, cell) pairs that are new."""


def all_cells_present(assignment: Assignment, living: Collection[int]) -> bool:
    """Return whether there are at least as many cells of their full size as the sizes in force have."""
    return _full(assignment, living) >= assignment.base.computing


def _full(assignment: Assignment, living: Collection[int]) -> int:
    """Return the number of whole cells that have all ranks of the sizes in force."""
    size = assignment.base.cell_size
    return sum(len(assignment.cells[number].ranks) == size for number in assignment.whole(living))


def better_assignment(
    assignment: Assignment,
    living: Collection[int],
    profile: Profile,
    memory_bytes: int,
    speeds: Mapping[int, int] | None = None,
    options: DecisionOptions | None = None,
    sizes: CellSizes | None = None,
) -> Recut | None:
    """Return the assignment to move to, or ``None`` to keep the present one.

    ``memory_bytes``: memory of a rank; ``speeds``: cell → ppm, of cells slower than their peers; ``options``: time
    over which a cut must pay off. ``sizes`` knows the speeds and memory of cells of other sizes than at launch.

    With as many full cells as the sizes in force have it is their cut. The cells that the sizes of a reshape leave
    over wait: a user has chosen the number of replicas. Raises :class:`PlanError` if some unit has no living holder and
    no cut over the living cells fits their memory.
    """
    full, computing = _full(assignment, living), assignment.base.computing
    if full == computing or (full > computing and assignment.shape is not None):
        regular = replace(assignment, replicas=assignment.nominal.replicas)
        if assignment.cut == regular.cut and not assignment.broken(living):
            return None
        return _recut(assignment, regular.seated(living), 0, 0)
    launch, base = assignment.launch_topology, assignment.base
    known = sizes or CellSizes.of(lambda tensor, parts: None, CellCut(launch.tensor, launch.context))
    topology = with_speeds(known.topology(assignment, living), dict(speeds or {}))
    room = {cell.id: memory_bytes * known.room(base.cut(len(cell.ranks))) // PPM for cell in topology.cells}
    cells = tuple(replace(cell, memory_bytes=room[cell.id]) for cell in topology.cells)
    topology = replace(topology, cells=cells)
    if not topology.cells:
        raise PlanError("every tensor-parallel group has lost a rank: no cell can compute")
    decision = decide(topology, profile, options)
    if decision.steady is None:
        return None
    target = replace(assignment, replicas=decision.steady.replicas())
    return None if target == assignment else _recut(assignment, target, decision.instant_ns, decision.steady_ns)


def _recut(before: Assignment, target: Assignment, now_ns: int, then_ns: int) -> Recut:
    moved = sum(len(set(target.units_in(cell)) - set(before.units_in(cell))) for cell in target.cells)
    return Recut(target, now_ns, then_ns, moved)


def unmeasured_profile(
    launch_topology: LaunchTopology,
    layouts: Mapping[UnitShard, UnitLayout],
    sequence: int,
    boundary_bytes: int,
    itemsize: int,
    activation_bytes: Callable[[int], int],
    state_bytes: int,
    used_ppm: Callable[[ParamSpec], int] = lambda spec: PPM,
    quantized_bytes: Callable[[ParamSpec], int] = lambda spec: 0,
    gradient_bytes: int = 4,
) -> Profile:
    """Return costs from sizes: ``sequence`` positions and ``boundary_bytes`` a row, ``itemsize`` bytes a parameter.

    ``activation_bytes(unit)``: bytes that a row's forward keeps; ``state_bytes``: bytes of all copies of a
    parameter's optimizer state together; ``used_ppm``: of a matrix, the positions that multiply it;
    ``quantized_bytes``: of a parameter, those of its copies in 8 bits; ``gradient_bytes``: of its gradient.
    """
    units_of = range(launch_topology.compute_units)
    multiplied = [_multiplied(launch_topology, layouts, unit, used_ppm) for unit in units_of]
    typical = sorted(multiplied)[len(multiplied) // 2]
    units = []
    for unit, parameters in enumerate(multiplied):
        looks_up = unit == 0 or not parameters
        work = max(1, typical // _NO_WORK_SHARE if looks_up else parameters)
        forward = max(1, 2 * work * sequence // _OPERATIONS_PER_NS)
        held = _of_one_rank(launch_topology, layouts, unit)
        size = sum(layout.numel for layout in held)
        quantized = sum(quantized_bytes(slot.spec) for layout in held for slot in layout.slots)
        if launch_topology.tied_unit is not None and unit in (0, launch_topology.compute_units - 1):
            size += sum(layout.numel for layout in _of_one_rank(launch_topology, layouts, launch_topology.tied_unit))
        elements = size + _of_replicas(launch_topology, layouts, unit)
        units.append(
            UnitCost(
                forward_ns=forward,
                backward_ns=2 * forward,
                weight_grad_ns=forward,
                param_bytes=elements * (itemsize + gradient_bytes) + quantized,
                state_bytes=size * state_bytes,
                activation_bytes=activation_bytes(unit),
                boundary_bytes=boundary_bytes,
            )
        )
    return Profile(tuple(units))


def _of_replicas(launch_topology: LaunchTopology, layouts: Mapping[UnitShard, UnitLayout], unit: int) -> int:
    """Return the elements of the replicas of experts for which a rank has room; their state is elsewhere."""
    of_expert = layouts.get((unit, launch_topology.expert_shard(0))) if launch_topology.experts else None
    return 0 if of_expert is None else of_expert.numel * launch_topology.expert_replicas


def _multiplied(
    launch_topology: LaunchTopology,
    layouts: Mapping[UnitShard, UnitLayout],
    unit: int,
    used_ppm: Callable[[ParamSpec], int],
) -> int:
    """Return the elements a position of a unit's matrices on one rank; the output layer has the tied one, if any."""
    units = [unit]
    if unit == launch_topology.compute_units - 1 and launch_topology.tied_unit is not None:
        units.append(launch_topology.tied_unit)
    held = [layout for unit in units for layout in _of_one_rank(launch_topology, layouts, unit)]
    matrices = [slot.spec for layout in held for slot in layout.slots if len(slot.spec.shape) > 1]
    return sum(spec.numel * used_ppm(spec) // PPM for spec in matrices)


def _of_one_rank(
    launch_topology: LaunchTopology, layouts: Mapping[UnitShard, UnitLayout], unit: int
) -> list[UnitLayout]:
    """Return the layouts of a unit's state on the first rank of a tensor-parallel group at launch."""
    common = () if launch_topology.common is None else (launch_topology.common,)
    deal = launch_topology.deal
    experts = deal.on_ranks(0, deal.at(0))[0]
    shards = (0, *common, *map(launch_topology.expert_shard, experts))
    return [layouts[unit, shard] for shard in shards if (unit, shard) in layouts]
