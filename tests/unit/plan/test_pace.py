"""Measured piece times name the slow cell, whatever its stage costs, and every process agrees."""

from __future__ import annotations

import random

from megatron.elastic.plan.model import Plan
from megatron.elastic.plan.pace import Pace, Times, ranges_of, samples_of
from megatron.elastic.plan.planner import instant_plan, uniform_profile
from megatron.elastic.plan.profile import SpeedOptions
from megatron.elastic.plan.topology import regular_topology, with_speeds

UNITS, WAVES = 6, 8
NS_PER_ROW = {0: 1_000_000, 3: 3_000_000}
"""By first unit: the second stage has the head and is three times as dear."""


def plan_of(dp: int, pp: int, speeds: dict[int, int] | None = None) -> Plan:
    topology = regular_topology(dp, pp, UNITS, micro_batch_size=2, waves=WAVES)
    return instant_plan(with_speeds(topology, speeds or {}), uniform_profile(UNITS))


def measured(plan: Plan, slow: dict[int, float], noise: random.Random | None = None) -> Times:
    rows: dict[tuple[int, int, int], int] = {}
    for piece in plan.pieces:
        key = (piece.cell, piece.first, piece.end)
        rows[key] = rows.get(key, 0) + len(piece.rows)
    times = {}
    for (cell, first, end), count in rows.items():
        wobble = 1.0 + (abs(noise.gauss(0, 0.15)) if noise else 0.0)
        total = int(NS_PER_ROW[first] * count * slow.get(cell, 1.0) * wobble)
        times[cell, first, end] = (total // 3, total - total // 3)
    return times


def run(pace: Pace, plan: Plan, count: int, slow: dict[int, float], noise: random.Random | None = None) -> int:
    return sum(pace.observe(plan, measured(plan, slow, noise)) for _ in range(count))


def test_a_stage_that_costs_more_is_not_slow() -> None:
    pace, plan = Pace(), plan_of(2, 2)
    assert run(pace, plan, 20, {}) == 0
    assert pace.speeds() == ()


def test_of_two_peers_the_slower_one_is_named_and_gets_less() -> None:
    pace, plan = Pace(), plan_of(2, 2)
    run(pace, plan, 8, {1: 2.0})
    assert pace.speeds() == ((1, 500_000),)
    (slow,) = pace.slow(plan)
    assert slow.ranks == (1,)
    after = plan_of(2, 2, dict(pace.speeds()))
    rows = {cell: sum(len(p.rows) for p in after.pieces if p.cell == cell) for cell in range(4)}
    assert rows[0] == rows[1] < rows[2] == rows[3], rows


def test_less_work_does_not_look_like_speed() -> None:
    """Times are per row: a cell that was given less stays as slow as it is, and gets its share back when it is not."""
    pace = Pace()
    run(pace, plan_of(2, 2), 8, {1: 2.0})
    lighter = plan_of(2, 2, dict(pace.speeds()))
    assert run(pace, lighter, 20, {1: 2.0}) == 0
    run(pace, lighter, 8, {})
    assert pace.speeds() == ()


def test_noise_changes_no_plan() -> None:
    seed = 20261121
    pace, noise = Pace(), random.Random(seed)
    assert run(pace, plan_of(2, 2), 300, {}, noise) == 0, f"seed {seed}"


def test_a_cell_without_peers_is_not_judged() -> None:
    plan = plan_of(1, 2)
    assert samples_of(plan, measured(plan, {0: 5.0})) == {}


def test_short_steps_need_more_of_them() -> None:
    step = sum(measured(plan_of(2, 2), {1: 2.0})[1, 3, 6])
    pace = Pace(SpeedOptions(evidence_ns=10 * step))
    assert run(pace, plan_of(2, 2), 9, {1: 2.0}) == 0
    assert run(pace, plan_of(2, 2), 8, {1: 2.0}) == 1


def test_a_generation_starts_from_the_published_speeds_alone() -> None:
    veteran, plan = Pace(), plan_of(2, 2)
    run(veteran, plan, 8, {1: 2.0})
    veteran.resume(veteran.speeds(), 8)
    newcomer = Pace()
    newcomer.resume(((1, 500_000),), 8)
    for pace in (veteran, newcomer):
        run(pace, plan, 4, {1: 2.0})
        run(pace, plan, 8, {})
    assert veteran.speeds() == newcomer.speeds() == ()
    assert veteran.tracker.cells == newcomer.tracker.cells


def test_every_range_has_one_slot() -> None:
    assert ranges_of(plan_of(2, 2)) == ((0, 0, 3), (1, 3, 6), (2, 0, 3), (3, 3, 6))
