"""Separate gradients for each use of a weight that a model uses at several places.

Autograd adds the gradients of all uses in fp32. This gives other bits than two
pipeline stages that hold one end each and add the gradients later. Exact mode
(docs/design.md §8) therefore needs the gradient of each use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["own_use"]

Sink = Callable[[torch.Tensor], None]


class _Use(torch.autograd.Function):
    """The weight itself; its gradient goes only to a sink."""

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
    """Return ``weight`` for one use, whose gradient goes to ``sink`` instead of ``weight.grad``."""
    return _Use.apply(weight, sink)  # type: ignore[no-any-return, no-untyped-call]
