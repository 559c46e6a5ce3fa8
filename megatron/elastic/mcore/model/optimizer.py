"""The optimizer and scheduler objects for Megatron's loop.

The engine itself updates the state blocks, after the vote. The loop, the scheduler and
the checkpoint code only need parameter groups, the loss scale and state dicts;
:class:`EngineOptimizer` provides these and refuses to step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.elastic.config import ConfigError
from megatron.elastic.mcore.checkpoint.state_dict import LoadedState, OptimizerCheckpoint
from megatron.elastic.mcore.model.param_groups import GroupKeys, adopt, settings_of
from megatron.elastic.state.record import Rate

__all__ = ["EngineOptimizer", "MegatronSchedule"]

_NOT_SETTINGS = ("optimizer", "num_steps")


class EngineOptimizer:
    """Parameter groups without tensors, in the order of :class:`GroupKeys`."""

    is_stub_optimizer = False

    def __init__(self, groups: GroupKeys, loss_scale: Callable[[], float]) -> None:
        self.param_groups: list[dict[str, Any]] = groups.param_groups()
        self.checkpoint: OptimizerCheckpoint | None = None
        """Set once the engine exists."""
        self.loaded: LoadedState | None = None
        """State of the last load, until the engine takes it."""
        self._loss_scale = loss_scale

    def get_loss_scale(self) -> torch.Tensor:
        """Return the present loss scale, shape [1]."""
        return torch.tensor([self._loss_scale()], dtype=torch.float32)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` times the loss scale (used by auxiliary losses of Megatron)."""
        return loss * self._loss_scale()

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the state dict in Megatron's format; collective when saving."""
        assert self.checkpoint is not None
        work = self.checkpoint.begin_load if is_loading else self.checkpoint.save
        return work(model_sharded_state_dict, self.param_groups, metadata or {})

    def load_state_dict(self, state_dict: Any) -> None:
        """Take the values that Megatron has read into the tensors of :meth:`sharded_state_dict`."""
        assert self.checkpoint is not None
        self.loaded = self.checkpoint.finish_load(state_dict)
        adopt(self.param_groups, self.loaded.groups)

    def state_dict(self, is_loading: bool = False) -> Any:
        """Raise ``ConfigError``: no rank has the whole state."""
        raise ConfigError(
            "--load holds a checkpoint of another format than torch_dist, which --elastic does not read: load it "
            "without --elastic and save it with --ckpt-format torch_dist"
        )

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Do nothing: without loaded optimizer state, the engine takes masters from the parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears its own gradient arena."""

    def step(self) -> None:
        """Raise ``RuntimeError``: the update is part of the engine's transaction."""
        raise RuntimeError("under --elastic the engine steps the optimizer; call the patched train_step")


class MegatronSchedule:
    """Megatron's parameter scheduler as a pure function of samples scheduled so far.

    Its settings are those of the arguments until a checkpoint is loaded. With --use-checkpoint-opt_param-scheduler the
    scheduler takes the checkpoint's settings. Parameter groups take theirs in any case, like plain Megatron's
    optimizer. A newcomer, which loads no checkpoint, receives them from a member (:meth:`for_newcomer`, :meth:`take`).
    """

    def __init__(self, scheduler: OptimizerParamScheduler) -> None:
        self._scheduler = scheduler

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._scheduler.optimizer.param_groups
        return groups

    def rates(self, scheduler_steps: int) -> tuple[Rate, ...]:
        """Return learning rate and weight decay of every group, by index."""
        at = copy.copy(self._scheduler)
        at.num_steps = scheduler_steps
        return tuple(Rate(at.get_lr(group), at.get_wd(group) * group["wd_mult"]) for group in self._groups)

    def for_newcomer(self) -> dict[str, Any]:
        """Return the settings as numbers and texts: the scheduler's by name, and each parameter group's by index."""
        return {
            "scheduler": {name: value for name, value in vars(self._scheduler).items() if name not in _NOT_SETTINGS},
            "groups": [settings_of(group) for group in self._groups],
        }

    def take(self, state: Mapping[str, Any], steps: int) -> None:
        """Take over the members' settings, ``steps`` samples into the schedule."""
        vars(self._scheduler).update(state["scheduler"])
        adopt(self._groups, state["groups"])
        self._scheduler.num_steps = steps
        self._scheduler.step(increment=0)
