"""The estimate of held activations follows from sizes; ``test_memory_model.py`` compares it with real allocations."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.elastic.mcore.model.activations import held_bytes
from megatron.elastic.mcore.model.layer_specs import sized_as_layer

LAYER, LAST = 2, 5


class Local(torch.nn.Module):
    """A model with Megatron's own attention, of which only the kind of the module counts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = DotProductAttention.__new__(DotProductAttention)
        torch.nn.Module.__init__(self.attention)


def config(**more: Any) -> TransformerConfig:
    known: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "ffn_hidden_size": 256,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "attention_softmax_in_fp32": False,
        "params_dtype": torch.float32,
    }
    return TransformerConfig(**{**known, **more})


def layer(model: torch.nn.Module, sequence: int, **more: Any) -> int:
    return held_bytes(model, config(**more), sequence, 1000, LAYER, LAST)


@given(st.integers(1, 512).map(lambda n: 8 * n))
def test_fused_attention_is_linear_in_the_sequence_and_megatrons_own_adds_the_scores(sequence: int) -> None:
    fused, local = torch.nn.Identity(), Local()
    # 4 h of norms and residuals, q and its output, keys and values, input and output of the activation function.
    position = 4 * (4 * 64 + 2 * 64 + 2 * 64 + 2 * 256)
    assert layer(fused, sequence) == sequence * position
    assert layer(local, sequence) == sequence * position + 4 * 8 * sequence**2


def test_what_is_recomputed_is_not_held() -> None:
    local, fused = Local(), torch.nn.Identity()
    assert layer(local, 64, recompute_granularity="selective") == layer(fused, 64)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert layer(local, 64, **full) == 64 * 64 * 4, "only its input"
    spread = {"distribute_saved_activations": True, "tensor_model_parallel_size": 2}
    assert layer(local, 64, **full, **spread) == 64 * 64 * 2, "half of it on each of two ranks"


def test_tensor_parallel_ranks_share_what_is_inside_a_layer_and_sequence_parallelism_the_rest() -> None:
    local = Local()
    outside = 4 * 64 * 64 * 4
    alone, of_two = layer(local, 64), layer(local, 64, tensor_model_parallel_size=2)
    assert of_two - outside == (alone - outside) / 2
    assert layer(local, 64, tensor_model_parallel_size=2, sequence_parallel=True) == alone / 2


def test_grouped_queries_save_only_where_the_kernel_does_not_repeat_keys_and_values() -> None:
    local, fused = Local(), torch.nn.Identity()
    assert layer(local, 64, num_query_groups=2) == layer(local, 64)
    assert layer(fused, 64) - layer(fused, 64, num_query_groups=2) == 64 * 4 * 2 * (8 - 2) * 8


def test_dropout_and_softmax_in_fp32_keep_a_copy_of_the_scores() -> None:
    local = Local()
    half = {"params_dtype": torch.bfloat16, "bf16": True}
    pairs = 8 * 64**2
    plain = layer(local, 64, **half)
    assert layer(local, 64, attention_dropout=0.1, **half) - plain == 2 * pairs
    assert layer(local, 64, attention_softmax_in_fp32=True, **half) - plain == 4 * pairs


def test_the_ends_hold_their_input_and_the_logits() -> None:
    model = Local()
    assert held_bytes(model, config(), 64, 1000, 0, LAST) == 64 * 64 * 4
    assert held_bytes(model, config(), 64, 1000, LAST, LAST) == 2 * 64 * 64 * 4 + 64 * 1000 * 4
    two = config(tensor_model_parallel_size=2)
    assert held_bytes(model, two, 64, 1000, LAST, LAST) == 2 * 64 * 64 * 4 + 64 * 500 * 4


def test_a_rank_of_an_uneven_cell_holds_what_its_local_sizes_need() -> None:
    """Three of eight heads and of 256 columns 96, as one of three ranks: in the proportion of the sizes."""
    local = Local()
    sizes = {"num_attention_heads": 3, "kv_channels": 8, "ffn_hidden_size": 96, "num_query_groups": 3}
    whole, outside = layer(local, 64, kv_channels=8), 4 * 64 * 64 * 4
    part = config(**sizes)
    part.tensor_model_parallel_size = 3
    found = held_bytes(local, part, 64, 334, LAYER, LAST, local=True)
    assert found - outside == (whole - outside) * 3 // 8
    assert held_bytes(local, part, 64, 334, LAST, LAST, local=True) == 2 * 64 * 64 * 4 + 64 * 334 * 4


def test_a_layer_of_its_own_shape_holds_what_that_shape_holds() -> None:
    """Of a part that a layer lacks only the tensors around it are left."""
    blocks = [
        {"attention": {"num_query_groups": 2}, "mlp": {"ffn_hidden_size": 128}},
        {"attention": {"num_query_groups": None, "no_op": True}, "mlp": {"ffn_hidden_size": 256}},
        {"attention": {"num_query_groups": 8}, "mlp": {"ffn_hidden_size": None, "no_op": True}},
        {"attention": {"num_query_groups": 8}, "mlp": {"ffn_hidden_size": 256}},
    ]
    varied = HeterogeneousTransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=8,
        ffn_hidden_size=256,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        heterogeneous_layers_config_encoded_json=json.dumps({"block_configs": blocks}),
    )
    fused = torch.nn.Identity()
    held = [held_bytes(fused, sized_as_layer(varied, unit), 64, 1000, unit, LAST) for unit in (1, 2, 3, 4)]
    outside, attention, feed_forward = 64 * 4 * 4 * 64, 64 * 4 * (2 * 64 + 2 * 64), 64 * 4 * 2 * 256
    fewer_keys = 64 * 4 * 2 * 6 * 8
    assert held[0] == outside + attention - fewer_keys + feed_forward // 2
    assert held[1:] == [outside + feed_forward, outside + attention, outside + attention + feed_forward]
    same = config()
    assert sized_as_layer(same, 1) is same, "layers of one shape have that of the model"
