"""Megatron's Muon as checkpoints know it: parameter groups, masters and momentum, without a step.

Plain Megatron's own class needs the package emerging-optimizers; its checkpoint needs the wrapper of Megatron alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

__all__ = ["MOMENTUM", "MuonState", "muon_shadow"]

MOMENTUM = "momentum_buffer"
"""Name of the state of a parameter in Megatron's checkpoints."""


class MuonState(torch.optim.Optimizer):
    """Parameter groups with the settings that ``TensorParallelMuon`` reads from them; it cannot step."""

    def __init__(self, config: OptimizerConfig, groups: Sequence[dict[str, Any]]) -> None:
        settings = {"lr": config.lr, "momentum": config.muon_momentum, "weight_decay": config.weight_decay}
        super().__init__(list(groups), settings)

    def begin(self) -> None:
        """Give each parameter its state, to load into."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault(MOMENTUM, torch.zeros_like(parameter.data))


def muon_shadow(config: OptimizerConfig, groups: Sequence[dict[str, Any]]) -> Any:
    """Return Megatron's optimizer around the state of Muon; ``groups``: with parameters, in Megatron's form."""
    inner, config = MuonState(config, groups), replace(config, optimizer="adam")  # as Megatron leaves it
    if config.bf16:
        return Float16OptimizerWithFloat16Params(inner, config, None, _begin)
    return FP32Optimizer(inner, config, _begin)


def _begin(inner: MuonState, config: OptimizerConfig | None = None) -> None:
    """Give each parameter its state, as Megatron calls it."""
    inner.begin()
