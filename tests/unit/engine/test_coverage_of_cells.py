"""Cells of any ranks: who holds what of a unit's state, and how local parameters lie in the arena.

The model is that of ``tests/cluster/cut_model.py``. It is only held here, not computed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.buffers import Arena, HeldPart
from megatron.elastic.engine.compute.exact_gradients import ExactGradients
from megatron.elastic.engine.compute.model_interface import CellPlace
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.state_catalog import Catalog, build_layouts, built, own_catalog
from megatron.elastic.engine.generation.view import shared_runs
from megatron.elastic.plan.model import Grid
from megatron.elastic.state.coverage import Position
from megatron.elastic.state.layout import UnitLayout, UnitShard
from tests.cluster.cut_model import CUT_DIM, HIDDEN, SHAPES, CutModel, overlaps, shape_at_launch, whole_values

UNITS = 3
SIZES = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3))


def topology_of(tensor: int, pipeline: int, data: int) -> LaunchTopology:
    cuts = [UNITS * stage // pipeline for stage in range(pipeline + 1)]
    return LaunchTopology(tensor, pipeline, data, tuple(pairwise(cuts)), Grid(4 * data, 1, data))


def model_of(topology: LaunchTopology, rank: int) -> CutModel:
    shard, _, stage = topology.place(rank) or (0, 0, 0)
    units = range(*topology.chunks[stage])
    return CutModel(UNITS, units, CellPlace(topology.cell_of(rank).ranks, shard), cast(Any, None))


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    """Cells of the launch's ranks in any order, each rank in one cell or in none."""
    topology = topology_of(*draw(SIZES))
    ranks = draw(st.permutations(range(topology.slots)))[: draw(st.integers(0, topology.slots))]
    cells = draw(st.lists(st.integers(0, len(topology.cells) - 1), min_size=len(ranks), max_size=len(ranks)))
    dealt: dict[int, list[int]] = {cell.id: [] for cell in topology.cells}
    for rank, cell in zip(ranks, cells, strict=True):
        if len(dealt[cell]) < HIDDEN:
            dealt[cell].append(rank)
    formed = tuple((cell, tuple(mine)) for cell, mine in sorted(dealt.items()))
    return replace(Assignment.at_launch(topology), formed=formed)


def covered_by(assignment: Assignment) -> Any:
    return model_of(assignment.launch_topology, 0).covered


# -- pure: cells and holders -----------------------------------------------------------------------


@given(assignments())
def test_each_cell_holds_every_element_of_its_units(assignment: Assignment) -> None:
    """The holders of each (unit, shard) are the ranks that compute a part of it; a cell's ranks cover all of it."""
    covered, topology = covered_by(assignment), assignment.launch_topology
    groups = assignment.state_groups(covered)
    holders = defaultdict(set)
    for cell in assignment.cells.values():
        for rank in cell.ranks:
            held = assignment.held_by(rank, covered)
            assert held.units == assignment.units_in(cell.id) and held.place is not None
            for key in held.spaces:
                holders[key].add(rank)
        for unit in assignment.units_in(cell.id) if cell.ranks else ():
            for name in CUT_DIM:
                elements = torch.zeros(SHAPES[name])
                for index, rank in enumerate(cell.ranks):
                    for overlap in overlaps(name, Position(index, len(cell.ranks)), topology.tensor):
                        assert rank in groups[unit, overlap.shard], "a rank that computes a part holds the state"
                        dim = CUT_DIM[name]
                        size = SHAPES[name][dim] // topology.tensor
                        first, stop = (overlap.shard * size + at for at in overlap.remote[dim])
                        elements.narrow(dim, first, stop - first).fill_(1.0)
                assert bool(elements.all()), f"unit {unit}: the ranks {cell.ranks} leave out a part of {name}"
            if topology.common is not None:
                assert set(cell.ranks) <= set(groups[unit, topology.common])
    assert {key: set(ranks) for key, ranks in groups.items()} == holders
    assert all(len(set(ranks)) == len(ranks) for ranks in groups.values())


@given(assignments())
def test_ranks_with_the_same_holders_reduce_the_same_runs(assignment: Assignment) -> None:
    """A run is one collective call: all its members begin with the same calls, in one order for all ranks."""
    groups = assignment.state_groups(covered_by(assignment))
    order = {key: number for number, key in enumerate(sorted(groups, key=lambda key: (key[1], key[0])))}
    calls: dict[int, list[tuple[UnitShard, ...]]] = {}
    for rank in range(assignment.launch_topology.slots):
        held = sorted((key for key, ranks in groups.items() if rank in ranks), key=order.__getitem__)
        calls[rank] = list(shared_runs(held, groups))
        assert [key for run in calls[rank] for key in run] == held
    for rank, runs in calls.items():
        for run in runs:
            assert len({groups[key] for key in run}) == 1
            assert all(run in calls[peer] for peer in groups[run[0]]), f"rank {rank} alone joins {run}"


@given(assignments(), assignments())
def test_units_are_gained_where_the_place_in_the_cell_changes(before: Assignment, after: Assignment) -> None:
    if before.launch_topology != after.launch_topology:
        return
    covered = covered_by(before)
    gained = after.gained(before)
    for rank in range(before.launch_topology.slots):
        now, then = after.held_by(rank, covered), before.held_by(rank, covered)
        new = {unit for unit, _ in set(now.spaces) - set(then.spaces)}
        assert new <= gained.get(rank, frozenset())
        if now == then:
            assert rank not in gained


@given(SIZES)
def test_the_cells_of_the_launch_are_the_default(sizes: tuple[int, int, int]) -> None:
    launch = Assignment.at_launch(topology_of(*sizes))
    cells = launch.launch_topology.cells
    same = replace(launch, formed=tuple((cell.id, cell.ranks) for cell in cells))
    assert same.state_groups() == launch.state_groups()
    for rank in range(launch.launch_topology.slots):
        assert same.held_by(rank) == launch.held_by(rank)
        place = launch.place(rank)
        assert place is not None and place.index == launch.launch_topology.shard(rank)
    assert launch.digest() != same.digest(), "an assignment that names its cells is another value"


def test_a_rank_is_in_one_cell_at_most() -> None:
    launch = Assignment.at_launch(topology_of(2, 1, 2))
    with pytest.raises(ValueError, match="two cells"):
        replace(launch, formed=((0, (0, 2)),))
    with pytest.raises(ValueError, match="two cells"):
        replace(launch, formed=((0, (0,)), (1, (2, 0))))
    with pytest.raises(ValueError, match="a cell of the sizes in force"):
        replace(launch, formed=((5, (0,)),))
    dissolved = replace(launch, formed=((1, ()),))
    assert dissolved.whole(range(4)) == (0,) and dissolved.topology(range(4)).parked == (2, 3)
    assert dissolved.held_by(2) == HeldPart() and dissolved.broken(range(4)) == (1,)


def test_replicated_parameters_are_in_the_catalog_once_a_unit() -> None:
    topology = topology_of(2, 1, 1)
    first, second = (own_catalog(model_of(topology, rank), topology, rank) for rank in (0, 1))
    common = {(unit, 2) for unit in range(UNITS)}
    assert first.keys() - second.keys() == {(unit, 0) for unit in range(UNITS)}
    assert first.keys() & second.keys() == common and all(first[key] == second[key] for key in common)
    assert {spec.name for key in common for spec in first[key]} == SHAPES.keys() - CUT_DIM.keys()
    alone = topology_of(1, 1, 1)
    assert own_catalog(model_of(alone, 0), alone, 0).keys() == {(unit, 0) for unit in range(UNITS)}


# -- the arena -------------------------------------------------------------------------------------


def layouts_of(topology: LaunchTopology) -> dict[UnitShard, UnitLayout]:
    catalog: Catalog = {}
    for rank in range(topology.slots):
        catalog |= own_catalog(model_of(topology, rank), topology, rank)
    return build_layouts(catalog, 256)


def arena_at_launch(tensor: int, index: int) -> tuple[Arena, CutModel]:
    """The arena of a rank of a launch of ``tensor`` ranks, the last one for a larger ``index``."""
    topology = topology_of(tensor, 1, 1)
    rank = min(index, tensor - 1)
    model = model_of(topology, rank)
    return Arena(model, layouts_of(topology), built(model, own_catalog(model, topology, rank), topology, rank)), model


def part_of(model: CutModel, tensor: int, count: int, index: int) -> HeldPart:
    """The part of one rank in a cell of ``count`` that has all units."""
    common, place = topology_of(tensor, 1, 1).common, CellPlace(tuple(range(count)), index)
    shards = (*model.covered(0, place.position), *(() if common is None else (common,)))
    return HeldPart(tuple(range(UNITS)), place, tuple((unit, shard) for unit in range(UNITS) for shard in shards))


def arena_at(tensor: int, count: int, index: int) -> tuple[Arena, CutModel]:
    """The arena of one rank in a cell of ``count``, after it was one of the launch's ``tensor``."""
    arena, model = arena_at_launch(tensor, index)
    arena.hold(part_of(model, tensor, count, index))
    return arena, model


def cut(values: torch.Tensor, name: str, tensor: int, shard: int) -> torch.Tensor:
    """The part of a whole parameter that the state has under ``shard``."""
    if name not in CUT_DIM:
        return values
    return values.chunk(tensor, CUT_DIM[name])[shard]


def write(arena: Arena, tensor: int) -> None:
    """Gather: every space gets the values of the whole model."""
    for (unit, shard), where in arena.slices.items():
        for slot in where.layout.slots:
            start = where.start + slot.start
            part = cut(whole_values(unit, slot.spec.name), slot.spec.name, tensor, shard)
            arena.parameters[start : start + slot.spec.numel] = part.reshape(-1)
    arena.collect()


CASES = [(tensor, count) for tensor in (1, 2, 4) for count in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize(("tensor", "count"), CASES)
def test_local_parameters_have_the_values_of_the_gathered_spaces(tensor: int, count: int) -> None:
    for index in range(count):
        arena, model = arena_at(tensor, count, index)
        write(arena, tensor)
        fresh = CutModel(UNITS, range(UNITS), CellPlace(tuple(range(count)), index), cast(Any, None))
        for unit in range(UNITS):
            for item, wanted in zip(model.unit_parameters(unit), fresh.unit_parameters(unit), strict=True):
                assert torch.equal(item.parameter, wanted.parameter), f"unit {unit}, {item.spec.name}"


@pytest.mark.parametrize(("tensor", "count"), CASES)
def test_contributions_of_all_positions_add_up_to_the_gradient(tensor: int, count: int) -> None:
    """Each element of a cut parameter gets the sum over the positions that compute it."""
    total: dict[tuple[UnitShard, str], torch.Tensor] = {}
    for index in range(count):
        arena, _ = arena_at(tensor, count, index)
        arena.zero_gradients()
        for views in arena.gradient_views().values():
            for view in views:
                view.fill_(1.0)
        arena.spread(arena.gradients)
        for key, where in arena.slices.items():
            for slot in where.layout.slots:
                start = where.start + slot.start
                part = arena.gradients[start : start + slot.spec.numel].view(slot.spec.shape)
                total[key, slot.spec.name] = total.get((key, slot.spec.name), torch.zeros(())) + part
    for ((_, shard), name), found in total.items():
        wanted = torch.zeros(SHAPES[name])
        for index in range(count):
            for overlap in overlaps(name, Position(index, count), tensor):
                if name not in CUT_DIM:
                    wanted += 1.0
                    continue
                size = SHAPES[name][CUT_DIM[name]] // tensor
                first, stop = (overlap.shard * size + at for at in overlap.remote[CUT_DIM[name]])
                wanted.narrow(CUT_DIM[name], first, stop - first).add_(1.0)
        assert torch.equal(found, cut(wanted, name, tensor, shard)), (shard, name)


@pytest.mark.parametrize(("tensor", "count"), CASES)
def test_a_parameter_that_is_one_whole_shards_is_a_view_and_others_are_not(tensor: int, count: int) -> None:
    for index in range(count):
        arena, model = arena_at(tensor, count, index)
        local = set[str]()
        for item in model.unit_parameters(0):
            name = item.spec.name
            start, _ = arena.place_of(0, name)
            assert item.parameter.data_ptr() == arena.parameters[start:].data_ptr()
            found = overlaps(name, Position(index, count), tensor)
            box = tuple((0, size) for size in shape_at_launch(name, tensor))
            assert (start < arena.state_stop) == (len(found) == 1 and found[0].remote == box), name
            local |= {name} if start >= arena.state_stop else set()
        assert arena.has_local == bool(local) and (tensor != count or not local)


@pytest.mark.parametrize(("tensor", "count"), CASES)
def test_what_was_prepared_beside_a_step_is_what_the_ranks_then_use(tensor: int, count: int) -> None:
    """Storage of another length would be allocated again, while all ranks wait."""
    for index in range(count):
        arena, model = arena_at_launch(tensor, index)
        held = part_of(model, tensor, count, index)
        arena.prepare(held)
        prepared = arena.spare or (arena.parameters, arena.gradients)  # nothing, if the rank's part does not change
        arena.hold(held)
        assert arena.parameters.data_ptr() == prepared[0].data_ptr()
        assert arena.gradients.data_ptr() == prepared[1].data_ptr()


def test_exact_gradients_refuse_a_cell_of_another_size() -> None:
    ExactGradients(arena_at(2, 2, 0)[0], 4).begin(36)
    with pytest.raises(ValueError, match="tensor-parallel size"):
        ExactGradients(arena_at(2, 1, 0)[0], 4).begin(36)
