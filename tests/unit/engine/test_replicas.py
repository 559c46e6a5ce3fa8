"""A parameter that each rank of a cell holds whole has one gradient on all of them, or is named on all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.elastic.engine.compute.model_interface import UnitParameter
from megatron.elastic.engine.compute.replicas import unequal_replicas
from megatron.elastic.state.layout import ParamSpec
from tests.cluster.cluster import RANKS, on_each_rank
from tests.cluster.fabric import ClusterFabric

UNIT = 3
SPECS = (ParamSpec("norm", 4, (4,), False), ParamSpec("weight", 6, (3, 2), True), ParamSpec("bias", 2, (2,), False))


def interface() -> Any:
    held = [UnitParameter(spec, torch.nn.Parameter(torch.zeros(spec.shape))) for spec in SPECS]
    return SimpleNamespace(unit_parameters=lambda unit: held if unit == UNIT else pytest.fail(f"unit {unit}"))


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (lambda rank: 1.0, ()),
        (lambda rank: 1.0 + 1e-5 * rank, ()),  # rounding
        (lambda rank: float(rank), ("norm (unit 3)",)),  # each rank has its part of a sum
        (lambda rank: float(rank == 2), ("norm (unit 3)",)),  # one rank has all of it
    ],
    ids=["equal", "rounded", "parts", "one rank's"],
)
def test_parts_of_a_sum_are_found_and_rounding_and_shards_are_not(norm: Any, expected: tuple[str, ...]) -> None:
    found: dict[int, Any] = {}

    def body(fabric: ClusterFabric) -> None:
        rank = fabric.rank
        mine = [torch.full((4,), norm(rank)), torch.full((3, 2), float(rank)), torch.tensor([[0.5], [2.0]])]
        found[rank] = unequal_replicas(interface(), {UNIT: mine}, fabric.group("tensor", RANKS))

    on_each_rank(body)
    assert found == dict.fromkeys(RANKS, expected)


def test_a_cell_without_replicated_parameters_exchanges_nothing() -> None:
    sharded = [UnitParameter(SPECS[1], torch.nn.Parameter(torch.zeros(3, 2)))]
    group: Any = None  # a collective on it would fail
    held: Any = SimpleNamespace(unit_parameters=lambda unit: sharded)
    assert unequal_replicas(held, {UNIT: [torch.ones(3, 2)]}, group) == ()
