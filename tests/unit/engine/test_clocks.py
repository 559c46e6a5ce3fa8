"""Slack in measured steps becomes lower clocks, the same on every rank; devices slowed on purpose are not slow."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from megatron.elastic.engine.compute.clocks import Clocks, ClockState
from megatron.elastic.plan.model import Plan
from megatron.elastic.plan.pace import Times, measured_profile, samples_of
from megatron.elastic.plan.planner import instant_plan, uniform_profile
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.topology import regular_topology
from megatron.elastic.platform.frequency import Applied, NativeFrequency, NoFrequency
from tests.unit.calls import calls_in

UNITS, WAVES = 6, 8
PROFILE = uniform_profile(UNITS)
LOWEST, HIGHEST, NOMINAL = 800_000, 3_000_000, 2_500_000
PLAN = instant_plan(regular_topology(2, 2, UNITS, waves=WAVES), PROFILE)


def states(clocks: dict[int, int]) -> dict[int, ClockState]:
    return {cell: (1, LOWEST, HIGHEST, clocks.get(cell, NOMINAL)) for cell in range(4)}


def times(second_stage: float, clocks: dict[int, int], bound: float = 0.6) -> Times:
    """``bound`` of a piece's time follows the clock; cells 1 and 3 are the second stage."""
    found = {}
    for cell in range(4):
        nominal = 3_000_000 * WAVES * (second_stage if cell % 2 else 1.0)
        factor = bound * NOMINAL / clocks.get(cell, NOMINAL) + (1 - bound)
        spent = int(nominal * factor)
        span = (3, UNITS) if cell % 2 else (0, 3)
        found[cell, *span] = (spent // 3, spent - spent // 3)
    return found


def watcher(notes: list[tuple[Applied, int | None]] | None = None, boost: bool = False) -> Clocks:
    kept = [] if notes is None else notes
    return Clocks(NoFrequency("none here"), lambda line: None, lambda *note: kept.append(note), boost)


def settle(
    clocks: Clocks, second_stage: float, steps: int = 30, short: bool = False
) -> tuple[Plan, dict[int, int], int]:
    """Run; every chosen clock is obeyed. Returns the last plan, the clocks and how often they changed."""
    plan, present, changes = PLAN, dict[int, int](), 0
    for _ in range(steps):
        chosen = clocks.observe(plan, times(second_stage, present), states(present), PROFILE, short)
        if chosen is not None:
            plan, present, changes = chosen, dict(chosen.frequencies_khz), changes + 1
    return plan, present, changes


def test_the_stage_that_waits_is_lowered_and_the_step_is_hardly_longer() -> None:
    plan, present, changes = settle(watcher(), second_stage=2.0)
    assert present[0] == present[2] < NOMINAL
    assert present[1] == present[3] == NOMINAL
    assert changes <= 3, "clocks settle"
    nominal, slowed = (measured_profile(plan, times(2.0, clocks), PROFILE) for clocks in ({}, present))
    assert plan_time(plan, slowed) <= 1.02 * plan_time(plan, nominal)


def test_without_slack_nothing_is_set() -> None:
    assert settle(watcher(), second_stage=1.0)[2] == 0


def test_while_ranks_are_missing_the_stage_that_others_wait_for_runs_above_its_clock() -> None:
    plan, present, changes = settle(watcher(boost=True), second_stage=2.0, short=True)
    assert present[1] == present[3] == HIGHEST > NOMINAL, "the second stage is waited for"
    assert present[0] == present[2] < NOMINAL, "and the first one has slack"
    assert changes <= 3, "clocks settle"
    nominal, raised = (measured_profile(plan, times(2.0, clocks), PROFILE) for clocks in ({}, present))
    assert plan_time(plan, raised) < 0.95 * plan_time(plan, nominal)


def test_no_clock_rises_while_all_ranks_are_there_or_without_the_flag() -> None:
    for clocks, short in ((watcher(boost=True), False), (watcher(), True)):
        assert max(settle(clocks, second_stage=2.0, short=short)[1].values()) == NOMINAL


def test_a_device_raised_on_purpose_does_not_count_as_a_fast_one() -> None:
    clocks = watcher(boost=True)
    plan, present, _ = settle(clocks, second_stage=2.0, short=True)
    seen = samples_of(plan, clocks.at_nominal(times(2.0, present)))
    assert seen[1][1] == seen[3][1] and 0.97 < seen[1][1] / samples_of(plan, times(2.0, {}))[1][1] < 1.03


def test_a_clock_that_wanders_by_itself_is_neither_a_measurement_nor_a_reason_for_a_change() -> None:
    """A device whose clock was not set shows another one at each look, and its times vary by 1%."""
    clocks, random = watcher(), Random(1)
    counts = []
    for _ in range(2):
        for _ in range(20):
            present = {cell: NOMINAL + random.randrange(-10_000, 10_000) for cell in range(4)}
            measured = {
                key: (int(forward * random.uniform(0.99, 1.01)), backward)
                for key, (forward, backward) in times(1.0, present).items()
            }
            assert clocks.observe(PLAN, measured, states(present), PROFILE) is None
        counts.append(calls_in(partial(clocks.at_nominal, measured)))
    assert counts[1] == counts[0], "a step costs as much as twenty steps before"


def test_every_rank_derives_the_same_clocks() -> None:
    assert settle(watcher(), 2.0) == settle(watcher(), 2.0)


def test_a_device_slowed_on_purpose_is_not_a_slow_one() -> None:
    clocks = watcher()
    plan, present, _ = settle(clocks, second_stage=2.0)
    one_lowered = {0: present[0]}
    clocks.observe(plan, times(2.0, one_lowered), states(one_lowered), PROFILE)
    raw = samples_of(plan, times(2.0, one_lowered))
    seen = samples_of(plan, clocks.at_nominal(times(2.0, one_lowered)))
    assert raw[0][1] > 1.15 * raw[0][0], "measured as it is, cell 0 looks slow"
    assert seen[0][1] < 1.02 * seen[0][0]


def test_cells_with_a_device_that_cannot_be_set_keep_their_clock() -> None:
    clocks, none = watcher(), dict.fromkeys(range(4), (0, 0, 0, 0))
    assert all(clocks.observe(PLAN, times(2.0, {}), none, PROFILE) is None for _ in range(10))


def test_a_real_driver_is_set_and_put_back(tmp_path: Path) -> None:
    """A cpufreq tree: the policy of CPUs 0 and 1."""
    policy = tmp_path / "devices/system/cpu/cpufreq/policy0"
    policy.mkdir(parents=True)
    limits = {
        "affected_cpus": "0 1",
        "cpuinfo_min_freq": LOWEST,
        "cpuinfo_max_freq": HIGHEST,
        "scaling_min_freq": LOWEST,
        "scaling_max_freq": HIGHEST,
        "scaling_cur_freq": NOMINAL,
    }
    for name, value in limits.items():
        (policy / name).write_text(f"{value}\n")
    notes: list[tuple[Applied, int | None]] = []
    clocks = Clocks(NativeFrequency("cpufreq", "0-1", str(tmp_path)), print, lambda *note: notes.append(note))
    able, lowest, highest, _ = clocks.state()
    assert (able, lowest, highest) == (1, LOWEST, HIGHEST)
    slower = instant_plan(regular_topology(2, 2, UNITS, waves=WAVES), PROFILE)
    cell = slower.cells[0]
    clocks.apply(replace(slower, frequencies_khz=((0, 1_200_000),)), cell)
    assert [note[0].set_khz for note in notes] == [1_200_000]
    assert (policy / "scaling_max_freq").read_text().strip() == "1200000"
    clocks.restore()
    assert (policy / "scaling_max_freq").read_text().strip() == str(HIGHEST)


def test_a_device_that_refuses_after_it_was_seen_is_taken_as_it_is() -> None:
    clocks = watcher()
    clocks.observe(PLAN, times(1.0, {}), states({}), PROFILE)
    seen = {**states({}), 0: (0, 0, 0, 0)}
    clocks.observe(PLAN, times(1.0, {}), seen, PROFILE)
    assert clocks.at_nominal(times(1.0, {})) == times(1.0, {})


def test_who_is_refused_says_so_once_and_asks_no_more() -> None:
    told: list[str] = []
    clocks = Clocks(NoFrequency("locking clocks needs root"), told.append, lambda applied, power: None)
    lowered = replace(PLAN, frequencies_khz=((0, LOWEST),))
    for _ in range(5):  # every boundary, as long as the plan says so
        clocks.apply(lowered, PLAN.cells[0])
    assert told == ["locking clocks needs root"]
