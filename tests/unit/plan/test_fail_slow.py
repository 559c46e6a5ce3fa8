"""A slow cell is named within a few steps, gets less, and gets its share back; noise changes nothing."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from megatron.elastic.plan.model import Profile, UnitCost
from megatron.elastic.plan.planner import instant_plan, nominal_plan
from megatron.elastic.plan.profile import PieceSample, SpeedOptions, SpeedTracker, fit_profile
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.schedule.validate import validate_plan
from megatron.elastic.plan.search.steady import steady_plan
from megatron.elastic.plan.topology import regular_topology, with_speeds, without_cells


def steps(tracker: SpeedTracker, count: int, slowdown: dict[int, float], noise: random.Random | None = None) -> int:
    """Feed ``count`` steps of 8 cells; returns how often the tracker asked for a new plan."""
    changes = 0
    for _ in range(count):
        samples = {}
        for cell in range(8):
            wobble = noise.gauss(1.0, 0.03) if noise else 1.0
            samples[cell] = (1_000_000, int(1_000_000 * slowdown.get(cell, 1.0) * wobble))
        changes += tracker.observe(samples)
    return changes


def test_a_rank_slowed_twofold_is_named_within_a_few_steps() -> None:
    tracker = SpeedTracker()
    steps(tracker, 10, {})
    assert tracker.slow() == ()
    steps(tracker, 6, {5: 2.0})
    (slow,) = tracker.slow({5: (10, 11)})
    assert slow.speed_ppm == 500_000
    assert "rank 10,11 runs at 50%" in str(slow)


def test_it_gets_its_share_back() -> None:
    tracker = SpeedTracker()
    steps(tracker, 10, {5: 2.0})
    assert tracker.speeds()[5] == 500_000
    steps(tracker, 8, {})
    assert tracker.speeds()[5] == 1_000_000


def with_a_starved_cell(tracker: SpeedTracker, count: int, factor: float) -> list[int]:
    """``count`` steps in which cell 5 has work only while it is published at half its peers' speed or more.

    Returns the steps in which it had.
    """
    worked = []
    for _ in range(count):
        samples = {cell: (1_000_000, 1_000_000) for cell in range(8) if cell != 5}
        resting = tracker.speeds().get(5, 1_000_000) < 500_000
        if not resting:
            samples[5] = (1_000_000, int(1_000_000 * factor))
        tracker.observe(samples, [5] if resting else [])
        worked += [] if resting else [tracker.step]
    return worked


def test_a_cell_that_is_given_nothing_is_tried_again_and_gets_all_of_its_share_back() -> None:
    tracker = SpeedTracker()
    with_a_starved_cell(tracker, 10, 4.0)
    assert tracker.speeds()[5] == 250_000
    with_a_starved_cell(tracker, 20, 1.0)
    assert tracker.speeds()[5] == 1_000_000


def test_a_cell_that_stays_slow_is_tried_more_and_more_rarely() -> None:
    tracker = SpeedTracker()
    with_a_starved_cell(tracker, 10, 3.0)
    worked = with_a_starved_cell(tracker, 2000, 3.0)
    rests = [after - before - 1 for before, after in pairwise(worked) if after - before > 1]
    assert rests[:4] == [20, 40, 80, 160], rests
    assert rests[-1] == 640, rests
    assert tracker.speeds()[5] < 500_000


def test_an_unsteady_machine_keeps_no_rank_from_getting_all_of_it_back() -> None:
    """A rank that was not slow before is not called slow after: no share is kept back by the dead band."""
    tracker = SpeedTracker()
    steps(tracker, 10, {5: 2.4})
    steps(tracker, 12, {5: 1.08})
    assert tracker.speeds()[5] == 1_000_000
    assert steps(tracker, 50, {5: 1.08}) == 0


def test_noise_and_single_outliers_ask_for_no_new_plan() -> None:
    seed = 20261121
    noise = random.Random(seed)
    tracker = SpeedTracker()
    changes = steps(tracker, 200, {}, noise)
    for _ in range(20):
        changes += steps(tracker, 1, {3: 8.0}, noise)
        changes += steps(tracker, 9, {}, noise)
    assert changes == 0, f"seed {seed}"


def test_a_slow_step_of_all_ranks_blames_none() -> None:
    tracker = SpeedTracker()
    assert steps(tracker, 20, dict.fromkeys(range(8), 3.0)) == 0


def test_a_value_on_the_edge_does_not_flap() -> None:
    """Hysteresis: alternating around the band's edge changes the published speed at most once."""
    tracker = SpeedTracker(SpeedOptions(window=3))
    changes = sum(steps(tracker, 1, {2: 1.05 if i % 2 else 1.18}) for i in range(100))
    assert changes <= 1


def test_every_process_publishes_the_same_speeds() -> None:
    one, two = SpeedTracker(), SpeedTracker()
    for tracker in (one, two):
        steps(tracker, 50, {1: 1.4}, random.Random(7))
    assert one.speeds() == two.speeds()


def test_a_rejoined_cell_starts_without_history() -> None:
    tracker = SpeedTracker()
    steps(tracker, 10, {5: 2.0})
    tracker.forget([5])
    assert 5 not in tracker.speeds()


def test_negative_times_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        SpeedTracker().observe({0: (-1, 5)})


def test_the_planner_gives_a_slow_cell_less() -> None:
    """After a loss by dealing rows, and in the steady plan by layers or samples."""
    profile = Profile((UnitCost(1000, 2000, 1000, 0, 0, 1, 0),) * 8, latency_ns=0)
    base = regular_topology(4, 2, 8, waves=8)
    slow = with_speeds(without_cells(base, [1]), {3: 500_000})
    plan = instant_plan(slow, profile)
    validate_plan(plan, 8)
    rows = {c: sum(len(p.rows) for p in plan.pieces if p.cell == c) for c in (3, 5, 7)}
    assert rows[3] < rows[5]
    even = with_speeds(base, {3: 500_000})
    rerun = instant_plan(even, profile)
    validate_plan(rerun, 8)
    rows = {c: sum(len(p.rows) for p in rerun.pieces if p.cell == c) for c in (1, 3, 5, 7)}
    assert rows[3] < 8 < rows[1]
    assert plan_time(rerun, profile) < 0.8 * plan_time(nominal_plan(even, profile), profile)
    assert instant_plan(base, profile).pieces == nominal_plan(base, profile).pieces
    work = dict.fromkeys(range(8), 0)
    for piece in steady_plan(even, profile).pieces:
        work[piece.cell] += len(piece.rows) * (piece.end - piece.first)
    assert work[3] <= 0.75 * max(work.values())


def test_measured_piece_times_become_unit_costs() -> None:
    """Two stages measured with noise-free clocks: their units' costs are recovered, an unseen unit follows."""
    truth = [UnitCost(2000, 5000, 2500, 7, 8, 9, 10)] * 2 + [UnitCost(3000, 6000, 3000, 7, 8, 9, 10)] * 3
    base = Profile((UnitCost(1000, 2000, 1000, 7, 8, 9, 10),) * 5)
    samples = []
    for first, end in ((0, 2), (2, 4)):
        for rows in (1, 2, 4):
            forward = sum(u.forward_ns for u in truth[first:end]) * rows
            backward = sum(u.backward_ns for u in truth[first:end]) * rows
            samples.append(PieceSample(first, end, rows, False, forward))
            samples.append(PieceSample(first, end, rows, True, 2 * backward, speed_ppm=500_000))
    fitted = fit_profile(base, samples)
    assert fitted == fit_profile(base, reversed(samples))
    assert fitted.units[:2] == tuple(truth[:2])
    assert fitted.units[2:4] == tuple(truth[2:4])
    assert 2000 <= fitted.units[4].forward_ns <= 3000
    assert fit_profile(base, []) == base
