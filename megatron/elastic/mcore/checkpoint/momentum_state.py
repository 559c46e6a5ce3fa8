"""Optimizers of one moment as checkpoints know them: parameter groups, masters and momentum, without a step.

Plain Megatron's Muon and Lion need the package emerging-optimizers; their checkpoints need the wrapper of Megatron
alone. Its SGD writes checkpoints that it cannot read, since it has no function that makes the state to load into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron.elastic.mcore.args.muon import MUON

__all__ = [
    "ADAM",
    "LION",
    "MUON_MOMENTUM",
    "SGD",
    "MomentumState",
    "begin_sgd",
    "lion_settings",
    "momentum_shadow",
    "muon_settings",
]

ADAM = "exp_avg", "exp_avg_sq"
LION = ("exp_avg",)
MUON_MOMENTUM = ("momentum_buffer",)
SGD = ("momentum_buffer",)
"""Names of the state of a parameter in Megatron's checkpoints, in the order of a block's rows."""


class MomentumState(torch.optim.Optimizer):
    """Parameter groups with the settings that the package's own class reads from them; it cannot step."""

    def __init__(self, name: str, settings: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
        super().__init__(list(groups), dict(settings))
        self.name = name
        """Of the one tensor that each parameter has."""

    def begin(self) -> None:
        """Give each parameter its state, to load into."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault(self.name, torch.zeros_like(parameter.data))


def muon_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return what ``TensorParallelMuon`` reads from a group."""
    return {"lr": config.lr, "momentum": config.muon_momentum, "weight_decay": config.weight_decay}


def lion_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return what ``Lion`` reads from a group; Megatron gives it Adam's coefficients."""
    return {"lr": config.lr, "betas": (config.adam_beta1, config.adam_beta2), "weight_decay": config.weight_decay}


def momentum_shadow(config: OptimizerConfig, groups: Sequence[dict[str, Any]]) -> Any:
    """Return Megatron's optimizer around the state of Muon or Lion; ``groups``: with parameters, in Megatron's form."""
    if config.optimizer in MUON:
        inner = MomentumState(*MUON_MOMENTUM, muon_settings(config), groups)
        config = replace(config, optimizer="adam")  # as Megatron leaves it
    else:
        inner = MomentumState(*LION, lion_settings(config), groups)
    if config.bf16:
        return Float16OptimizerWithFloat16Params(inner, config, None, _begin)
    return FP32Optimizer(inner, config, _begin)


def _begin(inner: MomentumState, config: OptimizerConfig | None = None) -> None:
    """Give each parameter its state, as Megatron calls it."""
    inner.begin()


def begin_sgd(inner: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Give each parameter of torch's SGD its state, as Megatron calls it."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            inner.state[parameter] = {name: torch.zeros_like(parameter.data) for name in SGD}
