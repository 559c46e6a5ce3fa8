"""A rank knows its cell of the launch by its number, also while other ranks of that cell are lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.elastic.engine.compute.model_interface import CellPlace, Crew
from megatron.elastic.mcore.model.expert_homes import launch_crew
from megatron.elastic.mcore.model.rank_places import CellGroups, RankPlaces
from megatron.elastic.mcore.model.tensor_cut import Sizes
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn

RANK = 3
OTHER: Any = GroupStandIn(1, 2)
"""A group made for a cell, beside that of the launch."""


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> RankPlaces:
    """Those of rank 3, in the second cell of two, while rank 2 is lost: the launch's group has one member."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=8,
        num_moe_experts=4,
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        sequence_parallel=True,
        add_bias_linear=False,
    )
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_group", lambda: GroupStandIn(0, 1))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [RANK])
    sizes = Sizes.of(config, vocabulary=64, sequence=16)
    return RankPlaces(RANK, sizes, config, CellGroups(tensor=lambda ranks: OTHER))


def test_a_cell_whose_mate_is_lost_is_still_that_of_the_launch(places: RankPlaces) -> None:
    """Otherwise this rank would keep a group of its own when the mate is back, and wait there for ever."""
    assert places.launch_crew == launch_crew(4, 2, 2, RANK)
    assert places.of(CellPlace((2, 3), 1, places.launch_crew)) is None


def test_another_crew_changes_the_experts_and_not_the_group(places: RankPlaces) -> None:
    crew = Crew((2, 3), ((0, 1, 2, 3),) * 2, 2)
    place = places.of(CellPlace((2, 3), 1, crew))
    assert place is not None and place.launched and place.crew == crew and place.group is not OTHER


def test_other_mates_are_another_cell(places: RankPlaces) -> None:
    place = places.of(CellPlace((1, 3), 1, places.launch_crew))
    assert place is not None and not place.launched and place.group is OTHER
