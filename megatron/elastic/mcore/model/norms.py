"""Layer norms of the local layer spec, used if Apex is not installed.

``WrappedTorchNorm`` refuses sequence parallelism and zero-centred weights
(``--apply-layernorm-1p``), although torch's norms support both with small changes. Under
sequence parallelism each rank normalises its own slice, and the weight's partial
gradients are summed over the tensor-parallel group, which Megatron does for
parameters marked ``sequence_parallel``. A zero-centred weight is stored minus one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ZeroCenteredLayerNorm", "ZeroCenteredRMSNorm", "make_wrapped_norm"]


class ZeroCenteredLayerNorm(torch.nn.LayerNorm):
    """Layer norm whose weight is stored minus one, so that weight decay pulls the scale towards one."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``input`` [..., hidden]; return the same shape."""
        return torch.nn.functional.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """RMS norm whose weight is stored minus one."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x`` [..., hidden]; return the same shape."""
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


_ZERO_CENTERED: dict[str, type[torch.nn.Module]] = {
    "LayerNorm": ZeroCenteredLayerNorm,
    "RMSNorm": ZeroCenteredRMSNorm,
}


def make_wrapped_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``WrappedTorchNorm.__new__`` that also supports sequence parallelism and zero-centred weights."""

    @functools.wraps(original)
    def build(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        plain.persist_layer_norm = False
        if config.layernorm_zero_centered_gamma and config.normalization in _ZERO_CENTERED:
            norm: Any = _ZERO_CENTERED[config.normalization](hidden_size, eps=eps)
        else:
            norm = original(cls, plain, hidden_size, eps, *args, **kwargs)
        if config.sequence_parallel:
            for parameter in norm.parameters():
                parameter.sequence_parallel = True
        return norm

    return build
