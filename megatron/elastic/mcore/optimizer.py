"""What Megatron's loop takes for its optimizer.

The optimizer itself is the engine's: state blocks, stepped after the vote. The
loop, the scheduler and the checkpoint code only need parameter groups, the loss
scale and state dicts; :class:`EngineOptimizer` offers these and refuses to step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.elastic.mcore.param_groups import GroupKeys
from megatron.elastic.state.record import Rate

__all__ = ["EngineOptimizer", "MegatronSchedule"]


class EngineOptimizer:
    """Parameter groups without tensors, in the order of :class:`GroupKeys`."""

    is_stub_optimizer = False

    def __init__(self, groups: GroupKeys, loss_scale: Callable[[], float]) -> None:
        self.param_groups: list[dict[str, Any]] = groups.param_groups()
        self._loss_scale = loss_scale

    def get_loss_scale(self) -> torch.Tensor:
        """The present loss scale, shape [1]."""
        return torch.tensor([self._loss_scale()], dtype=torch.float32)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale (auxiliary losses of Megatron ask for it)."""
        return loss * self._loss_scale()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine clears its own gradient arena."""

    def step(self) -> None:
        """Raises: stepping is part of the engine's transaction."""
        raise RuntimeError("under --elastic the engine steps the optimizer; call the patched train_step")


class MegatronSchedule:
    """Megatron's parameter scheduler as a pure function of samples scheduled so far."""

    def __init__(self, scheduler: OptimizerParamScheduler, groups: GroupKeys) -> None:
        self._scheduler = scheduler
        self._groups = groups.param_groups()

    def rates(self, scheduler_steps: int) -> tuple[Rate, ...]:
        """Learning rate and weight decay of every group, by index."""
        at = copy.copy(self._scheduler)
        at.num_steps = scheduler_steps
        return tuple(Rate(at.get_lr(group), at.get_wd(group) * group["wd_mult"]) for group in self._groups)
