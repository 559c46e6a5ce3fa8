"""Damaged cells are formed of their living ranks, alike whatever was formed before, and count as slow as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.control.requests import ParallelSizes
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.cell_sizes import CellSizes
from megatron.elastic.engine.generation.factory import ViewFactory
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.repartition import better_assignment
from megatron.elastic.engine.generation.shape import CellCut, GridShape
from megatron.elastic.plan.model import Grid, Profile, UnitCost
from megatron.elastic.plan.pace import Pace, ranges_of, samples_of
from megatron.elastic.plan.planner import instant_plan, uniform_profile
from megatron.elastic.plan.policies.registry import choice_of, policy_named
from megatron.elastic.plan.tensor import reduced_cells

UNITS, STAGES, REPLICAS, TENSOR = 4, 2, 2, 4


def launch(extra: int = 0) -> LaunchTopology:
    cuts = [UNITS * stage // STAGES for stage in range(STAGES + 1)]
    return LaunchTopology(TENSOR, STAGES, REPLICAS, tuple(pairwise(cuts)), Grid(16, 1, REPLICAS), extra=extra)


def heads(count: int) -> int:
    """The largest part of eight heads."""
    return -(-8 // count) * 1_000_000 // 8


def without_parts(part: Callable[[int], int | None], tensor: int = TENSOR) -> CellSizes:
    """The sizes of cells that do not share the sequence."""
    return CellSizes.of(lambda count, parts: part(count) if parts == 1 else None, CellCut(tensor))


ANY = without_parts(heads)
HALVES = without_parts(lambda count: None if count == 3 else heads(count))
HALF_SIZES = (1, 2, 4)
LIVING = st.sets(st.integers(0, launch().slots - 1), min_size=1)


def test_speed_follows_from_the_largest_part() -> None:
    """Three ranks of four with eight heads: one computes three heads in place of two."""
    speeds = {count: ANY.speed(CellCut(count)) for count in range(1, TENSOR + 1)}
    assert {count: round(ppm, -3) for count, ppm in speeds.items() if ppm is not None} == {
        4: 10**6,
        3: 667_000,
        2: 500_000,
        1: 250_000,
    }


@given(LIVING, LIVING)
def test_cells_follow_from_the_living_ranks_alone(before: set[int], living: set[int]) -> None:
    start = Assignment.at_launch(launch())
    direct = ANY.living_on(start, living)
    assert ANY.living_on(ANY.living_on(start, before), living) == direct
    for number, cell in start.cells.items():
        alive = tuple(rank for rank in cell.ranks if rank in living)
        assert direct.cells[number].ranks == (alive or cell.ranks)
    assert ANY.living_on(direct, range(launch().slots)) == start


@given(st.sets(st.integers(0, launch().slots + TENSOR - 1), min_size=1))
def test_a_rank_is_parked_only_if_no_damaged_cell_can_use_it(living: set[int]) -> None:
    """Four ranks are spares, of which any may be there."""
    assignment = HALVES.living_on(Assignment.at_launch(launch(extra=TENSOR)), living)
    parked = assignment.topology(living).parked
    damaged = {*assignment.broken(living), *(cell for cell, _ in assignment.formed if assignment.units_in(cell))}
    for number in sorted(damaged):
        ranks = assignment.cells[number].ranks if number in dict(assignment.formed) else ()
        alive = [rank for rank in launch(extra=TENSOR).cells[number].ranks if rank in living]
        own = max((size for size in HALF_SIZES if size <= len(alive)), default=0)
        assert list(ranks[:own]) == alive[:own], "its own ranks come first"
        assert len(ranks) in (0, *HALF_SIZES)
        larger = min((size for size in HALF_SIZES if size > len(ranks)), default=len(ranks))
        assert larger == len(ranks) or larger - len(ranks) > len(parked), f"cell {number} could have {larger} ranks"
    computing = {rank for number in assignment.whole(living) for rank in assignment.cells[number].ranks}
    waiting = {rank for number in assignment.waiting(living) for rank in assignment.cells[number].ranks}
    assert set(parked) == living - computing and (not waiting or not assignment.broken(living))


@pytest.mark.parametrize(
    ("lost", "formed"),
    [
        ({3}, {0: (0, 1)}),
        ({3, 5, 6, 7}, {0: (0, 1), 2: (4, 2)}),
        ({3, 7, 8, 9, 10, 11}, {0: (0, 1), 1: (6, 2), 2: (4, 5)}),
        ({1, 2, 3, 5, 6, 7, 9, 10, 11}, {0: (0,), 1: (8,), 2: (4,)}),
    ],
    ids=["one is parked", "it completes a pair", "two form a cell that has no rank left", "none is parked"],
)
def test_parked_ranks_form_smaller_cells(lost: set[int], formed: dict[int, tuple[int, ...]]) -> None:
    """Cells of one, two or four ranks; cells 0 and 1 are the stages of the first replica, 2 and 3 of the second."""
    assignment = HALVES.living_on(Assignment.at_launch(launch()), set(range(16)) - lost)
    assert dict(assignment.formed) == formed


def factory(memory: int, profile: Profile, sizes: CellSizes) -> ViewFactory:
    """A factory that makes assignments alone."""
    return ViewFactory(
        fabric=cast(Any, None),
        launch_topology=launch(),
        config=ElasticConfig(),
        lives_on=True,
        layouts={},
        arena=cast(Any, None),
        choose=choice_of(policy_named("elaswave")),
        moves_units=False,
        profile=profile,
        hardware=Hardware(memory, 10**9),
        sizes=sizes,
    )


def test_cells_too_small_for_the_memory_give_their_ranks_to_each_other() -> None:
    """Two cells of two ranks become one of four; with memory for two of four shards they go on as they are."""
    living = set(range(16)) - {0, 1, 4, 5}
    start, unit = Assignment.at_launch(launch()), 1 << 20
    profile = Profile((UnitCost(1000, 2000, 1000, unit, 0, 1, 0),) * UNITS)
    need = UNITS // STAGES * unit
    for memory, formed in ((need * 3 // 2, {0: (2, 3, 6, 7), 2: ()}), (need * 5 // 2, {0: (2, 3), 2: (6, 7)})):
        manned = factory(memory, profile, ANY)._manned(start, living)
        assert {c: set(r) for c, r in manned.formed} == {c: set(r) for c, r in formed.items()}


def test_a_rank_that_returns_takes_no_stage_from_the_others() -> None:
    """The second stage has a cell of two leftover ranks alone. One of them could go back to the cell it is from."""
    sizes = without_parts(lambda count: heads(count) if count in (2, 4) else None)
    made, start = factory(1 << 40, uniform_profile(UNITS), sizes), Assignment.at_launch(launch())
    living = {1, 2, 3, 5, 6, 7}
    formed = made._manned(start, living)
    assert dict(formed.formed) == {0: (1, 2), 1: (7, 3), 2: (5, 6)}
    again = made._manned(formed, {0, *living})
    assert again == formed, "it is parked until the second stage has ranks of its own"
    assert dict(made._manned(again, set(range(12)) - {4}).formed) == {2: (5, 6)}
    assert made._manned(again, range(16)) == start


def test_units_move_from_a_smaller_cell_to_a_larger_one_and_back() -> None:
    """One pipeline of two stages whose first has three ranks of four; with all ranks the launch's cut returns."""
    units = 16
    shape = LaunchTopology(TENSOR, 2, 1, ((0, units // 2), (units // 2, units)), Grid(16, 1, 1))
    start, living, memory = Assignment.at_launch(shape), set(range(8)) - {0}, 12 << 20
    costs = Profile((UnitCost(1000, 2000, 1000, 1 << 20, 0, 1, 0),) * units)
    smaller = ANY.living_on(start, living)
    recut = better_assignment(smaller, living, costs, memory, sizes=ANY)
    assert recut is not None and recut.target.formed == smaller.formed
    assert recut.now_ns == 0 < recut.then_ns, "the present cut does not fit the memory of the smaller cell"
    (cuts,) = recut.target.cut
    held = dict(zip((segment.cell for segment in recut.target.replicas[0].segments), cuts, strict=True))
    assert held[0][1] - held[0][0] < units // 2 < held[1][1] - held[1][0]
    back = better_assignment(ANY.living_on(recut.target, range(8)), range(8), costs, memory, sizes=ANY)
    assert back is not None and back.target == start


def test_a_cell_that_has_experts_for_others_goes_on_with_all_of_its_ranks_alone() -> None:
    """Other sizes are those of a reshape: they may be larger or smaller, and none of their cells goes on with fewer."""
    sizes = CellSizes.of(lambda count, parts: heads(count) if parts == 1 else None, CellCut(TENSOR), only_whole=True)
    assert ANY.smaller == (1, 2, 3) and sizes.smaller == ()
    assert sizes.speed(CellCut(2)) == ANY.speed(CellCut(2)) and not sizes.only_launch


def test_a_waiting_cell_takes_the_place_of_a_damaged_one() -> None:
    """A spare of the launch's size is faster than the rest of a cell."""
    topology = launch(extra=TENSOR)
    assignment = ANY.living_on(Assignment.at_launch(topology), set(range(topology.slots + TENSOR)) - {0})
    assert not assignment.formed and assignment.units_in(4) == (0, 1) and not assignment.units_in(0)


def test_rows_are_dealt_by_the_speeds_of_pipelines() -> None:
    """A cell of the first stage has three ranks of four: its pipeline computes two rows of five."""
    living = set(range(16)) - {0}
    topology = ANY.topology(ANY.living_on(Assignment.at_launch(launch()), living), living)
    rows = dict.fromkeys((cell.id for cell in topology.cells), 0)
    for piece in instant_plan(topology, uniform_profile(UNITS)).pieces:
        rows[piece.cell] += len(piece.rows)
    assert rows == {0: 6, 1: 6, 2: 10, 3: 10}


@given(st.sets(st.integers(0, 11)))
def test_no_row_would_be_computed_earlier_by_another_cell(lost: set[int]) -> None:
    """Three replicas of one stage, each with at least one rank."""
    topology = LaunchTopology(TENSOR, 1, 3, ((0, UNITS),), Grid(48, 1, 3))
    living = set(range(12)) - lost | {0, 4, 8}
    cells = ANY.topology(ANY.living_on(Assignment.at_launch(topology), living), living)
    rate = {cell.id: cell.rate_ppm for cell in cells.cells}
    rows = dict.fromkeys(rate, 0)
    for piece in instant_plan(cells, uniform_profile(UNITS)).pieces:
        rows[piece.cell] += len(piece.rows)
    assert sum(rows.values()) == 48
    for one in rate:
        for other in rate:
            assert rows[one] * rate[other] <= (rows[other] + 1) * rate[one] * 1.001, (rows, rate)


def test_a_smaller_cell_is_not_taken_for_a_slow_one() -> None:
    living = set(range(16)) - {0}
    topology = ANY.topology(ANY.living_on(Assignment.at_launch(launch()), living), living)
    plan, pace = instant_plan(topology, uniform_profile(UNITS)), Pace()
    nominal = {cell.id: cell.nominal_ppm for cell in plan.cells}
    rows = {key: sum(len(p.rows) for p in plan.pieces if (p.cell, p.first, p.end) == key) for key in ranges_of(plan)}
    times = {key: (count * 10**12 // nominal[key[0]], 0) for key, count in rows.items()}
    for _ in range(10):
        assert not pace.observe(plan, times)
    assert not pace.speeds()
    assert all(abs(work - spent) <= spent // 1000 for work, spent in samples_of(plan, times).values())
    slowed = {key: (2 * spent if key[0] == 0 else spent, 0) for key, (spent, _) in times.items()}
    assert any(pace.observe(plan, slowed) for _ in range(10)) and dict(pace.speeds()) == {0: 500_000}
    slow = replace(plan.cells[0], speed_ppm=500_000)
    assert slow.rate_ppm == slow.nominal_ppm // 2


def test_exact_mode_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="use --elastic-tensor park") as error:
        ElasticConfig(exact=True, tensor="live-on")
    assert len(error.value.texts) == 1


SHAPED = without_parts(heads)


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_after_a_reshape_cells_are_measured_by_the_size_in_force(tensor: int) -> None:
    """No whole cell counts as one that lost ranks, also where the launch's cells had more."""
    shape = launch()
    sizes = ParallelSizes(tensor, 1, shape.slots // tensor)
    cells = tuple(tuple(range(first, first + tensor)) for first in range(0, shape.slots, tensor))
    regular = Assignment.regular(shape, GridShape(sizes, cells, ((0, UNITS),)))
    topology = SHAPED.topology(regular, range(shape.slots))
    assert {cell.nominal_ppm for cell in topology.cells} == {1_000_000} and not reduced_cells(topology)
    assert SHAPED.room(CellCut(tensor)) <= 1_000_000, "a rank of a larger cell holds whole shards"
    formed = SHAPED.living_on(regular, set(range(shape.slots)) - {0})
    assert all(len(cell.ranks) <= tensor for cell in formed.cells.values())
    if tensor > 1:
        reduced = SHAPED.topology(formed, set(range(shape.slots)) - {0})
        assert reduced_cells(reduced) == (0,)


def test_leftover_ranks_enlarge_no_cell_beyond_the_size_in_force() -> None:
    """One cell of three ranks, and five ranks in no cell: the damaged cell gets one of them."""
    shape = LaunchTopology(4, 1, 2, ((0, UNITS),), Grid(16, 1, 2))
    regular = Assignment.regular(shape, GridShape(ParallelSizes(3, 1, 1), ((0, 1, 2),), ((0, UNITS),)))
    formed = without_parts(heads, 4).living_on(regular, set(range(8)) - {0})
    assert formed.formed == ((0, (1, 2, 3)),)
