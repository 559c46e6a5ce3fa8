"""Arguments of a run, as far as the support table asks for them."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

__all__ = ["EXPERTS", "plain"]


def plain(**given: Any) -> Namespace:
    """Arguments of a run that asks for nothing special."""
    base = {
        "elastic": True,
        "context_parallel_size": 1,
        "num_experts": None,
        "deterministic_mode": False,
        "sequence_parallel": False,
        "add_bias_linear": True,
        "expert_model_parallel_size": 1,
        "optimizer": "adam",
        "ckpt_format": "torch_dist",
        "attention_dropout": 0.1,
        "transformer_impl": "local",
        "cuda_graph_impl": "none",
        "dataloader_type": None,
        "error_injection_rate": 0,
        "tensor_model_parallel_size": 2,
        "fp8_recipe": "delayed",
        "mtp_num_layers": None,
        "heterogeneous_layers_config_path": None,
        "bf16": False,
        "fp16": False,
    }
    return Namespace(**{**base, **given})


EXPERTS = {"num_experts": 8, "sequence_parallel": True, "add_bias_linear": False}
