"""Sums of gradients in 64-bit fixed point have bits that no order and no split can change."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic import _state

SCALE, LIMIT = 2.0**36, 2.0**51


def fold(
    gradient: torch.Tensor, total: torch.Tensor, scale: float = SCALE, limit: float = LIMIT, first: bool = False
) -> int:
    return _state.fold(gradient.data_ptr(), total.data_ptr(), gradient.numel(), scale, limit, first)


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
        assert fold(gradient, one) == 0
    ranks = torch.zeros(3, count, dtype=torch.int64)
    for index in torch.randperm(samples, generator=made).tolist():
        fold(gradients[index], ranks[int(torch.randint(3, (1,), generator=made))])
    assert torch.equal(unfold(one), unfold(ranks[2] + (ranks[0] + ranks[1])))
    exact = torch.tensor([math.fsum(column) for column in gradients.double().T.tolist()], dtype=torch.float64)
    error = (unfold(one).double() - exact).abs()
    bound = samples * 0.5 / SCALE
    assert bool((error <= bound + (exact.abs() + bound) * 2.0**-24).all())


def test_a_contribution_is_rounded_to_nearest_even_and_left_as_it_was() -> None:
    halves = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.0, -0.0])
    total = torch.zeros(8, dtype=torch.int64)
    assert fold(halves, total, scale=1.0) == 0
    assert total.tolist() == [0, 2, 2, 0, -2, -2, 0, 0]
    assert halves.tolist() == [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.0, -0.0]


@given(seed=st.integers(0, 2**31), count=st.integers(1, 700), share=st.sampled_from([0.0, 0.01, 0.5, 1.0]))
@settings(max_examples=60, deadline=None)
def test_a_first_contribution_replaces_what_was_there_and_zeros_change_nothing(
    seed: int, count: int, share: float
) -> None:
    """Lengths beside and beyond the runs that are passed over when they are zero."""
    made = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=made) * (torch.rand(count, generator=made) < share)
    before = torch.randint(-(2**60), 2**60, (count,), generator=made)
    expected = (values.double() * SCALE).round().long()
    first, later = before.clone(), before.clone()
    assert fold(values, first, first=True) == fold(values, later) == 0
    assert torch.equal(first, expected)
    assert torch.equal(later, before + expected)


@pytest.mark.parametrize("place", [0, 127, 128, 255, 256, 299])
@pytest.mark.parametrize(("value", "flags"), [(2.0**15, 1), (-(2.0**15), 1), (-math.inf, 2), (math.nan, 2)])
def test_no_number_that_cannot_be_added_is_missed(place: int, value: float, flags: int) -> None:
    gradient = torch.zeros(300)
    gradient[place] = value
    for first in (True, False):
        assert fold(gradient, torch.zeros(300, dtype=torch.int64), first=first) == flags


def test_what_does_not_fit_or_is_not_finite_is_told_apart() -> None:
    fits = torch.tensor([1.0, -(2.0**14)])
    assert fold(fits, torch.zeros(2, dtype=torch.int64)) == 0
    assert fold(torch.tensor([1.0, 2.0**15]), torch.zeros(2, dtype=torch.int64)) == 1
    for strange in (math.inf, -math.inf, math.nan):
        assert fold(torch.tensor([1.0, strange]), torch.zeros(2, dtype=torch.int64)) == 2
    assert fold(torch.tensor([3.0e38]), torch.zeros(1, dtype=torch.int64)) == 1


@pytest.mark.parametrize("first", [True, False])
def test_every_length_and_alignment_is_summed_alike(first: bool) -> None:
    count = 300
    values = torch.randn(count, generator=torch.Generator().manual_seed(3))
    whole = torch.zeros(count, dtype=torch.int64)
    fold(values, whole, first=first)
    for cut in range(count):
        parts = torch.zeros(count, dtype=torch.int64)
        fold(values[:cut], parts[:cut], first=first)
        fold(values[cut:], parts[cut:], first=first)
        assert torch.equal(parts, whole)
