"""Owner and mirrors replay the same bits; a gradient stays until it is applied; updates are atomic and idempotent."""

# mypy: disable-error-code="call-arg"
# A state is passed with a star, whose length mypy does not know.

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state import place as place_module
from megatron.elastic.state.adam import AdamScalars, adam_step, adam_step_runs
from megatron.elastic.state.layout import ParamSpec, UnitLayout
from megatron.elastic.state.placement import Copies, Placement
from megatron.elastic.state.pool import StateError, StatePool
from megatron.elastic.state.protocol import Holdings
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance
from megatron.elastic.state.retained import Lent

SPECS = [
    ParamSpec("weight", 900, (30, 30), True, 1.0),
    ParamSpec("bias", 30, (30,), True, 0.0),
    ParamSpec("norm", 100, (100,), False, 0.0, 2.0),
]
LAYOUT = UnitLayout.build(0, 0, SPECS, 1024)
RATES = (Rate(1e-2, 0.1),)
HYPER = Hyper(ConstantSchedule(RATES), beta2=0.95)
KEYS = [block.key for block in LAYOUT.blocks]


def filled(rank: int, hyper: Hyper = HYPER, seed: int = 0) -> tuple[StatePool, StepRecord]:
    pool = StatePool(rank, {(0, 0): LAYOUT}, hyper)
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(LAYOUT.numel, generator=generator)
    for block in LAYOUT.blocks:
        pool.put(block.key, flat[block.start : block.stop], 0)
    record = StepRecord.initial(hyper)
    pool.start(record)
    return pool, record


def gradient(step: int, generation: int = 1, attempt: int = 0) -> torch.Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(97 * step + generation + 13 * attempt))


def retain_all(pool: StatePool, key: GradientKey) -> None:
    flat = gradient(*key)
    for block in LAYOUT.blocks:
        pool.retain(block.key, key, flat[block.start : block.stop])


def voted(pool: StatePool, record: StepRecord, key: GradientKey, found: bool = False) -> StepRecord:
    norms = {k: pool.norm_sq(k, key) for k in pool}
    return advance(record, Vote(key, norms, found, 4.0, 4.0, 8, rates=RATES), pool.hyper)


def bits(pool: StatePool) -> list[torch.Tensor]:
    return [pool.get(key).state.view(torch.int32).clone() for key in pool]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@settings(max_examples=20, deadline=None)
@given(st.permutations(KEYS), st.integers(1, 4))
def test_a_mirror_that_replays_late_and_in_another_order_ends_with_the_owners_bits(order, steps):
    (owner, record), (mirror, _) = filled(0), filled(1)
    for step in range(steps):
        key = GradientKey(step, 1)
        retain_all(owner, key)
        retain_all(mirror, key)
        record = voted(owner, record, key)
        assert voted(mirror, mirror.records[step], key) == record
        owner.apply(record)
        for block in order:
            mirror.apply(record, [block])
        assert same(bits(owner), bits(mirror))


def test_the_update_uses_each_parameters_own_multipliers_and_the_whole_units_formula():
    pool, record = filled(0)
    before = torch.cat([pool.get(key).master for key in KEYS])
    key = GradientKey(0, 1)
    retain_all(pool, key)
    record = voted(pool, record, key)
    pool.apply(record)
    after = torch.cat([pool.get(k).master for k in KEYS])
    for slot in LAYOUT.slots:
        part = slice(slot.start, slot.stop)
        expected: Any = [before[part].clone(), torch.zeros(slot.spec.numel), torch.zeros(slot.spec.numel)]
        rate = (1e-2 * slot.spec.lr_multiplier, 0.9, 0.95, 1e-8, 0.1 * slot.spec.weight_decay_multiplier)
        bias = (record.bias_correction1, record.bias_correction2)
        adam_step(*expected, gradient(0)[part].clone(), AdamScalars(record.grad_multiplier, *rate, *bias))
        assert torch.equal(after[part], expected[0]), slot.spec.name
        assert not torch.equal(after[part], before[part])


def test_apply_is_idempotent_and_finishes_what_was_begun():
    (pool, record), (other, _) = filled(0), filled(1)
    key = GradientKey(0, 1)
    for p in (pool, other):
        retain_all(p, key)
    record = voted(pool, record, key)
    assert pool.apply(record, KEYS[:2]) == tuple(KEYS[:2])
    held = pool.holdings()
    assert (held.oldest, held.newest, held.gradients, held.torn) == (0, 1, (key,), ())
    assert pool.apply(record) == tuple(KEYS[2:])
    assert pool.apply(record) == ()
    other.apply(record)
    assert same(bits(pool), bits(other))


def test_an_update_interrupted_inside_a_block_leaves_it_torn_and_uncounted(monkeypatch):
    pool, record = filled(0)
    key = GradientKey(0, 1)
    retain_all(pool, key)
    record = voted(pool, record, key)
    calls, real = [], adam_step_runs

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(place_module, "adam_step_runs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.apply(record)
    monkeypatch.undo()
    held = pool.holdings()
    assert len(held.torn) == 1 and (held.oldest, held.newest) == (0, 1)
    with pytest.raises(StateError, match="version -2"):
        pool.apply(record)


def test_a_gradient_stays_until_applied_and_a_third_is_refused():
    pool, record = filled(0)
    for step in (0, 1):
        retain_all(pool, GradientKey(step, 1))
    with pytest.raises(StateError, match="both gradient slots"):
        pool.retain(KEYS[0], GradientKey(2, 1), gradient(2)[: LAYOUT.blocks[0].numel])
    assert pool.holdings().gradients == (GradientKey(0, 1), GradientKey(1, 1))
    first = voted(pool, record, GradientKey(0, 1))
    pool.apply(first)
    assert pool.holdings().gradients == (GradientKey(1, 1),)
    retain_all(pool, GradientKey(2, 1))


@pytest.mark.parametrize("new", [GradientKey(0, 2), GradientKey(0, 1, 1)], ids=["generation", "attempt"])
def test_a_step_run_again_replaces_its_gradient_and_the_void_one_is_refused(new):
    pool, record = filled(0)
    old = GradientKey(0, 1)
    retain_all(pool, old)
    retain_all(pool, new)
    assert pool.holdings().gradients == (new,)
    with pytest.raises(StateError, match="void"):
        pool.retain(KEYS[0], old, gradient(0)[: LAYOUT.blocks[0].numel])
    record_of_old = voted_like(record, old)
    with pytest.raises(StateError, match="lacks gradient"):
        pool.apply(record_of_old)


def voted_like(record: StepRecord, key: GradientKey) -> StepRecord:
    return advance(record, Vote(key, [1.0], False, 1.0, 1.0, 8, rates=RATES), HYPER)


def test_gradients_in_lent_memory_stay_there_until_they_are_applied_and_it_is_given_back() -> None:
    (borrower, record), (cloner, _) = filled(0), filled(1)
    key, message = GradientKey(0, 1), torch.zeros(LAYOUT.numel)
    held, returned = borrower.bytes_held(), list[int]()
    for number, block in enumerate(LAYOUT.blocks):
        part, values = message[block.start : block.stop], gradient(0)[block.start : block.stop]
        if number % 2:  # the values have come in that memory
            values = part.copy_(values)
        borrower.retain(block.key, key, values, Lent(part, partial(returned.append, number)))
        assert borrower.get(block.key).host_gradient(key).data_ptr() == part.data_ptr()
    retain_all(cloner, key)
    after = voted(cloner, record, key)
    assert not returned
    for pool in (borrower, cloner):
        pool.apply(after)
    assert same(bits(borrower), bits(cloner))
    assert returned == list(range(len(LAYOUT.blocks)))
    assert borrower.bytes_held() == held, "lent memory is not kept for later gradients"


def test_discard_keeps_only_what_the_decision_named():
    pool, _ = filled(0)
    retain_all(pool, GradientKey(0, 1))
    retain_all(pool, GradientKey(1, 1))
    pool.discard(None, 1)
    assert pool.holdings().gradients == (GradientKey(0, 1),)
    pool.discard(GradientKey(0, 1), 0)
    assert pool.holdings().gradients == (GradientKey(0, 1),)
    pool.discard(None, 0)
    assert pool.holdings().gradients == ()


def test_a_skipped_step_is_a_new_version_of_unchanged_blocks():
    hyper = Hyper(HYPER.schedule, scaler="dynamic", initial_loss_scale=8.0)
    pool, record = filled(0, hyper)
    key = GradientKey(0, 1)
    retain_all(pool, key)
    values = pool.get(KEYS[1]).host_gradient(key).clone()
    values[3] = math.inf
    pool.retain(KEYS[1], key, values)
    assert pool.found_nonfinite(key, KEYS) and not pool.found_nonfinite(key, KEYS[2:])
    before = bits(pool)
    pool.apply(voted(pool, record, key, found=True))
    assert same(before, bits(pool)) and pool.holdings().newest == pool.holdings().oldest == 1


@pytest.mark.parametrize("moments", [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
def test_moments_kept_in_bf16_are_rounded_after_each_step(moments):
    """The masters' step takes the moments before they are rounded, as Transformer Engine's Adam does."""
    hyper = replace(HYPER, moments=moments)
    (owner, record), (mirror, _) = filled(0, hyper), filled(1, hyper)
    expected = {key: owner.get(key).state.clone() for key in KEYS}
    for step in range(3):
        key = GradientKey(step, 1)
        retain_all(owner, key)
        retain_all(mirror, key)
        record = voted(owner, record, key)
        plain, _ = filled(2)
        for block, state in expected.items():
            plain.put(block, state[0], step, state[1], state[2])
        plain.records = {step: mirror.records[step]}
        retain_all(plain, key)
        for pool in (owner, mirror, plain):
            pool.apply(record)
        for block, state in expected.items():
            state.copy_(plain.get(block).state)
            for row, kind in zip(state[1:], moments, strict=True):
                if kind == "bf16":
                    row.copy_(row.bfloat16())
    assert same(bits(owner), bits(mirror))
    assert same(bits(owner), [expected[key].view(torch.int32) for key in KEYS])


def test_sgd_replays_the_same_bits_too():
    hyper = Hyper(HYPER.schedule, optimizer="sgd")
    (owner, record), (mirror, _) = filled(0, hyper), filled(1, hyper)
    for step in range(3):
        key = GradientKey(step, 1)
        retain_all(owner, key)
        retain_all(mirror, key)
        record = voted(owner, record, key)
        owner.apply(record)
        mirror.apply(record)
    assert same(bits(owner), bits(mirror))


def test_a_copy_being_added_is_not_reported_until_admitted():
    pool, _ = filled(0)
    pool.put(KEYS[0], torch.zeros(LAYOUT.blocks[0].numel), 7, counted=False)
    assert pool.holdings().newest == 0
    pool.admit(KEYS[0])
    assert pool.holdings().newest == 7


def test_a_second_record_of_a_version_is_refused():
    pool, record = filled(0)
    retain_all(pool, GradientKey(0, 1))
    pool.apply(voted(pool, record, GradientKey(0, 1)))
    with pytest.raises(StateError, match="another record"):
        pool.apply(voted_like(record, GradientKey(0, 2)))


def test_reports_travel_as_text():
    pool, record = filled(3)
    retain_all(pool, GradientKey(0, 4))
    held = pool.holdings({GradientKey(0, 4): [(0, 3), (5, 8)]})
    assert Holdings.from_json(held.to_json()) == held
    assert held.records == (record,) and held.statistics[0][1] == ((0, 3), (5, 8))


def test_memory_is_three_fp32_words_an_element_and_one_more_per_retained_gradient():
    pool, _ = filled(0)
    assert pool.bytes_held() == 12 * LAYOUT.numel
    retain_all(pool, GradientKey(0, 1))
    assert pool.bytes_held() == 16 * LAYOUT.numel


def test_a_copy_that_no_vote_has_named_is_offered_only_if_it_can_do_what_the_others_can():
    """It came whole at the record's version; of the vote that this rank had joined it lacks the gradient."""
    pool, _ = filled(0)
    named = Placement({key: Copies(0 if key != KEYS[0] else 1) for key in KEYS})
    assert pool.holdings(named=named, voting=named).offered == (KEYS[0],)
    key = GradientKey(0, 1)
    for name in KEYS[1:]:
        pool.retain(name, key, torch.ones(pool.block(name).numel))
    held = pool.holdings({key: [(0, 8)]}, named, named)
    assert held.gradients == (key,) and held.offered == ()
    pool.retain(KEYS[0], key, torch.ones(pool.block(KEYS[0]).numel))
    assert pool.holdings({key: [(0, 8)]}, named, named).offered == (KEYS[0],)
