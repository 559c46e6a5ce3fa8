"""A weight used at several places of a model, each with a gradient of its own.

Autograd adds the gradients of all uses in fp32 before anybody sees them, which
gives other bits than adding them later, as two pipeline stages do that hold an
end each. Exact mode (docs/design.md §8) wants each use for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["own_use"]

Sink = Callable[[torch.Tensor], None]


class _Use(torch.autograd.Function):
    """The weight itself; its gradient goes to a sink and no further."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, sink: Sink) -> torch.Tensor:
        ctx.sink = sink
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        (gradient,) = gradients
        ctx.sink(gradient)
        return None, None


def own_use(weight: torch.nn.Parameter, sink: Sink) -> torch.Tensor:
    """``weight`` for one use, whose gradient is handed to ``sink`` instead of being added to ``weight.grad``."""
    return _Use.apply(weight, sink)  # type: ignore[no-any-return, no-untyped-call]
