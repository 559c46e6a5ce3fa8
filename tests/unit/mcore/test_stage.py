"""A rank whose tensor-parallel partner is missing looks to a checkpoint as it did at launch, and only to that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megatron.elastic.mcore.parallel_state.stage import GroupStandIn, whole_tensor_group


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> GroupStandIn:
    """At launch rank 1 of 2; the group has lost its first member."""
    alone = GroupStandIn(0, 1)
    monkeypatch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", alone)
    monkeypatch.setattr(parallel_state, "_MPU_TENSOR_MODEL_PARALLEL_RANK", 1)
    monkeypatch.setattr(parallel_state, "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", 2)
    return alone


class Layer(torch.nn.Module):
    def __init__(self, group: Any, other: Any) -> None:
        super().__init__()
        self.tp_group, self.cp_group = group, other
        self.pg_collection = SimpleNamespace(tp=group, dp=other)


def test_modules_find_the_group_of_the_launch_and_their_own_again(second_of_two: GroupStandIn) -> None:
    data = GroupStandIn(0, 1)
    layers = [Layer(second_of_two, data), Layer(second_of_two, data)]
    model = torch.nn.Sequential(*layers)
    with pytest.raises(KeyError), whole_tensor_group(model):
        for layer in layers:
            assert (layer.tp_group.rank(), layer.tp_group.size()) == (1, 2)
            assert layer.pg_collection.tp == layer.tp_group == parallel_state.get_tensor_model_parallel_group()
            assert layer.cp_group is layer.pg_collection.dp is data, "equal by value, another group"
        raise KeyError
    assert all(layer.tp_group is layer.pg_collection.tp is second_of_two for layer in layers)
    assert parallel_state.get_tensor_model_parallel_group() is second_of_two


def test_a_whole_group_stays_what_it_is(second_of_two: GroupStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GroupStandIn(1, 2)
    monkeypatch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", whole)
    layer = Layer(whole, second_of_two)
    with whole_tensor_group(layer):
        assert layer.tp_group is whole
