"""Times of shapes are those of the tables they would run, though nobody writes them; so are times of drafts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.plan.model import Profile, Segment, Topology, UnitCost
from megatron.elastic.plan.planner import draft_instant
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.search.graph import Pipeline, Shape
from megatron.elastic.plan.search.partition import Model
from megatron.elastic.plan.search.shapes import ShapeTimer, shape_plan
from megatron.elastic.plan.topology import regular_topology, with_speeds, without_cells


@st.composite
def profiles(draw: st.DrawFn, units: int) -> Profile:
    """Units unlike each other, transfers that take time."""
    cost = st.integers(1, 3000)
    found = []
    for _ in range(units):
        back = draw(cost)
        found.append(UnitCost(draw(cost), back, draw(st.integers(0, back)), 100, 600, draw(st.integers(1, 60)), 7))
    return Profile(tuple(found), draw(st.integers(1, 10**10)), draw(st.integers(0, 500)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Topology, Shape, Profile]:
    """Pipelines of any cut and quota over cells of any speed, with room for much or for little."""
    units, rows = draw(st.integers(2, 7)), draw(st.integers(1, 3))
    profile = draw(profiles(units)) if draw(st.booleans()) else Profile((UnitCost(10, 20, 10, 1, 6, 3, 0),) * units)
    quotas = draw(st.lists(st.integers(0, 7), min_size=1, max_size=2).filter(any))
    pipelines: list[Pipeline] = []
    cells = 0
    for quota in quotas:
        marks = draw(st.sets(st.integers(1, units - 1), max_size=4))
        cuts = [0, *sorted(marks), units]
        seats = list(range(cells, cells + len(cuts) - 1))
        if len(seats) == 4 and draw(st.booleans()):
            seats[2:] = seats[:2]  # interleaved: each cell has two stages
        cells += len(cuts) - 1
        segments = tuple(Segment(cell, a, b) for cell, (a, b) in zip(seats, pairwise(cuts), strict=True))
        pipelines.append(Pipeline(segments, quota))
    room = Model(profile, rows, 1).stage_bytes(0, units, draw(st.integers(1, 8)))
    memory = draw(st.integers(room // 3, room)) if draw(st.booleans()) else 1 << 62
    topology = regular_topology(1, cells, cells, rows, sum(quotas), memory_bytes=memory)
    speeds = {cell: draw(st.integers(300_000, 1_300_000)) for cell in range(cells)} if draw(st.booleans()) else {}
    shape = Shape(tuple(pipelines), 0, "test")
    moved = Topology(topology.grid, units, topology.cells, shape.replicas())
    return with_speeds(moved, speeds), shape, profile


@settings(max_examples=150, deadline=None, print_blob=True)
@given(cases(), st.booleans())
def test_a_pipeline_takes_what_its_tables_take(case: tuple[Topology, Shape, Profile], split: bool) -> None:
    topology, shape, profile = case
    for number, time in enumerate(ShapeTimer(topology, profile, split).times(shape)):
        if shape.pipelines[number].quota:
            assert time == plan_time(shape_plan(topology, shape, profile, split, only=[number]), profile)
        else:
            assert time == 0


def test_an_interleaved_pipeline_is_not_taken_for_a_plain_one_of_the_same_cuts() -> None:
    profile = Profile((UnitCost(10, 20, 10, 1, 6, 3, 0),) * 4)
    plain, interleaved = (
        Pipeline(tuple(Segment(cell, unit, unit + 1) for unit, cell in enumerate(cells)), 3)
        for cells in ((0, 1, 2, 3), (4, 5, 4, 5))
    )
    topology = regular_topology(1, 6, 6, waves=6)
    shape = Shape((plain, interleaved), 0, "test")
    moved = Topology(topology.grid, 4, topology.cells, shape.replicas())
    timer = ShapeTimer(moved, profile, False)
    assert timer.times(shape) == [plan_time(shape_plan(moved, shape, profile, only=[n]), profile) for n in (0, 1)]


@settings(max_examples=40, deadline=None, print_blob=True)
@given(st.integers(2, 3), st.integers(1, 4), st.integers(1, 2), st.booleans(), st.data())
def test_a_draft_takes_what_its_tables_take(dp: int, pp: int, rows: int, split: bool, data: st.DataObject) -> None:
    units = 2 * pp
    profile = data.draw(profiles(units))
    topology = regular_topology(dp, pp, units, rows, waves=3)
    damaged = without_cells(topology, data.draw(st.sets(st.integers(0, pp - 1), max_size=pp)))
    draft = draft_instant(damaged, profile, data.draw(st.sampled_from(["reroute", "resize"])), split_backward=split)
    assert draft.time_ns == plan_time(draft.plan, profile)
