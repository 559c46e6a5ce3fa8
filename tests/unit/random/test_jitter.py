"""Noise in a router's input: uniform, and the same for a sample in any slice, any company and on any rank."""

from __future__ import annotations

import pytest
import torch

from megatron.elastic.engine.compute.dropout import DropoutKey, Intervals, Split, dropout_scope
from megatron.elastic.engine.compute.jitter import SampleJitter

EPS = 0.1
CPU = torch.device("cpu")


def drawn(samples: tuple[int, ...], split: Split | None = None, unit: int = 3, step: int = 7) -> torch.Tensor:
    """Factors of 16 positions of each sample, or of a slice of them, for a hidden size of 64."""
    length = 16 if split is None else 16 // split.count
    with dropout_scope(DropoutKey(seed=5, step=step, samples=samples)):
        return SampleJitter(EPS, unit, torch.float32, CPU, split)((length, len(samples), 64))


def test_a_sample_has_its_noise_in_any_company_and_in_any_slice() -> None:
    whole = drawn((4, 9, 2))
    assert torch.equal(drawn((9,)), whole[:, 1:2])
    assert torch.equal(torch.cat([drawn((4, 9, 2), Split(0, part, 4)) for part in range(4)]), whole)
    for other in (drawn((4, 9, 2), unit=4), drawn((4, 9, 2), step=8)):
        assert (other == whole).float().mean() < 0.01


def test_several_slices_have_the_noise_of_their_positions() -> None:
    """As with context parallelism, where a rank has two chunks of the sequence."""
    runs = ((2, 4), (12, 14))
    with dropout_scope(DropoutKey(seed=5, step=7, samples=(4, 9))):
        mine = SampleJitter(EPS, 3, torch.float32, CPU, None, Intervals(0, runs, 16))((4, 2, 64))
    whole = drawn((4, 9))
    assert torch.equal(mine, torch.cat([whole[start:stop] for start, stop in runs]))


def test_factors_are_uniform_between_the_bounds() -> None:
    values = drawn(tuple(range(64))).double()
    assert values.min() >= 1 - EPS and values.max() <= 1 + EPS
    assert values.mean().item() == pytest.approx(1.0, abs=1e-3)
    assert values.var().item() == pytest.approx(EPS**2 / 3, rel=0.02)
    shares = torch.histc(values, 10, 1 - EPS, 1 + EPS) / values.numel()
    assert shares.min() > 0.095 and shares.max() < 0.105


def test_noise_that_belongs_to_no_sample_is_refused() -> None:
    with pytest.raises(RuntimeError, match="belongs to no sample"):
        SampleJitter(EPS, 1, torch.float32, CPU)((2, 1, 2))
