"""t(f) = a/f + b is found again from noisy observations, and inverted without missing the deadline."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.observe.clock_model import ClockFit, ClockModel

CLOCKS = (900_000, 1_200_000, 1_500_000, 1_980_000)


def observed(a: int, b: int, noise: float = 0.0, seed: int = 1, clocks: tuple[int, ...] = CLOCKS) -> ClockModel:
    dice = random.Random(seed)
    model = ClockModel()
    for khz in clocks:
        for _ in range(32):
            model.add(khz, round((a / khz + b) * (1 + noise * dice.gauss(0, 1))))
    return model


@given(st.integers(10**9, 10**16), st.integers(0, 10**10))
def test_noiseless_times_give_a_and_b_back(a, b):
    fit = observed(a, b).fit()
    assert fit is not None
    scale = a / min(CLOCKS) + b
    for khz in (700_000, *CLOCKS, 2_500_000):
        assert abs(fit.time_ns(khz) - (a / khz + b)) <= 1e-6 * scale + 5


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_outliers_move_predictions_by_little(seed):
    model = observed(20 * 10**12, 5_000_000, noise=0.03, seed=seed)
    for khz in CLOCKS:
        for _ in range(3):
            model.add(khz, 10**9)  # a hiccup
    fit = model.fit()
    assert fit is not None and fit.error_ppm < 50_000
    for khz in CLOCKS:
        assert abs(fit.time_ns(khz) / (20 * 10**12 / khz + 5_000_000) - 1) < 0.05, f"seed {seed}"


def test_one_clock_says_nothing_about_others():
    assert ClockModel().fit() is None and observed(10**13, 0, clocks=(900_000,)).fit() is None


def test_neither_part_becomes_negative():
    faster_when_slower = ClockModel()
    steeper_than_cycles = ClockModel()
    for khz, slower, steep in ((1_000_000, 5, 30_000), (2_000_000, 9, 10_000)):
        faster_when_slower.add(khz, slower)
        steeper_than_cycles.add(khz, steep)
    flat, pure = faster_when_slower.fit(), steeper_than_cycles.fit()
    assert flat is not None and (flat.cycles_ns_khz, flat.fixed_ns) == (0, 7)
    assert pure is not None and pure.fixed_ns == 0 and pure.cycles_ns_khz > 0 and pure.error_ppm > 0


def test_old_times_are_forgotten():
    model = ClockModel(window=4)
    for time in (100, 100, 100, 50, 50, 50, 50):
        model.add(1_000, time)
        model.add(2_000, time)
    fit = model.fit()
    assert fit is not None and fit.time_ns(1_500) == 50


@given(st.integers(0, 10**15), st.integers(0, 10**9), st.integers(0, 10**10))
def test_the_slowest_clock_that_meets_a_deadline_meets_it_and_no_slower_one_does(a, b, deadline):
    fit = ClockFit(a, b, 0)
    khz = fit.slowest_khz(deadline)
    if khz is None:
        assert fit.time_ns(10**18) > deadline or (a > 0 and deadline == b)
    else:
        assert fit.time_ns(khz) <= deadline
        assert khz == 1 or fit.time_ns(khz - 1) > deadline


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="0 kHz"):
        ClockModel().add(0, 5)
    with pytest.raises(ValueError, match="a clock of 0 kHz"):
        ClockFit(1, 1, 0).time_ns(0)
