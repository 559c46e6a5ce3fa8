"""Sizes of cells that Megatron's configuration forbids are refused with flag and reason; others are computed."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.elastic.mcore.model.cell_limits import CellLimits
from megatron.elastic.mcore.model.tensor_cut import Sizes

SEQUENCE = 24


def limits(transformer_impl: str = "local", **more: Any) -> CellLimits:
    """Those of a model with experts that was launched at tensor-parallel size 2."""
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "ffn_hidden_size": 40,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "add_bias_linear": False,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 20,
    }
    config = TransformerConfig(**(fields | more))
    sizes = Sizes.of(config, vocabulary=64, sequence=SEQUENCE)
    return CellLimits(sizes, config, Namespace(transformer_impl=transformer_impl), True, True)


@pytest.mark.parametrize(("tensor", "parts"), [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 2), (1, 3)])
def test_a_model_with_experts_is_computed_by_cells_that_give_each_rank_equal_parts(tensor: int, parts: int) -> None:
    found = limits()
    assert found.refusal(tensor, parts, 1) == ""
    assert found.largest_part(tensor, parts, ()) is not None


@pytest.mark.parametrize(("tensor", "parts", "multiple"), [(5, 1, 5), (1, 5, 10), (3, 5, 30)])
def test_unequal_parts_of_the_sequence_are_refused_with_experts(tensor: int, parts: int, multiple: int) -> None:
    """Megatron's losses of routers take the same number of tokens on each rank."""
    found = limits()
    assert f"take a --seq-length that is a multiple of {multiple}, and it is {SEQUENCE}" in found.refusal(
        tensor, parts, 1
    )
    assert found.largest_part(tensor, parts, ()) is None


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "--moe-router-load-balancing-type sinkhorn"),
        (
            {"add_bias_linear": True, "moe_shared_expert_intermediate_size": None, "expert_tensor_parallel_size": 1},
            "--disable-bias-linear",
        ),
        ({"transformer_impl": "transformer_engine"}, "Transformer Engine"),
        ({"mtp_num_layers": 1}, "further tokens"),
    ],
)
def test_other_sizes_than_the_launchs_are_refused_by_name(more: dict[str, Any], named: str) -> None:
    found = limits(**more)
    assert found.refusal(2, 1, 1) == "" and found.largest_part(2, 1, ()) is not None
    for sizes in ((1, 1), (4, 1), (2, 2)):
        assert named in found.refusal(*sizes, 1), sizes
        assert found.largest_part(*sizes, ()) is None


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"reset_attention_mask": True}, True),
        ({"reset_attention_mask": True, "create_attention_mask_in_dataloader": False}, False),
        ({"reset_attention_mask": True, "transformer_impl": "transformer_engine"}, False),
        ({"reset_attention_mask": False}, False),
    ],
)
def test_several_stages_are_refused_where_layers_read_masks_of_batches(given: dict[str, Any], refused: bool) -> None:
    """A launch with several stages is refused as well, so a reshape must not lead there."""
    found = limits()
    found = replace(found, args=Namespace(**({"transformer_impl": "local"} | given)))
    assert ("--reset-attention-mask" in found.refusal(2, 1, 2)) == refused
    assert found.refusal(2, 1, 1) == ""
