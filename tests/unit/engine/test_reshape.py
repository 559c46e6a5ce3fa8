"""Other sizes over the ranks there are: complete, the same whatever came before, and with little to move.

The model is that of ``tests/cluster/cut_model.py``. It is only asked for what its ranks cover.
"""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import Any, cast

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.requests import ParallelSizes
from megatron.elastic.engine.compute.model_interface import CellPlace
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.cell_sizes import CellSizes
from megatron.elastic.engine.generation.factory import ViewFactory
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.repartition import better_assignment
from megatron.elastic.engine.generation.reshape import covered_by, reshaped
from megatron.elastic.engine.generation.shape import CellCut, chunks_of
from megatron.elastic.engine.generation.view import unit_groups
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Grid
from megatron.elastic.plan.planner import instant_plan, uniform_profile
from megatron.elastic.plan.policies.registry import choice_of, policy_named
from megatron.elastic.plan.schedule.validate import validate_plan
from megatron.elastic.state.layout import ParamSpec, UnitLayout
from megatron.elastic.state.ownership import initial, rebalance
from megatron.elastic.state.placement import Rules
from tests.cluster.cut_model import CUT_DIM, SHAPES, CutModel, shape_at_launch
from tests.unit.calls import lines_in

UNITS = 6
SIZES = st.builds(
    ParallelSizes,
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 3]),
    data=st.sampled_from([1, 2]),
    context=st.sampled_from([1, 1, 2]),
    experts=st.just(1),
)


class Job:
    """A launch, what its model covers, and the layouts of its state."""

    def __init__(self, sizes: ParallelSizes, extra: int = 0) -> None:
        cuts = [UNITS * stage // sizes.pipeline for stage in range(sizes.pipeline + 1)]
        grid = Grid(12, 1, sizes.data)
        tensor, pipeline, data, context = sizes[:4]
        chunks = tuple(pairwise(cuts))
        self.launch = LaunchTopology(tensor, pipeline, data, chunks, grid, extra=extra * sizes.cell, context=context)
        ranks = tuple(range(tensor))
        self.covered = CutModel(UNITS, (), CellPlace(ranks, 0), cast(Any, None)).covered
        self.layouts = {
            (unit, shard): UnitLayout.build(unit, shard, self._specs(shard), 256)
            for unit in range(UNITS)
            for shard in self.launch.shards
        }
        self.elements = {key: layout.numel for key, layout in self.layouts.items()}
        self.slots = range(self.launch.slots + self.launch.extra)

    def _specs(self, shard: int) -> list[ParamSpec]:
        common = self.launch.common
        return [self._spec(name) for name in SHAPES if common is None or (name in CUT_DIM) == (shard != common)]

    def _spec(self, name: str) -> ParamSpec:
        shape = shape_at_launch(name, self.launch.tensor)
        numel = 1
        for size in shape:
            numel *= size
        return ParamSpec(name, numel, shape, sharded=name in CUT_DIM)

    def to(self, sizes: ParallelSizes, living: set[int] | None = None) -> Assignment:
        return reshaped(self.launch, sizes, self.slots if living is None else living, self.elements, self.covered)

    def kept(self, assignment: Assignment) -> int:
        """Elements that ranks cover at the launch and under ``assignment``."""
        before = Assignment.at_launch(self.launch)
        spaces = (covered_by(before, r, self.covered) & covered_by(assignment, r, self.covered) for r in self.slots)
        return sum(self.elements[space] for common in spaces for space in common)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Job, ParallelSizes, set[int]]:
    """A launch, sizes, and living ranks that suffice for them."""
    job, sizes = Job(draw(SIZES), draw(st.integers(0, 4))), draw(SIZES)
    assume(sizes.ranks <= len(job.slots))
    living = draw(st.sets(st.sampled_from(job.slots), min_size=sizes.ranks))
    return job, sizes, living


@given(changes())
def test_each_replica_covers_each_unit_once_on_living_ranks(change: tuple[Job, ParallelSizes, set[int]]) -> None:
    job, sizes, living = change
    found = job.to(sizes, living)
    assert found.base.sizes == sizes and len(found.replicas) == sizes.data and found.is_nominal
    cells = [segment.cell for replica in found.replicas for segment in replica.segments]
    assert len(set(cells)) == sizes.pipeline * sizes.data
    for replica in found.replicas:
        assert replica.segments[0].first == 0 and replica.segments[-1].end == UNITS
        assert all(one.end == other.first < other.end for one, other in pairwise(replica.segments))
        for segment in replica.segments:
            ranks = found.cells[segment.cell].ranks
            assert len(ranks) == sizes.cell and set(ranks) <= living
            held = frozenset[tuple[int, int]]().union(*(covered_by(found, rank, job.covered) for rank in ranks))
            assert held == {(u, shard) for u in range(segment.first, segment.end) for shard in job.launch.shards}
    placed = [rank for cell in found.cells.values() for rank in cell.ranks]
    assert len(set(placed)) == len(placed) and len(placed) == len(job.slots) // sizes.cell * sizes.cell
    assert not set(found.waiting(job.slots)) & set(cells)


@given(changes())
def test_every_row_passes_every_unit(change: tuple[Job, ParallelSizes, set[int]]) -> None:
    job, sizes, living = change
    topology = job.to(sizes, living).topology(living)
    validate_plan(instant_plan(topology), UNITS, uniform_profile(UNITS))


@given(SIZES, st.lists(SIZES, max_size=4))
def test_through_any_sizes_and_back_to_the_same_assignment(start: ParallelSizes, through: list[ParallelSizes]) -> None:
    """The launch's sizes give the launch's own assignment; on the way each block has an owner that computes it."""
    job = Job(start)
    first = Assignment.at_launch(job.launch)
    rules = Rules(1, 2, dict.fromkeys(job.slots, 0))
    placement = initial(unit_groups(first, job.layouts, job.slots, job.covered), rules)
    for sizes in (*(one for one in through if one.ranks <= len(job.slots)), start):
        found = job.to(sizes)
        assert found == job.to(sizes) and found.digest() == job.to(sizes).digest()
        groups = unit_groups(found, job.layouts, job.slots, job.covered)
        placement, _ = rebalance(placement, groups, rules)
        for group in groups:
            assert all(placement.owner(block.key) in group.holders for block in group.blocks)
        assert placement.copies.keys() == {block.key for layout in job.layouts.values() for block in layout.blocks}
    assert found == first


@settings(max_examples=60)
@given(changes())
def test_no_other_order_of_the_ranks_keeps_more(change: tuple[Job, ParallelSizes, set[int]]) -> None:
    job, sizes, living = change
    assume(len(living) <= 6)
    found = job.to(sizes, living)
    if found.shape is None:
        return
    for order in permutations(sorted(living), sizes.ranks):
        cells = tuple(order[at : at + sizes.cell] for at in range(0, len(order), sizes.cell))
        shape = type(found.shape)(sizes, cells, found.shape.chunks)
        assert job.kept(Assignment.regular(job.launch, shape)) <= job.kept(found)


def test_the_work_grows_with_the_number_of_ranks_and_no_faster() -> None:
    def lines(data: int) -> int:
        job = Job(ParallelSizes(2, 3, data, 1, 1))
        return lines_in(lambda: job.to(ParallelSizes(2, 2, data, 1, 1)))

    few, many = lines(4), lines(16)
    print(f"{few} lines for 24 ranks, {many} for 96")
    assert many < 6 * few


def test_where_ranks_sit() -> None:
    """TP 2 by PP 2 in other sizes: a rank stays with its layers, or with its half of each layer."""
    job = Job(ParallelSizes(2, 2, 1))
    ranks = {
        sizes: tuple(cell.ranks for cell in job.to(ParallelSizes(*sizes)).cells.values())
        for sizes in [(1, 4, 1), (4, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4), (3, 1, 1)]
    }
    assert ranks == {
        (1, 4, 1): ((0,), (1,), (2,), (3,)),
        (4, 1, 1): ((0, 2, 1, 3),),
        (2, 1, 2): ((0, 1), (2, 3)),
        (1, 2, 2): ((0,), (2,), (1,), (3,)),
        (1, 1, 4): ((0,), (1,), (2,), (3,)),
        (3, 1, 1): ((0, 1, 3),),
    }


@given(st.integers(1, UNITS))
def test_layers_are_dealt_evenly_with_embedding_and_head_beside_the_outer_ones(stages: int) -> None:
    job = Job(ParallelSizes(1, 2, 1))
    chunks = chunks_of(job.launch, stages)
    assert [first for first, _ in chunks] == [0, *(end for _, end in chunks[:-1])] and chunks[-1][1] == UNITS
    layers = [end - first for first, end in chunks]
    if stages <= UNITS - 2:
        layers[0] -= 1
        layers[-1] -= 1
    assert max(layers) - min(layers) <= 1 and min(layers) > 0


def test_units_without_cut_parameters_have_holders_at_any_size() -> None:
    """A launch of one tensor-parallel rank has no common part: shard 0 of a final norm has what all ranks need."""
    job = Job(ParallelSizes(1, 2, 2))
    groups = job.to(ParallelSizes(2, 1, 1, 2)).state_groups(lambda unit, position: ())
    assert {key: set(ranks) for key, ranks in groups.items()} == {(unit, 0): set(range(4)) for unit in range(UNITS)}


def test_sizes_that_cannot_be_are_refused() -> None:
    job = Job(ParallelSizes(2, 2, 1))
    with pytest.raises(ValueError, match="TP 2, PP 2, DP 2 is 8 ranks; there are 4"):
        job.to(ParallelSizes(2, 2, 2))
    with pytest.raises(ValueError, match="7 stages for 6 units"):
        Job(ParallelSizes(1, 3, 3)).to(ParallelSizes(1, 7, 1))


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2), (1, 3, 1)])
def test_cells_that_the_sizes_leave_over_wait_and_replace_lost_ones(sizes: tuple[int, int, int]) -> None:
    job = Job(ParallelSizes(2, 2, 1))
    found = job.to(ParallelSizes(*sizes))
    assert found.waiting(job.slots)
    assert better_assignment(found, job.slots, uniform_profile(UNITS), 1 << 50) is None, "no further replica"
    without = set(job.slots) - set(found.cells[0].ranks)
    seated = found.seated(without)
    assert len(seated.replicas) == sizes[2] and not seated.broken(without)
    assert better_assignment(seated, without, uniform_profile(UNITS), 1 << 50) is None


def test_a_lost_cell_of_the_sizes_is_replaced_and_returns() -> None:
    """The sizes stay in force: ranks that return fill their own places; the cut is that of the sizes."""
    job = Job(ParallelSizes(2, 2, 1), extra=2)
    found = job.to(ParallelSizes(1, 4, 1))
    without = set(job.slots) - {1}
    seated = found.seated(without)
    assert seated.base == found.base and [s.cell for s in seated.replicas[0].segments] == [0, 4, 2, 3]
    again = better_assignment(found, set(job.slots) - {4, 5, 6, 7}, uniform_profile(UNITS), 1 << 50)
    assert again is None


def test_groups_of_a_model_of_one_size_are_not_mixed() -> None:
    """Ranks 1 and 4 are missing: two whole groups would have ranks of different groups of the launch."""
    job, fixed = Job(ParallelSizes(2, 1, 2), extra=2), CellSizes.of(lambda tensor, parts: None, CellCut(2))
    costs = uniform_profile(UNITS)
    views = ViewFactory(
        fabric=cast(Any, None),
        launch_topology=job.launch,
        config=ElasticConfig(),
        layouts=job.layouts,
        arena=cast(Any, None),
        choose=choice_of(policy_named("elaswave")),
        moves_units=True,
        profile=costs,
        hardware=Hardware(1 << 50, 10**9),
        sizes=fixed,
        covered=job.covered,
        refusal=lambda tensor, parts, stages: "three stages are too many" if stages == 3 else "",
    )
    assert views.reshaped(range(4), ParallelSizes(2, 2, 1)).base.sizes == ParallelSizes(2, 2, 1)
    with pytest.raises(PlanError, match="tensor-parallel groups of the launch only"):
        views.reshaped((0, 2, 3, 5), ParallelSizes(2, 2, 1))
    with pytest.raises(PlanError, match="not computed by tensor-parallel groups of 1 ranks"):
        views.reshaped(range(4), ParallelSizes(1, 2, 2))
    with pytest.raises(PlanError, match="three stages are too many"):
        views.reshaped(range(6), ParallelSizes(2, 3, 1))
