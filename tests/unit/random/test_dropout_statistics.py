"""Masks look random: rate, uniformity, independence. Each bound is exceeded by chance with probability < 1e-6."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.elastic.engine.compute.dropout import DropoutKey, dropout_scope, sample_dropout
from megatron.elastic.engine.compute.philox import philox

SIGMAS = 5.0  # two-sided normal tail 5.7e-7


def masks(
    seed: int, step: int, samples: tuple[int, ...], coordinates: int, p: float, unit: int = 0, site: int = 0
) -> Tensor:
    """[samples, coordinates]: 1 where dropped."""
    with dropout_scope(DropoutKey(seed, step, samples)):
        kept = sample_dropout(
            torch.ones(len(samples), coordinates),
            p,
            unit=unit,
            site=site,
            sample_dim=0,
            extent=(coordinates,),
            offset=(0,),
        )
    return (kept == 0).double()


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's, in standard errors of its value under independence."""
    a, b = a.flatten() - a.mean(), b.flatten() - b.mean()
    return float((a @ b) / (a.norm() * b.norm())) * math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1234, 2**63 + 5])
def test_the_drop_rate_is_p(p, seed):
    dropped = masks(seed, 9, tuple(range(64)), 1 << 14, p)
    error = (float(dropped.mean()) - p) / math.sqrt(p * (1 - p) / dropped.numel())
    assert abs(error) < SIGMAS, f"seed {seed}: {error} standard errors"


def test_the_rate_is_p_at_every_coordinate_and_in_every_sample():
    p, samples, coordinates = 0.1, 2048, 256
    dropped = masks(3, 1, tuple(range(samples)), coordinates, p)
    for dim, count in ((0, samples), (1, coordinates)):
        errors = (dropped.mean(dim) - p) / math.sqrt(p * (1 - p) / count)
        chi2, n = float((errors**2).sum()), errors.numel()
        assert abs(chi2 - n) / math.sqrt(2 * n) < SIGMAS, f"along {dim}: chi2 {chi2} of {n}"
        assert float(errors.abs().max()) < SIGMAS + 1


@pytest.mark.parametrize(
    "other",
    [{"step": 8}, {"unit": 1}, {"site": 1}, {"seed": 6}, {"samples": tuple(range(64, 128))}],
    ids=["step", "unit", "site", "seed", "sample"],
)
def test_neighbouring_streams_are_uncorrelated(other):
    base: dict[str, Any] = {
        "seed": 5,
        "step": 7,
        "samples": tuple(range(64)),
        "coordinates": 1 << 14,
        "p": 0.3,
        "unit": 0,
        "site": 0,
    }
    assert abs(correlation(masks(**base), masks(**{**base, **other}))) < SIGMAS


def test_elements_of_one_mask_are_uncorrelated_at_any_lag():
    dropped = masks(11, 2, tuple(range(16)), 1 << 15, 0.3)
    for lag in [*range(1, 70), 127, 128, 255, 256, 1024, 4096]:
        value = correlation(dropped[:, :-lag], dropped[:, lag:])
        assert abs(value) < SIGMAS, f"lag {lag}: {value} standard errors"
    assert abs(correlation(dropped[:-1], dropped[1:])) < SIGMAS


def test_patterns_of_eight_neighbours_are_as_frequent_as_they_should_be():
    p = 0.5
    dropped = masks(1, 1, tuple(range(64)), 1 << 14, p).long().view(-1, 8)
    patterns = (dropped << torch.arange(8)).sum(1)
    observed = torch.bincount(patterns, minlength=256).double()
    expected = patterns.numel() / 256
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    assert abs(chi2 - 255) / math.sqrt(2 * 255) < SIGMAS, chi2


def test_runs_of_kept_elements_have_geometric_lengths():
    p = 0.2
    dropped = masks(2, 3, tuple(range(16)), 1 << 16, p).flatten()
    gaps = dropped.nonzero().flatten().diff() - 1
    observed = torch.bincount(gaps.clamp(max=20), minlength=21).double()
    expected = gaps.numel() * torch.tensor([p * (1 - p) ** k for k in range(20)] + [(1 - p) ** 20], dtype=torch.float64)
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    assert abs(chi2 - 20) / math.sqrt(2 * 20) < SIGMAS, chi2


def test_words_are_uniform_and_every_bit_of_the_counter_moves_half_of_them():
    counters = [torch.arange(1 << 16, dtype=torch.int64), *(torch.zeros(1, dtype=torch.int64) for _ in range(3))]
    for word in philox(counters, (1, 2)):
        assert isinstance(word, torch.Tensor)
        bins = torch.bincount(word >> 24, minlength=256).double()
        chi2 = float(((bins - 256) ** 2 / 256).sum())
        assert abs(chi2 - 255) / math.sqrt(2 * 255) < SIGMAS
    base = philox((1, 2, 3, 4), (5, 6))
    flips = []
    for index in range(4):
        for bit in range(32):
            counter = [1, 2, 3, 4]
            counter[index] ^= 1 << bit
            moved = philox(counter, (5, 6))
            flips.append(sum(bin(int(a) ^ int(b)).count("1") for a, b in zip(base, moved, strict=True)))
    assert min(flips) > 32 and max(flips) < 96
    mean = sum(flips) / len(flips)
    assert abs(mean - 64) < SIGMAS * math.sqrt(32 / len(flips))
