"""Clock fits recover what made the samples; chosen clocks stay within limits and shorten or spare."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.plan.clocks import clocked_time, with_clocks
from megatron.elastic.plan.frequency import ClockFit, ClockRange, balance_clocks, fit_clock
from megatron.elastic.plan.model import Plan, Profile, UnitCost
from megatron.elastic.plan.planner import instant_plan, uniform_profile
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.search.graph import GraphOptions
from megatron.elastic.plan.search.steady import DecisionOptions, steady_plan
from megatron.elastic.plan.topology import regular_topology, without_cells
from tests.unit.calls import calls_in

FINE = ClockRange(tuple(range(800_000, 1_600_001, 10_000)), 1_400_000)
CLOCKS = ClockRange((800_000, 1_000_000, 1_200_000, 1_400_000, 1_600_000), 1_400_000)


@given(st.integers(0, 10**15), st.integers(1, 10**8))
def test_fit_recovers_the_model(work: int, fixed: int) -> None:
    truth = ClockFit(work, fixed)
    fit = fit_clock((khz, truth.time_ns(khz)) for khz in CLOCKS.allowed_khz)
    assert fit is not None
    assert all(abs(fit.time_ns(khz) - truth.time_ns(khz)) <= 3 for khz in CLOCKS.allowed_khz)


@given(st.lists(st.tuples(st.integers(1, 10**7), st.integers(1, 10**9)), min_size=2, max_size=12))
def test_fit_is_never_negative_and_ignores_the_order_of_samples(samples: list[tuple[int, int]]) -> None:
    fit = fit_clock(samples)
    assert fit == fit_clock(reversed(samples))
    if fit is not None:
        assert fit.work >= 0
        assert fit.fixed >= 0


def test_one_clock_is_no_fit_and_nonsense_is_refused() -> None:
    assert fit_clock([(1000, 5), (1000, 6)]) is None
    with pytest.raises(ValueError, match="positive"):
        fit_clock([(0, 5), (1, 6)])


def test_slack_is_turned_into_lower_clocks_without_delaying_the_step() -> None:
    fit = ClockFit(work=1_400_000 * 1_000_000, fixed=100_000)
    fits, ranges, loads = dict.fromkeys(range(4), fit), dict.fromkeys(range(4), CLOCKS), {0: 16, 1: 16, 2: 12, 3: 8}
    chosen = dict(balance_clocks(fits, ranges, loads, boost=False))
    deadline = 16 * fit.time_ns(1_400_000)
    assert chosen[0] == chosen[1] == 1_400_000
    assert chosen[3] < chosen[2] < 1_400_000
    assert all(loads[c] * fit.time_ns(khz) <= deadline for c, khz in chosen.items())


def test_the_critical_cell_is_boosted_where_allowed() -> None:
    fit = ClockFit(work=1_400_000 * 1_000_000, fixed=0)
    fits, ranges, loads = dict.fromkeys(range(2), fit), dict.fromkeys(range(2), CLOCKS), {0: 18, 1: 16}
    chosen = dict(balance_clocks(fits, ranges, loads))
    assert chosen[0] == 1_600_000
    assert 18 * fit.time_ns(chosen[0]) < 18 * fit.time_ns(1_400_000)
    assert 16 * fit.time_ns(chosen[1]) <= 18 * fit.time_ns(chosen[0])


def test_cells_without_a_fit_keep_their_clock() -> None:
    fit = ClockFit(10**12, 0)
    assert dict(balance_clocks({0: fit}, {0: CLOCKS, 1: CLOCKS}, {0: 1, 1: 1})).keys() == {0}
    assert balance_clocks({}, {}, {0: 1}) == ()


def fits_for(plan: Plan, profile: Profile, bound_ppm: int = 800_000) -> dict[int, ClockFit]:
    """One row through a cell's units; ``bound_ppm`` of the time follows the clock."""
    fits = {}
    for piece in plan.pieces:
        units = profile.units[piece.first : piece.end]
        time = sum(u.forward_ns + u.backward_ns for u in units)
        bound = time * bound_ppm // 1_000_000
        fits[piece.cell] = ClockFit(bound * CLOCKS.nominal_khz, time - bound)
    return fits


def recut_plan() -> tuple[Plan, Profile]:
    """Pipelines of four and three cells, 9 and 7 micro-batches; some cells have less work than others."""
    profile = Profile((UnitCost(1_000_000, 2_000_000, 1_000_000, 0, 0, 1, 0),) * 16, latency_ns=0)
    topology = without_cells(regular_topology(2, 4, 16, waves=8), [2])
    return steady_plan(topology, profile, DecisionOptions(GraphOptions(alike=False, pool=False, drop=False))), profile


def test_spared_clocks_never_delay_the_step_and_some_cells_slow_down() -> None:
    plan, profile = recut_plan()
    fits, ranges = fits_for(plan, profile), dict.fromkeys(range(8), FINE)
    clocks = dict(with_clocks(plan, profile, fits, ranges).frequencies_khz)
    assert clocked_time(plan, profile, fits, ranges, clocks) <= plan_time(plan, profile)
    assert min(clocks.values()) < FINE.nominal_khz
    assert max(clocks.values()) <= FINE.nominal_khz
    lower = {cell: khz - 100_000 for cell, khz in clocks.items()}
    assert clocked_time(plan, profile, fits, ranges, lower) > plan_time(plan, profile)


def test_boost_shortens_the_step_where_clocks_allow_it() -> None:
    plan, profile = recut_plan()
    fits, ranges = fits_for(plan, profile), dict.fromkeys(range(8), FINE)
    boosted = with_clocks(plan, profile, fits, ranges, boost=True)
    clocks = dict(boosted.frequencies_khz)
    assert clocked_time(plan, profile, fits, ranges, clocks) < plan_time(plan, profile)
    assert max(clocks.values()) == FINE.allowed_khz[-1]
    assert min(clocks.values()) < FINE.allowed_khz[-1]


def test_without_fits_the_plan_is_untouched() -> None:
    plan, profile = recut_plan()
    assert with_clocks(plan, profile, {}, {}) is plan


def test_the_cost_of_a_choice_grows_with_the_number_of_pipelines_and_not_faster() -> None:
    """Each rank of a job with the frequency axis makes this choice every few steps."""

    def calls(pipelines: int) -> int:
        profile = uniform_profile(4)
        plan = instant_plan(regular_topology(pipelines, 2, 4, waves=2), profile)
        fits, ranges = fits_for(plan, profile), dict.fromkeys(range(2 * pipelines), FINE)
        return calls_in(lambda: with_clocks(plan, profile, fits, ranges))

    assert calls(32) < 5 * calls(8)
