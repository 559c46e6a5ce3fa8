"""The update has torch's meaning, and bits that depend on its inputs only."""

# mypy: disable-error-code="call-arg"
# A state is passed with a star, whose length mypy does not know.

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state.adam import (
    AdamScalars,
    LionScalars,
    SgdScalars,
    adam_step,
    adam_step_runs,
    adam_step_tensors,
    lion_step,
    round_to_bf16,
    sgd_step,
    sum_of_squares,
)
from megatron.elastic.state.lion import Lion

SEEDS = st.integers(0, 2**31 - 1)


def state(n: int, seed: int) -> Any:
    """master, exp_avg, exp_avg_sq, grad with magnitudes from denormal to large."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.uniform(-30, 5, n))
    master, m, v, g = (rng.normal(size=n) for _ in range(4))
    return [torch.from_numpy(x.astype(np.float32)) for x in (master, m * spread, (v * spread) ** 2, g * spread)]


def scalars(step: int = 3, decoupled: bool = True, multiplier: float = 0.37) -> AdamScalars:
    return AdamScalars(multiplier, 3e-4, 0.9, 0.95, 1e-8, 0.1, 1 - 0.9**step, 1 - 0.95**step, decoupled)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 700), st.lists(st.integers(0, 700), max_size=6), st.booleans())
def test_bits_do_not_depend_on_where_a_range_is_split(seed, n, cuts, decoupled):
    whole, parts = state(n, seed), state(n, seed)
    adam_step(*whole, scalars(decoupled=decoupled))
    edges = sorted({0, n, *[c for c in cuts if c < n]})
    for a, b in pairwise(edges):
        adam_step(*(t[a:b] for t in parts), scalars(decoupled=decoupled))
    assert all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(whole, parts, strict=True))


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 300), st.booleans(), st.integers(0, 300))
def test_two_steps_in_one_pass_have_the_bits_of_one_after_the_other(seed, n, decoupled, cut):
    """Each run has scalars of its own; the second step's differ from the first's."""
    (*rows, grad), next_grad = state(n, seed), state(n, seed + 1)[3]
    runs = [(0, min(cut, n)), (min(cut, n), n)]
    steps = [
        (values, [scalars(number, decoupled, multiplier) for multiplier in (0.37, 1.5)])
        for number, values in ((3, grad), (4, next_grad))
    ]
    at_once, in_turn = torch.stack(rows), torch.stack(rows)
    adam_step_runs(at_once, runs, steps)
    for step in steps:
        adam_step_runs(in_turn, runs, [step])
    assert torch.equal(at_once.view(torch.int32), in_turn.view(torch.int32))


def test_steps_in_one_pass_are_refused_beyond_two_or_outside_the_block():
    *rows, grad = state(8, 0)
    block, step = torch.stack(rows), (grad, [scalars()])
    with pytest.raises(ValueError, match="unpack"):
        adam_step_runs(block, [(0, 8)], [step] * 3)
    with pytest.raises(ValueError, match="elements 4 to 9 of 8"):
        adam_step_runs(block, [(4, 9)], [step])
    with pytest.raises(ValueError, match="decoupled"):
        adam_step_runs(block, [(0, 8)], [step, (grad, [scalars(decoupled=False)])])
    with pytest.raises(ValueError, match="contiguous"):
        adam_step_runs(block, [(0, 8)], [step, (grad[:4], [scalars()])])


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 300), st.booleans())
def test_kernel_equals_the_same_operations_as_separate_torch_calls_bitwise(seed, n, decoupled):
    native, separate = state(n, seed), state(n, seed)
    for step in (1, 2, 3):
        adam_step(*native, scalars(step, decoupled))
        adam_step_tensors(*separate, scalars(step, decoupled))
    assert all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(native, separate, strict=True))


def test_every_operation_is_rounded_by_itself():
    """One element against exact rational arithmetic rounded to fp32 after each operation."""
    s, f = scalars(), np.float32

    def rounded(x: Fraction) -> Fraction:
        return Fraction(float(f(float(x)))) if x else x  # products and sums here are exact in fp64

    for seed in range(200):
        _, m, _, g = (t.item() for t in state(1, seed))
        expect_m = f(f(m) + f(f(1 - s.beta1) * f(f(f(g) * f(s.grad_multiplier)) - f(m))))
        tensors = state(1, seed)
        adam_step(*tensors, s)
        product = rounded(Fraction(g) * Fraction(float(f(s.grad_multiplier))))
        difference = rounded(product - Fraction(m))
        exact = rounded(Fraction(m) + rounded(Fraction(float(f(1 - s.beta1))) * difference))
        assert tensors[1].item() == float(expect_m) == float(exact), f"seed {seed}"


def ulps(x: torch.Tensor, y: torch.Tensor) -> int:
    return int((x.view(torch.int32).long() - y.view(torch.int32).long()).abs().max())


@pytest.mark.parametrize("decoupled", [True, False])
def test_masters_follow_torch_within_a_few_units_in_the_last_place(decoupled):
    torch.manual_seed(5)
    p = torch.nn.Parameter(torch.randn(4096))
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = cls([p], lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    ours: Any = [p.detach().clone(), torch.zeros(4096), torch.zeros(4096)]
    for step in range(1, 21):
        grad = torch.randn(4096)
        p.grad = grad.clone()
        reference.step()
        adam_step(*ours, grad, scalars(step, decoupled, multiplier=1.0))
    exp = reference.state[p]
    assert torch.allclose(ours[1], exp["exp_avg"], rtol=1e-5, atol=1e-7)
    assert torch.allclose(ours[2], exp["exp_avg_sq"], rtol=1e-6, atol=0)
    away = p.detach().abs() > 1e-2  # near zero a unit in the last place is far below the size of one update
    assert ulps(ours[0][away], p.detach()[away]) <= 64
    assert (ours[0] - p.detach()).abs().max() <= 4e-7


def test_lion_is_the_papers_algorithm():
    """Algorithm 2 of arXiv 2302.06675, in fp64; a sign may differ where an update is zero but for rounding."""
    generator = torch.Generator().manual_seed(7)
    master, momentum = torch.randn(1000, generator=generator), torch.zeros(1000)
    p, m = master.double(), momentum.double()
    unsure = torch.zeros(1000, dtype=torch.bool)
    for _ in range(10):
        grad = torch.randn(1000, generator=generator)
        g = 0.5 * grad.double()
        c = 0.9 * m + 0.1 * g
        unsure |= c.abs() < 1e-7
        p, m = p - 0.1 * (torch.sign(c) + 0.01 * p), 0.98 * m + 0.02 * g
        lion_step(master, momentum, grad, LionScalars(0.5, 0.1, 0.01, Lion(0.9, 0.98)))
    assert not unsure.any(), "seed 7 has none"
    assert torch.allclose(master, p.float(), rtol=1e-5, atol=1e-6)
    assert torch.allclose(momentum, m.float(), rtol=1e-4, atol=1e-7)


def test_lion_leaves_a_parameter_without_an_update_and_keeps_what_is_not_a_number():
    master, momentum = torch.tensor([1.0, 1.0, 1.0]), torch.zeros(3)
    grad = torch.tensor([0.0, -0.0, torch.nan])
    lion_step(master, momentum, grad, LionScalars(1.0, 0.5, 0.0, Lion(0.9, 0.98)))
    assert master[:2].tolist() == [1.0, 1.0] and bool(master[2].isnan()) and bool(momentum[2].isnan())


def test_sgd_follows_torch():
    torch.manual_seed(6)
    p = torch.nn.Parameter(torch.randn(1000))
    reference = torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)
    master, buffer = p.detach().clone(), torch.zeros(1000)
    for _ in range(10):
        grad = torch.randn(1000)
        p.grad = 0.5 * grad
        reference.step()
        sgd_step(master, buffer, grad, SgdScalars(0.5, 0.1, 0.9, 0.01))
    assert torch.allclose(master, p.detach(), rtol=1e-5, atol=1e-6)


def test_flush_to_zero_set_by_the_host_program_changes_nothing():
    plain, flushed = state(512, 1), state(512, 1)
    for tensors in (plain, flushed):
        tensors[3].mul_(1e-25)
        tensors[2].fill_(1e-40)
    adam_step(*plain, scalars())
    torch.set_flush_denormal(True)
    try:
        adam_step(*flushed, scalars())
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(x, y) for x, y in zip(plain, flushed, strict=True))
    assert (plain[2] != 0).all() and (plain[2] < 1.2e-38).all(), "the case must reach denormals"


@given(SEEDS, st.integers(1, 400))
@settings(deadline=None)
def test_values_are_rounded_to_the_nearest_of_bf16_and_halves_to_even(seed, n):
    values, rounded = state(n, seed)[0], torch.empty(n, dtype=torch.bfloat16)
    round_to_bf16(values, rounded)
    assert torch.equal(rounded, values.to(torch.bfloat16))
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4e38, 1e-45])
    out = torch.empty(7, dtype=torch.bfloat16)
    round_to_bf16(special, out)
    assert torch.equal(out.view(torch.int16)[1:], special.to(torch.bfloat16).view(torch.int16)[1:]) and out[0].isnan()


@given(SEEDS, st.integers(0, 500))
@settings(deadline=None)
def test_norm_is_the_documented_order_and_independent_of_alignment(seed, n):
    values = state(n + 3, seed)[3]
    lanes = [0.0] * 16
    for i, x in enumerate(values[:n].double().tolist()):
        lanes[i % 16] += x * x
    for width in (8, 4, 2, 1):
        lanes = [lanes[i] + lanes[i + width] for i in range(width)]
    assert sum_of_squares(values[:n]) == lanes[0]
    for offset in (1, 2, 3):
        shifted = torch.empty(n + offset)
        shifted[offset:] = values[:n]
        assert sum_of_squares(shifted[offset:]) == lanes[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_non_finite_element_shows_in_the_norm(bad):
    for where in (0, 7, 63, 64, 99):
        values = torch.full((100,), 3e38)
        assert np.isfinite(sum_of_squares(values))
        values[where] = bad
        assert not np.isfinite(sum_of_squares(values))


def test_tensors_of_another_kind_are_refused():
    good = state(8, 0)
    for wrong in (torch.zeros(8, dtype=torch.float64), torch.zeros(7), torch.zeros(16)[::2]):
        with pytest.raises(ValueError, match="contiguous host tensor"):
            adam_step(good[0], good[1], good[2], wrong, scalars())
