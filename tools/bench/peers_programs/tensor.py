"""Tensor parallelism for the peers' model, as Megatron-LM does it (Shoeybi et al. 2019, section 3).

The attention's heads and the MLP's hidden units are divided among the ranks of a replica. Embeddings, norms and the
output layer are whole on each of them. So a layer takes two all-reduces forward and two backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tools.bench.peers_programs import common

__all__ = ["cut", "shards_of"]


class _Copied(torch.autograd.Function):
    """Forward the identity; backward the sum over the ranks of the replica."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    """Forward the sum over the ranks of the replica; backward the identity."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = states.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Shard(nn.Module):
    """A part of a linear layer. ``group`` has the ranks with the other parts."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        self._group = group


class Column(_Shard):
    """Some of the outputs of a linear layer."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs of ``states`` [..., inputs]."""
        copied = _Copied.apply(states, self._group)  # type: ignore[no-untyped-call]
        return functional.linear(copied, self.weight, self.bias)


class Row(_Shard):
    """A linear layer of which each rank has some of the inputs."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return all outputs, from this rank's inputs ``states`` [..., inputs / ranks]."""
        own = functional.linear(states, self.weight)
        total: torch.Tensor = _Summed.apply(own, self._group)  # type: ignore[no-untyped-call]
        return total + self.bias


def cut(model: common.Gpt, part: int, parts: int, group: dist.ProcessGroup) -> None:
    """Replace the linear layers of ``model`` by shard ``part`` of ``parts``. ``group`` has the ranks of the replica."""
    rows_of_heads = torch.arange(3 * common.HIDDEN).view(3, parts, -1)[:, part].flatten()
    rows_of_units = torch.arange(4 * common.HIDDEN).chunk(parts)[part]
    for layer in model.layers:
        for name, rows in (("queries_keys_values", rows_of_heads), ("wide", rows_of_units)):
            linear = getattr(layer, name)
            setattr(layer, name, Column(linear.weight.detach()[rows], linear.bias.detach()[rows], group))
        for name in ("projection", "narrow"):
            linear = getattr(layer, name)
            setattr(layer, name, Row(linear.weight.detach().chunk(parts, dim=1)[part], linear.bias.detach(), group))


def shards_of(model: common.Gpt) -> list[nn.Parameter]:
    """Return the parameters of a model that was cut of which each rank of the replica has another shard."""
    columns = [module for module in model.modules() if isinstance(module, Column)]
    rows = [module for module in model.modules() if isinstance(module, Row)]
    return [p for module in columns for p in (module.weight, module.bias)] + [module.weight for module in rows]
