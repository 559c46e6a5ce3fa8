"""Sums of gradients in 64-bit fixed point have bits that no order and no split can change."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic import _state

SCALE, LIMIT = 2.0**36, 2.0**51


def fold(gradient: torch.Tensor, total: torch.Tensor, scale: float = SCALE, limit: float = LIMIT) -> int:
    return _state.fold(gradient.data_ptr(), total.data_ptr(), gradient.numel(), scale, limit)


def unfold(total: torch.Tensor, scale: float = SCALE) -> torch.Tensor:
    out = torch.empty(total.numel())
    _state.unfold(total.data_ptr(), out.data_ptr(), total.numel(), scale)
    return out


@given(seed=st.integers(0, 2**31), count=st.integers(1, 70), samples=st.integers(1, 9), spread=st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_any_order_and_any_split_over_ranks_gives_the_same_bits(
    seed: int, count: int, samples: int, spread: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    magnitudes = 2.0 ** torch.randint(-spread, 1, (samples, count), generator=made).float()
    gradients = torch.randn(samples, count, generator=made) * magnitudes
    one = torch.zeros(count, dtype=torch.int64)
    for gradient in gradients:
        assert fold(gradient.clone(), one) == 0
    ranks = torch.zeros(3, count, dtype=torch.int64)
    for index in torch.randperm(samples, generator=made).tolist():
        fold(gradients[index].clone(), ranks[int(torch.randint(3, (1,), generator=made))])
    assert torch.equal(unfold(one), unfold(ranks[2] + (ranks[0] + ranks[1])))
    exact = torch.tensor([math.fsum(column) for column in gradients.double().T.tolist()], dtype=torch.float64)
    error = (unfold(one).double() - exact).abs()
    bound = samples * 0.5 / SCALE
    assert bool((error <= bound + (exact.abs() + bound) * 2.0**-24).all())


def test_a_contribution_is_rounded_to_nearest_even_and_taken_out_of_the_buffer() -> None:
    halves = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.0, -0.0])
    total = torch.zeros(8, dtype=torch.int64)
    assert fold(halves, total, scale=1.0) == 0
    assert total.tolist() == [0, 2, 2, 0, -2, -2, 0, 0]
    assert not halves.any()


def test_what_does_not_fit_or_is_not_finite_is_told_apart() -> None:
    fits = torch.tensor([1.0, -(2.0**14)])
    assert fold(fits, torch.zeros(2, dtype=torch.int64)) == 0
    assert fold(torch.tensor([1.0, 2.0**15]), torch.zeros(2, dtype=torch.int64)) == 1
    for strange in (math.inf, -math.inf, math.nan):
        assert fold(torch.tensor([1.0, strange]), torch.zeros(2, dtype=torch.int64)) == 2
    assert fold(torch.tensor([3.0e38]), torch.zeros(1, dtype=torch.int64)) == 1


def test_every_length_and_alignment_is_summed_alike() -> None:
    values = torch.randn(67, generator=torch.Generator().manual_seed(3))
    whole = torch.zeros(67, dtype=torch.int64)
    fold(values.clone(), whole)
    for cut in range(67):
        parts = torch.zeros(67, dtype=torch.int64)
        copy = values.clone()
        fold(copy[:cut], parts[:cut])
        fold(copy[cut:], parts[cut:])
        assert torch.equal(parts, whole)
