"""Megatron's distributed optimizer over torch's Adam, where Apex and Transformer Engine are not installed.

Three faults of ``DistributedOptimizer`` show only with torch's Adam, which keeps its
step count per parameter, as a tensor:

- before the first step there is no such count, and ``state_dict`` (called while a
  checkpoint is being loaded) asserts that there is exactly one;
- ``load_state_dict`` gives every parameter the *same* tensor, which each update
  of each parameter then increments: after a resume the bias correction would run
  ahead by the number of parameters;
- the reshardable formats leave the count out of what is read per parameter, and
  ``_set_main_param_and_optimizer_states`` then misses it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["make_load_state_dict", "make_set_states", "make_state_dict"]

_NO_PARAMETER = "step before the first step"
"""Key of a state that belongs to no parameter; torch passes such keys through."""


def make_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """``state_dict`` that reports step 0 while the optimizer has no state."""

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
    """``load_state_dict`` after which every parameter has a step count of its own."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
        return result

    return load_state_dict


def make_set_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_set_main_param_and_optimizer_states`` that leaves the count alone where none was read."""

    @functools.wraps(original)
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> Any:
        return original(self, model_param, {"step": None, **tensors})  # what is no tensor is passed over

    return set_states
