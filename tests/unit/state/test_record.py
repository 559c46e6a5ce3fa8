"""A record follows from the one before and the vote, with Megatron's meaning."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state.record import (
    ConstantSchedule,
    GradientKey,
    Hyper,
    Rate,
    StepRecord,
    Vote,
    advance,
    next_power,
    power_of,
)

GROUPS = (Rate(1e-3, 0.1), Rate(5e-4, 0.0))
RATES = ConstantSchedule(GROUPS)


def vote(record: StepRecord, norm_sq=(1.0, 4.0), found=False, denominator=1.0, samples=8) -> Vote:
    key = GradientKey(record.version, 1)
    losses = {"lm loss": (30.0, 10.0)}
    return Vote(key, norm_sq, found, denominator, 100.0, samples, losses, "ledger", "plan", rates=GROUPS)


def megatron_grad_scaler():
    """Megatron's own scaler class, its tensors made on the CPU."""
    package = importlib.util.find_spec("megatron.core")
    assert package is not None and package.submodule_search_locations is not None
    where = package.submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("grad_scaler", Path(where, "optimizer", "grad_scaler.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    on_cpu = SimpleNamespace(
        tensor=lambda data, dtype, device: torch.tensor(data, dtype=dtype), float=torch.float, max=torch.max
    )
    vars(module)["torch"] = on_cpu
    return module.DynamicGradScaler


def test_a_step_whose_labels_are_all_masked_divides_by_no_zero():
    hyper = Hyper(RATES, clip_grad=1.0)
    after = advance(StepRecord.initial(hyper), vote(StepRecord.initial(hyper), (0.0, 0.0), denominator=0.0), hyper)
    assert (after.grad_multiplier, after.grad_norm, after.skipped) == (1.0, 0.0, False)


def test_a_step_that_is_left_out_consumes_its_samples_and_changes_nothing_else():
    hyper = Hyper(RATES, scaler="dynamic", initial_loss_scale=1024.0, growth_interval=2)
    before = advance(StepRecord.initial(hyper), vote(StepRecord.initial(hyper)), hyper)
    after = advance(before, replace(vote(before, norm_sq=(0.0, 0.0)), left_out=True, losses={}), hyper)
    assert after.skipped and (after.version, after.consumed_samples) == (2, before.consumed_samples + 8)
    kept = ("adam_step", "beta_power1", "beta_power2", "scheduler_steps", "loss_scale", "growth_tracker")
    assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]
    third = advance(after, vote(after), hyper)
    assert third.loss_scale == 2 * before.loss_scale, "the scaler counts on"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.sampled_from([0.02, 0.3, 0.7]))
def test_loss_scale_and_counters_are_those_of_megatrons_dynamic_scaler(seed, interval, hysteresis, rate):
    rng = random.Random(seed)
    hyper = Hyper(
        RATES,
        scaler="dynamic",
        initial_loss_scale=2.0**16,
        min_loss_scale=3.0,
        growth_interval=interval,
        hysteresis=hysteresis,
    )
    theirs = megatron_grad_scaler()(2.0**16, 3.0, 2.0, 0.5, interval, hysteresis)
    record = StepRecord.initial(hyper)
    for _ in range(120):
        found = rng.random() < rate
        inverse = theirs.inv_scale.item()
        record = advance(record, vote(record, found=found), hyper)
        assert record.grad_multiplier == inverse * record.clip_coefficient
        theirs.update(found)
        ours = (record.loss_scale, record.growth_tracker, record.hysteresis_tracker)
        assert ours == (theirs.scale.item(), theirs._growth_tracker, theirs._hysteresis_tracker), f"seed {seed}"
        assert record.skipped == found


def test_norm_and_clipping_are_those_of_the_unscaled_mean_gradient():
    torch.manual_seed(0)
    hyper = Hyper(RATES, clip_grad=0.25, scaler="constant", initial_loss_scale=128.0)
    raw = [torch.randn(500) * 128 * 37 for _ in range(3)]
    record = StepRecord.initial(hyper)
    squares = [x.double().square().sum().item() for x in raw]
    after = advance(record, vote(record, squares, denominator=37.0), hyper)
    parameter = torch.nn.Parameter(torch.zeros(1500))
    parameter.grad = torch.cat(raw) / 128 / 37
    norm = torch.nn.utils.clip_grad_norm_(parameter, 0.25)
    assert after.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert torch.allclose(torch.cat(raw) * after.grad_multiplier, parameter.grad, rtol=1e-5)
    assert after.clip_coefficient == 0.25 / (after.grad_norm + 1e-6)


def test_small_gradients_and_clip_grad_zero_are_not_scaled():
    for clip, squares in ((10.0, [1.0]), (0.0, [1e12])):
        hyper = Hyper(RATES, clip_grad=clip)
        first = StepRecord.initial(hyper)
        assert advance(first, vote(first, squares), hyper).clip_coefficient == 1.0


def test_a_skipped_step_is_a_version_and_consumes_samples_but_neither_schedule_nor_adam_step():
    hyper = Hyper(RATES, scaler="dynamic", initial_loss_scale=4.0)
    first = StepRecord.initial(hyper)
    second = advance(first, vote(first, [math.inf], found=True), hyper)
    third = advance(second, vote(second), hyper)
    assert (second.version, second.skipped, second.adam_step, second.scheduler_steps) == (1, True, 0, 0)
    assert (second.consumed_samples, second.skipped_steps) == (8, 1)
    assert (third.version, third.skipped, third.adam_step, third.scheduler_steps) == (2, False, 1, 8)
    assert third.bias_correction1 == 1.0 - 0.9 and third.bias_correction2 == 1.0 - 0.999


def test_without_a_scaler_a_non_finite_step_is_applied_as_megatron_does():
    hyper = Hyper(RATES)
    first = StepRecord.initial(hyper)
    after = advance(first, vote(first, [math.nan], found=True), hyper)
    assert not after.skipped and math.isnan(after.grad_norm) and after.clip_coefficient == 1.0


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_a_vote_taken_again_in_another_order_gives_the_same_record(squares, rng):
    hyper = Hyper(RATES)
    first = StepRecord.initial(hyper)
    shuffled = list(squares)
    rng.shuffle(shuffled)
    assert advance(first, vote(first, squares), hyper) == advance(first, vote(first, shuffled), hyper)


@given(st.floats(allow_nan=False), st.floats(allow_nan=False), st.integers(0, 1 << 60))
def test_text_keeps_every_bit(x, y, n):
    record = StepRecord(
        3,
        grad_multiplier=x,
        grad_norm=y,
        rates=(Rate(x, y),),
        losses={"lm loss": (x, y)},
        gradient=GradientKey(2, 7),
        consumed_samples=n,
    )
    again = StepRecord.from_json(record.to_json())
    assert again == record and math.copysign(1, again.grad_norm) == math.copysign(1, y)
    fields = {name: value for name, value in asdict(record).items() if not name.startswith("_")}
    assert json.loads(record.to_json()) == json.loads(json.dumps(fields))


def test_records_of_a_step_without_a_norm_are_still_equal_to_themselves():
    for norm in (math.nan, math.inf):
        record = StepRecord(3, grad_norm=norm, skipped=True)
        again = StepRecord.from_json(record.to_json())
        assert record == again and hash(record) == hash(again)
        assert record != StepRecord(3, grad_norm=1.0, skipped=True)


def test_a_vote_on_another_step_is_refused():
    first = StepRecord.initial(Hyper(RATES))
    with pytest.raises(ValueError, match="step 5 at version 0"):
        advance(first, Vote(GradientKey(5, 0), [], False, 1.0, 1.0, 1, rates=GROUPS), Hyper(RATES))


def test_rates_are_those_of_the_vote_and_a_vote_has_some():
    """Whatever this rank's own library makes of the schedule."""
    first, agreed = StepRecord.initial(Hyper(RATES)), (Rate(math.nextafter(1e-3, 1), 0.1), Rate(5e-4, 0.0))
    assert advance(first, replace(vote(first), rates=agreed), Hyper(RATES)).rates == agreed
    with pytest.raises(ValueError, match="without learning rates"):
        advance(first, replace(vote(first), rates=()), Hyper(RATES))


@settings(deadline=None)
@given(st.sampled_from([0.9, 0.95, 0.99, 0.999, 0.9999]), st.integers(0, 3000))
def test_a_power_is_the_product_a_run_makes_a_factor_a_step(beta, steps):
    hyper = Hyper(RATES, beta1=beta)
    record = StepRecord.initial(hyper)
    for _ in range(min(steps, 200)):
        record = advance(record, vote(record), hyper)
    resumed = StepRecord.initial(hyper).at_adam_step(record.adam_step, hyper)
    assert (resumed.adam_step, resumed.beta_power1) == (record.adam_step, record.beta_power1)
    assert resumed.beta_power2 == record.beta_power2
    assert advance(resumed, vote(resumed), hyper).bias_correction1 == 1.0 - next_power(record.beta_power1, beta)
    exact = Fraction(beta) ** steps
    if exact > 2.0**-64:
        assert abs(Fraction(power_of(beta, steps)) / exact - 1) <= Fraction(steps, 2**52), "a rounding a step"
    assert abs(1.0 - power_of(beta, steps) - float(1 - exact)) <= steps * 2.0**-52


def test_powers_stay_out_of_the_range_that_some_processors_flush_to_zero():
    for beta in (0.5, 0.9, 0.999):
        steps = math.ceil(math.log(2.0**-70) / math.log(beta))
        assert power_of(beta, steps) == 0.0 and power_of(beta, 10**9) == 0.0
    assert power_of(1.0, 10**9) == 1.0 and power_of(0.0, 1) == 0.0


def test_no_rank_asks_its_own_library_for_a_power():
    """Two ranks whose powers of numbers differ in the last bit make the same record."""

    class Off(float):
        def __pow__(self, other, modulo=None):
            return math.nextafter(float(self) ** other, 2.0)

    def run(beta1, beta2):
        hyper = Hyper(RATES, beta1=beta1, beta2=beta2, clip_grad=0.25)
        record = StepRecord.initial(hyper).at_adam_step(11, hyper)
        for _ in range(5):
            record = advance(record, vote(record), hyper)
        return record

    assert run(Off(0.9), Off(0.999)) == run(0.9, 0.999)
