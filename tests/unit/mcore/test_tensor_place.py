"""The configuration from which Megatron builds the layers of one position has that position's sizes."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.elastic.config import ConfigError
from megatron.elastic.engine.compute.dropout import Section, Split
from megatron.elastic.mcore.model.tensor_cut import Sizes
from megatron.elastic.mcore.model.tensor_place import TensorPlace
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn
from megatron.elastic.state.coverage import Position


def config(**more: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=40,
        tensor_model_parallel_size=4,
        sequence_parallel=True,
        **more,
    )


def place(index: int, count: int, whole: TransformerConfig | None = None) -> TensorPlace:
    group: Any = GroupStandIn(index, count)
    return TensorPlace(Position(index, count), group, Sizes.of(whole or config(), vocabulary=64, sequence=16))


def test_an_uneven_layer_has_local_sizes_and_the_size_of_its_cell() -> None:
    whole = config()
    mine = place(1, 3, whole).layer_config(whole)
    assert (mine.num_attention_heads, mine.num_query_groups, mine.ffn_hidden_size) == (2, 1, 13)
    assert (mine.tensor_model_parallel_size, mine.sequence_parallel) == (3, False)
    assert (mine.kv_channels, mine.hidden_size) == (whole.kv_channels, whole.hidden_size)
    assert place(1, 3).vocabulary == 21
    assert place(1, 3).cell_config(whole).num_attention_heads == 8, "only layers have local sizes"


def test_shared_experts_and_experts_that_ranks_do_not_share_have_local_sizes_too() -> None:
    routed = {"num_moe_experts": 4, "add_bias_linear": False, "moe_ffn_hidden_size": 10}
    whole = config(**routed, moe_shared_expert_intermediate_size=20)
    mine = place(1, 3, whole).layer_config(whole)
    assert (mine.moe_ffn_hidden_size, mine.moe_shared_expert_intermediate_size) == (3, 7)
    dealt = config(**routed, expert_model_parallel_size=2)
    mine = place(1, 3, dealt).layer_config(dealt)
    assert (mine.moe_ffn_hidden_size, mine.moe_shared_expert_intermediate_size) == (10, None)


def test_a_cell_of_the_launch_size_leaves_the_division_to_megatron() -> None:
    whole = config()
    mine = place(2, 4, whole)
    assert mine.even and vars(mine.layer_config(whole)) == vars(whole) and mine.vocabulary == 64


def test_the_launch_configuration_is_not_changed() -> None:
    whole = config()
    before = dict(vars(whole))
    place(0, 2, whole).layer_config(whole)
    assert vars(whole) == before


def test_dropout_masks_are_drawn_for_the_heads_and_positions_of_the_whole_model() -> None:
    assert place(1, 3).slices.heads == Section(dim=1, start=4, extent=8)
    assert place(1, 3).slices.sequence is None
    assert place(1, 2).slices.sequence == Split(dim=0, index=1, count=2)
    assert place(1, 4).slices.heads == Split(dim=1, index=1, count=4)


def test_a_group_that_is_not_the_position_s_cannot_run() -> None:
    place(0, 3).require_group()
    group: Any = GroupStandIn(0, 2)
    with pytest.raises(RuntimeError, match="cannot run as rank 0 of 2"):
        TensorPlace(Position(0, 3), group, Sizes.of(config(), 64, 16)).require_group()


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="each needs a head"):
        place(0, 9)


def test_models_without_an_uneven_cut_are_refused_with_the_flag_to_change() -> None:
    with pytest.raises(ConfigError, match="layers that predict further tokens"):
        place(0, 3).layer_config(config(mtp_num_layers=1))
    with pytest.raises(ConfigError, match="--cross-entropy-fusion-impl native"):
        place(0, 3).layer_config(config(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te"))
