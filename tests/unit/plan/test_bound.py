"""The bound holds for every schedule anybody here can make, and is met where plans are even."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Profile, Segment, Topology, UnitCost
from megatron.elastic.plan.planner import nominal_plan
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.schedule.validate import InvalidPlan, validate_plan
from megatron.elastic.plan.search.bound import Reach, schedule_bound
from megatron.elastic.plan.search.graph import Pipeline, Shape, pipeline_bound, work_bound
from megatron.elastic.plan.search.partition import Model
from megatron.elastic.plan.search.steady import DecisionOptions, decide, shape_plan
from megatron.elastic.plan.search.tuning import bound_shapes, few_microbatches
from megatron.elastic.plan.topology import regular_topology, without_cells
from megatron.elastic.simulate.scenarios import FULL, Scenario, layer_profile, scenario_topology


def limited(dp: int, pp: int, units: int, waves: int, headroom: float) -> Topology:
    widest = -(-units // pp)
    memory = int(Model(layer_profile(units), 1, dp).stage_bytes(0, widest, min(pp, waves)) * headroom)
    return regular_topology(dp, pp, units, waves=waves, memory_bytes=memory)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(5, 9),
    st.integers(1, 6),
    st.sampled_from([1.0, 1.25, 2.0]),
    st.booleans(),
    st.data(),
)
def test_no_plan_that_is_made_beats_it(
    dp: int, pp: int, units: int, waves: int, headroom: float, split: bool, data: st.DataObject
) -> None:
    profile = layer_profile(units)
    lost = data.draw(st.sets(st.integers(0, dp * pp - 1), max_size=dp * pp - 1))
    topology = without_cells(limited(dp, pp, units, waves, headroom), lost)
    try:
        least = schedule_bound(topology, profile, split)
    except PlanError:
        least = None
    options = DecisionOptions(horizon_ns=10**18, split_backward=split, reroute=False, resize=False)
    try:
        decision = decide(topology, profile, options)
    except PlanError:
        return
    answer = decision.steady or decision.instant
    assert isinstance(answer, Shape)
    plan = shape_plan(topology, answer, profile, split)
    try:
        validate_plan(plan, units, profile)
    except InvalidPlan:
        return  # whoever stays where he is with more micro-batches than at launch may exceed memory
    assert least is not None, "the bound finds no pipeline that fits where the planner does"
    assert plan_time(plan, profile) >= least >= work_bound(topology, profile) - 1


@pytest.mark.parametrize("split", [False, True])
@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 9), room=st.integers(1, 9), stages=st.integers(1, 4), data=st.data())
def test_no_order_of_one_pipeline_beats_its_stages(
    split: bool, count: int, room: int, stages: int, data: st.DataObject
) -> None:
    """Any cut, memory for ``room`` micro-batches of one unit: the tables made are never shorter than ``least``."""
    widths = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    units = sum(widths)
    unit = UnitCost(1000, 2000, 1000, 0, 0, 60, 0)
    profile = Profile((unit,) * units, latency_ns=0)
    memory = max(room * 60, 60 * max(widths))
    cuts = [sum(widths[:n]) for n in range(stages + 1)]
    topology = regular_topology(1, stages, units, waves=count, cuts=cuts, memory_bytes=memory)
    segments = tuple(Segment(cell, a, b) for cell, (a, b) in enumerate(pairwise(cuts)))
    plan = shape_plan(topology, Shape((Pipeline(segments, count),), 0, "test"), profile, split)
    reach = Reach(topology, profile, split)
    least = max(reach.least(a, b, count) for a, b in pairwise(cuts))
    try:
        validate_plan(plan, units, profile)
    except InvalidPlan:
        return  # 1F1B's own order needs more than there is: it is no schedule of this memory
    assert plan_time(plan, profile) >= least


Order = tuple[str, ...]


def orders(count: int, room: int, split: bool) -> Iterator[Order]:
    """Every order in which one stage may run ``count`` micro-batches with at most ``room`` of them held.

    F forward, B (input gradient of a split) backward, W weight gradient. Micro-batches are alike, so that the
    n-th of each kind may be taken to be the n-th micro-batch's.
    """

    def more(f: int, b: int, w: int) -> Iterator[Order]:
        done = w if split else b
        if done == count:
            yield ()
        for op, able, after in (
            ("F", f < count and f - done < room, (f + 1, b, w)),
            ("B", b < f, (f, b + 1, w)),
            ("W", split and w < b, (f, b, w + 1)),
        ):
            if able:
                yield from ((op, *rest) for rest in more(*after))

    yield from more(0, 0, 0)


def makespan(lines: tuple[Order, ...], widths: list[int], split: bool) -> int:
    """End of the last action when every stage starts each as soon as it can; a huge number where they deadlock."""
    cost = {"F": 1000, "B": 1000 if split else 2000, "W": 1000}
    ends: dict[tuple[str, int, int], int] = {}
    at, free = [0] * len(lines), [0] * len(lines)
    moved = True
    while moved:
        moved = False
        for stage, line in enumerate(lines):
            while at[stage] < len(line):
                op = line[at[stage]]
                number = line[: at[stage]].count(op)
                needs = {
                    "F": ("F", stage - 1, number) if stage else None,
                    "B": ("B", stage + 1, number) if stage + 1 < len(lines) else ("F", stage, number),
                    "W": ("B", stage, number),
                }[op]
                if needs is not None and needs not in ends:
                    break
                start = max(free[stage], ends[needs] if needs else 0)
                free[stage] = ends[op, stage, number] = start + cost[op] * widths[stage]
                at[stage] += 1
                moved = True
    return max(free) if all(n == len(line) for n, line in zip(at, lines, strict=True)) else 1 << 60


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("count", "rooms"),
    [(3, [1, 1]), (3, [2, 1]), (4, [2, 2]), (5, [2, 1]), (3, [1, 2, 1]), (3, [1, 1, 1])],
)
def test_no_schedule_at_all_beats_the_stages(count: int, rooms: list[int], split: bool) -> None:
    """Exhaustive: every order of every stage, for several cuts of four units."""
    units = 4
    profile = layer_profile(units)
    for cut in combinations(range(1, units), len(rooms) - 1):
        cuts = (0, *cut, units)
        widths = [b - a for a, b in pairwise(cuts)]
        reach = Reach(regular_topology(1, len(rooms), units, waves=count, cuts=cuts), profile, split)
        least = max(reach.least(a, b, count, room) for (a, b), room in zip(pairwise(cuts), rooms, strict=True))
        every = product(*(list(orders(count, room, split)) for room in rooms))
        assert min(makespan(lines, widths, split) for lines in every) >= least, (cuts, rooms)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("dp", "pp", "waves", "room"), [(1, 2, 5, 2), (1, 3, 3, 2), (2, 2, 1, 3), (1, 2, 4, 3)])
def test_no_set_of_pipelines_at_all_beats_the_bound(dp: int, pp: int, waves: int, room: int, split: bool) -> None:
    """Exhaustive: every set of pipelines of every cut, every quota, every order of every stage.

    ``room``: micro-batches of one unit that a cell holds.
    """
    units, cells, count = 3, dp * pp, dp * waves
    profile = Profile((UnitCost(1000, 2000, 1000, 0, 0, 60, 0),) * units, latency_ns=0)
    topology = regular_topology(dp, pp, units, waves=waves, memory_bytes=60 * room)
    reach = Reach(topology, profile, split)
    best: dict[tuple[int, int], int] = {}
    for stages, quota in product(range(1, min(cells, units) + 1), range(1, count + 1)):
        for cut in combinations(range(1, units), stages - 1):
            cuts = (0, *cut, units)
            rooms = [reach.room(a, b) for a, b in pairwise(cuts)]
            widths = [b - a for a, b in pairwise(cuts)]
            every = product(*(list(orders(quota, room, split)) for room in rooms))
            time = min((makespan(lines, widths, split) for lines in every), default=1 << 60)
            best[stages, quota] = min(time, best.get((stages, quota), 1 << 60))

    def least(room: int, rows: int) -> int:
        """Of all sets of pipelines on ``room`` cells that compute ``rows``."""
        if not rows:
            return 0
        found = (max(t, least(room - s, rows - q)) for (s, q), t in best.items() if s <= room and q <= rows)
        return min(found, default=1 << 60)

    assert least(cells, count) >= schedule_bound(topology, profile, split)


def test_an_even_pipeline_meets_it() -> None:
    profile = layer_profile(8)
    topology = limited(1, 4, 8, 8, 1.0)
    assert schedule_bound(topology, profile) == pipeline_bound(topology, profile)
    assert plan_time(nominal_plan(topology, profile), profile) == schedule_bound(topology, profile)


def test_fewest_cells_and_both_ends_agree() -> None:
    """Counting from the end needs as many cells as counting from the start."""
    reach = Reach(limited(2, 8, 16, 6, 1.25), layer_profile(16), True)
    for count, deadline in product(range(1, 13), range(30_000, 120_000, 7_000)):
        early, late = reach.cuts(count, deadline), reach.late_cuts(count, deadline)
        assert (early is None) == (late is None)
        assert early is None or late is None or len(early) == len(late)


def test_a_slow_cell_counts_as_fast_but_for_its_work() -> None:
    topology = regular_topology(1, 2, 4, waves=4)
    slow = replace(topology, cells=(topology.cells[0], replace(topology.cells[1], speed_ppm=500_000)))
    profile = layer_profile(4)
    assert schedule_bound(slow, profile) == max(schedule_bound(topology, profile), work_bound(slow, profile))


def test_where_rows_are_few_the_bounds_own_pipelines_are_tried() -> None:
    """DP 2 x PP 32, one layer a stage, 8 cells lost: what limits a stage is how long rows are away."""
    _, after = scenario_topology(Scenario(2, 32, 32, 8, "spread"))
    profile = layer_profile(32)
    assert few_microbatches(after)
    assert all(sum(p.quota for p in shape.pipelines) == 32 for shape in bound_shapes(after, profile, True))
    found = decide(after, profile, FULL)
    assert found.steady is not None and found.steady.kind == "bound"
    assert schedule_bound(after, profile, True) / found.steady_ns >= 0.95
