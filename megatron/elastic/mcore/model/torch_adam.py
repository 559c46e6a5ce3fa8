"""Megatron's distributed optimizer over torch's Adam, used if Apex and Transformer Engine are not installed.

Three faults of ``DistributedOptimizer`` show only with torch's Adam, which keeps its
step count per parameter, as a tensor:

- before the first step no count exists, and ``state_dict`` (called while a
  checkpoint is being loaded) asserts that exactly one exists;
- ``load_state_dict`` gives every parameter the *same* tensor, which each update
  of each parameter then increments: after a resume the count would grow by the number
  of parameters each step;
- the reshardable formats have no count per parameter, which
  ``_set_main_param_and_optimizer_states`` expects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["make_load_state_dict", "make_set_states", "make_state_dict"]

_NO_PARAMETER = "step before the first step"
"""Key of a state without a parameter; torch passes such keys through."""


def make_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``state_dict`` that reports step 0 while the optimizer has no state."""

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if self.optimizer.state:
            return original(self)
        self.optimizer.state[_NO_PARAMETER] = {"step": torch.tensor(0.0)}
        try:
            return original(self)
        finally:
            del self.optimizer.state[_NO_PARAMETER]

    return state_dict


def make_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``load_state_dict`` after which every parameter has a step count of its own."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
        return result

    return load_state_dict


def make_set_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``_set_main_param_and_optimizer_states`` that keeps the count if none was read."""

    @functools.wraps(original)
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> Any:
        return original(self, model_param, {"step": None, **tensors})  # values that are no tensors are skipped

    return set_states
