"""A gradient that is taken in has the bits, the hash and the squares that its parts have one by one."""

from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.elastic import _state
from megatron.elastic.state.adam import sum_of_squares
from megatron.elastic.state.hashing import tensor_digest
from megatron.elastic.state.intake import digest_of, taken_in

SHORTEST = _state.FEWEST_TAKEN_IN
EDGES = (0, 1, SHORTEST - 1, SHORTEST, 255, 256, 257, 512, 513, 3 * 256 + 15, 3 * 256 + 16, 5 * 256)
"""Around the library's change of method, and where a piece, a stripe or a row of lanes ends."""


def values(length: int, seed: int) -> torch.Tensor:
    """Return numbers of all magnitudes, with zeros of both signs, denormals and infinities among them."""
    made = torch.Generator().manual_seed(seed)
    drawn = torch.randn(length, generator=made) * torch.exp2(torch.randint(-140, 60, (length,), generator=made))
    odd = torch.tensor([0.0, -0.0, 1e-45, torch.inf, 3e38])
    drawn[7 :: 1 + seed % 90] = odd[seed % 5]
    return drawn


@given(st.one_of(st.sampled_from(EDGES), st.integers(0, 5000)), st.integers(0, 1 << 30), st.integers(0, 3))
@example(1 << 16, 4, 1)
def test_it_is_copied_hashed_and_squared_as_by_three_passes(length: int, seed: int, shift: int) -> None:
    source = torch.cat([torch.zeros(shift), values(length, seed)])[shift:]  # not on a boundary of a line
    memory = torch.full((length + 8,), torch.nan)
    digest, squares = taken_in(source, memory[shift : shift + length])
    assert torch.equal(memory[shift : shift + length].view(torch.int32), source.view(torch.int32))
    assert memory[:shift].isnan().all() and memory[shift + length :].isnan().all(), "nothing is written beside it"
    assert digest == tensor_digest(source) == xxhash.xxh3_128_digest(source.numpy().tobytes())
    assert digest_of(source) == digest
    assert squares == sum_of_squares(source)


@given(st.integers(SHORTEST, 3000), st.integers(0, 31), st.data())
def test_each_bit_counts_in_the_hash(length: int, bit: int, data: st.DataObject) -> None:
    source = values(length, 3)
    changed = source.clone()
    changed.view(torch.int32)[data.draw(st.integers(0, length - 1))] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert digest_of(source) != digest_of(changed)


def test_other_memory_is_refused() -> None:
    good = torch.zeros(300)
    for source, memory in ((good[::2], good[:150]), (good.double(), good), (good[:100], good)):
        with pytest.raises(ValueError, match="expected a contiguous host tensor"):
            taken_in(source, memory)
    with pytest.raises(ValueError, match="a short input has another hash"):
        _state.hash_of(good.data_ptr(), SHORTEST - 1)
