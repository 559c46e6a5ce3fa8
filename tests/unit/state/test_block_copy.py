"""A copy of a block gives its gradients in host memory, hashes each once, and keeps buffers for the next ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from megatron.elastic.state.block_copy import SLOTS, BlockCopy
from megatron.elastic.state.hashing import content_hash
from megatron.elastic.state.layout import ParamSpec, UnitLayout
from megatron.elastic.state.place import HOST, BlockStore
from megatron.elastic.state.record import GradientKey
from megatron.elastic.state.retained import Part, Retained

LAYOUT = UnitLayout.build(0, 0, [ParamSpec("weight", 16, (16,), True)], 64)
KEY, NEXT = GradientKey(3, 1), GradientKey(4, 1)


@dataclass
class Arriving:
    """A tensor on its way to host memory; counts how often it was waited for."""

    values: torch.Tensor
    waits: list[None] = field(default_factory=list)

    def wait(self) -> torch.Tensor:
        self.waits.append(None)
        return self.values

    def is_here(self) -> bool:
        return bool(self.waits)


def copy() -> BlockCopy:
    return BlockCopy(LAYOUT.blocks[0], (), BlockStore(HOST, torch.arange(48.0).view(3, 16)), version=3)


def test_its_numbers_are_rows_of_one_tensor() -> None:
    one = copy()
    assert one.place is HOST
    for row, values in enumerate((one.master, one.exp_avg, one.exp_avg_sq)):
        assert values.tolist() == list(range(16 * row, 16 * row + 16))
        values.fill_(row)
    assert one.state.tolist() == [[0.0] * 16, [1.0] * 16, [2.0] * 16]


def test_a_gradient_of_a_device_is_read_from_its_part_of_the_host_copy() -> None:
    one, whole = copy(), Arriving(torch.arange(32.0))
    device = torch.full((16,), torch.nan)  # stands for device memory, which nothing may read
    one.gradients[KEY] = Retained(device, Part(whole, 4, 20))
    assert not one.has_come(KEY) and not whole.waits, "asking is not waiting"
    assert one.host_gradient(KEY).tolist() == list(range(4, 20))
    assert whole.waits and one.has_come(KEY) and not one.has_come(NEXT)
    with pytest.raises(KeyError):
        one.host_gradient(NEXT)


def test_a_gradient_is_hashed_once_until_it_is_released() -> None:
    one = copy()
    one.gradients[KEY] = Retained(torch.ones(16))
    first = one.gradient_hash(KEY)
    assert first == content_hash(one.block.key, torch.ones(16))
    one.host_gradient(KEY).zero_()
    assert one.gradient_hash(KEY) == first, "it was hashed again"
    one.release(KEY)
    one.gradients[KEY] = Retained(torch.zeros(16))
    assert one.gradient_hash(KEY) != first


def test_a_released_buffer_of_the_host_is_kept_for_the_next_gradient_and_one_of_a_device_is_not() -> None:
    one = copy()
    buffers = [torch.zeros(16) for _ in range(SLOTS + 1)]
    for number, buffer in enumerate(buffers):
        one.gradients[GradientKey(number, 1)] = Retained(buffer)
    one.gradients[NEXT._replace(generation=2)] = Retained(torch.zeros(16), Arriving(torch.zeros(16)))
    for key in list(one.gradients):
        one.release(key)
    assert [id(kept) for kept in one.spare] == [id(buffer) for buffer in buffers[:SLOTS]]
    assert not one.gradients
