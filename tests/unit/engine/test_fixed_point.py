"""Fixed point by a device's operations has the bits of the host's kernel, and tells the same values apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute import fixed_point as module
from megatron.elastic.engine.compute.fixed_point import (
    NOT_FINITE,
    OUT_OF_RANGE,
    DeviceFixedPoint,
    HostFixedPoint,
    fixed_point,
)

LIMIT = 2.0**40
values = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)


def both(places: int):
    """The host's arithmetic and a device's, which runs on the CPU here."""
    pair = HostFixedPoint(LIMIT), DeviceFixedPoint(LIMIT, torch.device("cpu"))
    for arithmetic in pair:
        arithmetic.begin(math.ldexp(1.0, places))
    return pair


@given(st.lists(values, min_size=1, max_size=4), st.integers(-20, 60))
def test_sums_and_flags_are_equal(contributions, places):
    length = min(map(len, contributions))
    results = []
    for arithmetic in both(places):
        sums, out = torch.full((length,), 7, dtype=torch.int64), torch.empty(length)
        for number, one in enumerate(contributions):
            arithmetic.fold(torch.tensor(one[:length]), sums, first=number == 0)
        arithmetic.unfold(sums, out)
        results.append((arithmetic.flags(), sums.tolist(), out.view(torch.int32).tolist()))
    (flags, *_), (others, *_) = results
    assert flags == others
    if not flags:
        assert results[0] == results[1]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_told_also_beside_what_is_out_of_range(bad):
    for arithmetic in both(60):
        arithmetic.fold(torch.tensor([1.0, bad]), torch.zeros(2, dtype=torch.int64), True)
        assert arithmetic.flags() & NOT_FINITE
        arithmetic.begin(1.0)
        assert arithmetic.flags() == 0


def test_a_contribution_in_16_bits_and_one_of_another_order_of_strides_are_the_same_numbers():
    gradient = torch.randn(6, 5).to(torch.bfloat16)
    found = []
    for arithmetic in both(30):
        for form in (gradient.t().reshape(-1), gradient.t().contiguous().float().view(-1)):
            sums = torch.zeros(30, dtype=torch.int64)
            arithmetic.fold(form, sums, True)
            found.append(sums.tolist())
    assert all(each == found[0] for each in found)


def test_a_device_converts_a_large_tensor_in_parts(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 7)
    gradient = torch.randn(50)
    host, device = both(30)
    sums = [torch.zeros(50, dtype=torch.int64) for _ in range(2)]
    for arithmetic, kept in zip((host, device), sums, strict=True):
        arithmetic.fold(gradient, kept, True)
        arithmetic.fold(gradient, kept, False)
    assert torch.equal(*sums)
    out = torch.empty(50)
    device.unfold(sums[1], out)
    assert torch.allclose(out, 2 * gradient, atol=2.0**-28)
    assert device.flags() == 0
    device.fold(torch.tensor([2.0**11]), torch.zeros(1, dtype=torch.int64), True)
    assert device.flags() == OUT_OF_RANGE


def test_the_memory_decides():
    assert isinstance(fixed_point(LIMIT, torch.device("cpu")), HostFixedPoint)
    assert isinstance(fixed_point(LIMIT, torch.device("meta")), DeviceFixedPoint)
