"""Patches copy boxes between a local parameter and launch shards, and refuse boxes that do not fit."""

from __future__ import annotations

import pytest
import torch

from megatron.elastic.state.coverage import Overlap, Position, add, common_shard, read


def shards() -> list[torch.Tensor]:
    return [torch.arange(12.0).view(3, 4) + 100 * shard for shard in range(2)]


PATCHES = (
    Overlap(1, ((0, 2), (0, 4)), ((1, 3), (0, 4))),
    Overlap(0, ((2, 3), (1, 3)), ((0, 1), (2, 4))),
)
"""Two rows of shard 1, then a part of a row of shard 0: the cut runs across rows."""


def test_read_fills_the_boxes_of_the_local_tensor_and_nothing_else() -> None:
    local = torch.full((3, 4), -1.0)
    read(PATCHES, local, shards().__getitem__)
    assert local.tolist() == [
        [104.0, 105.0, 106.0, 107.0],
        [108.0, 109.0, 110.0, 111.0],
        [-1.0, 2.0, 3.0, -1.0],
    ]


def test_add_sums_the_contributions_of_several_positions_in_fp32() -> None:
    totals = [torch.zeros(3, 4) for _ in range(2)]
    local = torch.full((3, 4), 0.5, dtype=torch.bfloat16)
    for _ in range(3):
        add(PATCHES, local, totals.__getitem__)
    assert totals[0].tolist() == [[0.0, 0.0, 1.5, 1.5], [0.0] * 4, [0.0] * 4]
    assert totals[1].tolist() == [[0.0] * 4, [1.5] * 4, [1.5] * 4]


def test_neither_leaves_a_graph_behind() -> None:
    local = torch.ones(3, 4, requires_grad=True)
    totals = [torch.zeros(3, 4) for _ in range(2)]
    add(PATCHES, local, totals.__getitem__)
    read(PATCHES, local, totals.__getitem__)
    assert local.grad_fn is None and not any(total.requires_grad for total in totals)


def test_boxes_that_differ_in_shape_or_lie_outside_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        Overlap(0, ((0, 2),), ((0, 3),))
    with pytest.raises(ValueError, match="lies outside a tensor of shape"):
        read([Overlap(0, ((0, 4),), ((0, 4),))], torch.zeros(3), lambda shard: torch.zeros(4))
    with pytest.raises(ValueError, match="lies outside a tensor of shape"):
        add([Overlap(0, ((0, 3),), ((1, 4),))], torch.zeros(3), lambda shard: torch.zeros(3))
    with pytest.raises(ValueError, match="position 2 of 2"):
        Position(2, 2)


def test_replicated_parameters_have_a_shard_of_their_own_where_there_are_several() -> None:
    assert [common_shard(tensor) for tensor in (1, 2, 4)] == [0, 2, 4]
