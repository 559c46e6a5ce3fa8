"""Damaged cells are formed of their living ranks, alike whatever was formed before, and count as slow as they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.engine.compute.point_to_point import receivers, sender
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.cell_sizes import CellSizes
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.plan.model import Grid
from megatron.elastic.plan.pace import Pace, ranges_of, samples_of
from megatron.elastic.plan.planner import instant_plan, uniform_profile

UNITS, STAGES, REPLICAS, TENSOR = 4, 2, 2, 4


def launch(extra: int = 0) -> LaunchTopology:
    cuts = [UNITS * stage // STAGES for stage in range(STAGES + 1)]
    return LaunchTopology(TENSOR, STAGES, REPLICAS, tuple(pairwise(cuts)), Grid(16, 1, REPLICAS), extra=extra)


def heads(count: int) -> int:
    """The largest part of eight heads."""
    return -(-8 // count) * 1_000_000 // 8


ANY = CellSizes.of(heads, TENSOR)
HALVES = CellSizes.of(lambda count: None if count == 3 else heads(count), TENSOR)
LIVING = st.sets(st.integers(0, launch().slots - 1), min_size=1)


def test_speed_follows_from_the_largest_part() -> None:
    """Three ranks of four with eight heads: one computes three heads in place of two."""
    assert {size: round(ppm, -3) for size, ppm in ANY.speed_ppm.items()} == {
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


@given(LIVING)
def test_ranks_are_parked_where_the_model_cannot_be_cut_over_all(living: set[int]) -> None:
    assignment = HALVES.living_on(Assignment.at_launch(launch()), living)
    for number, ranks in assignment.formed:
        alive = [rank for rank in launch().cells[number].ranks if rank in living]
        assert len(ranks) == {1: 1, 2: 2, 3: 2}[len(alive)] and list(ranks) == alive[: len(ranks)]
    computing = {rank for number in assignment.whole(living) for rank in assignment.cells[number].ranks}
    assert set(assignment.topology(living).parked) == living - computing


def test_a_waiting_cell_takes_the_place_of_a_damaged_one() -> None:
    """A spare of the launch's size is faster than the rest of a cell."""
    topology = launch(extra=TENSOR)
    assignment = ANY.living_on(Assignment.at_launch(topology), set(range(topology.slots + TENSOR)) - {0})
    assert not assignment.formed and assignment.units_in(4) == (0, 1) and not assignment.units_in(0)


@given(st.integers(1, 6), st.integers(1, 6))
def test_each_receiver_has_one_sender_which_sends_to_it(senders: int, count: int) -> None:
    sending, receiving = tuple(range(senders)), tuple(range(10, 10 + count))
    sent = [(one, other) for one in sending for other in receivers(one, senders, receiving)]
    assert sorted(sent) == sorted((sender(at, sending), rank) for at, rank in enumerate(receiving))


def test_rows_are_dealt_by_the_speeds_of_pipelines() -> None:
    """A cell of the first stage has three ranks of four: its pipeline computes two rows of five."""
    living = set(range(16)) - {0}
    topology = ANY.sized(ANY.living_on(Assignment.at_launch(launch()), living).topology(living))
    rows = dict.fromkeys((cell.id for cell in topology.cells), 0)
    for piece in instant_plan(topology, uniform_profile(UNITS)).pieces:
        rows[piece.cell] += len(piece.rows)
    assert rows == {0: 6, 1: 6, 2: 10, 3: 10}


@given(st.sets(st.integers(0, 11)))
def test_no_row_would_be_computed_earlier_by_another_cell(lost: set[int]) -> None:
    """Three replicas of one stage, each with at least one rank."""
    topology = LaunchTopology(TENSOR, 1, 3, ((0, UNITS),), Grid(48, 1, 3))
    living = set(range(12)) - lost | {0, 4, 8}
    cells = ANY.sized(ANY.living_on(Assignment.at_launch(topology), living).topology(living))
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
    topology = ANY.sized(ANY.living_on(Assignment.at_launch(launch()), living).topology(living))
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
