"""Backward in two parts for Transformer Engine's linear layers: their own split, into our queue.

Since 2.3 a Transformer Engine layer leaves its weight gradient in a ``WeightGradStore`` when that says so: its
backward pass calls ``put([input, output gradient], product)`` and returns none. Megatron-LM uses this for experts
only, and turns it on for a whole run. Here each layer is given a store that says so exactly while a piece is
deferring, and whose products go into that piece's :class:`WeightQueue`; nobody calls the layer's ``backward_dw``.
The product is the one the whole backward would have computed, with the same operands.

Left whole (the schedule is the same, it only defers less): layers with several weights (grouped experts, the fused
LayerNormMLP), layers that add into ``main_grad``, and layers whose tensor-parallel communication overlaps the
product: Transformer Engine does not split those.

Source: ``transformer_engine/pytorch/module/_common.py``, ``linear.py`` and ``layernorm_linear.py`` (2.3 to 2.20).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.elastic.mcore.model.split_backward import SplitLinears

__all__ = ["QueueStore", "split_te_linears"]

_Product = Callable[..., tuple[Any, ...]]
"""(weight gradient, bias gradient or ``None``, …) of the tensors it was stored with."""

_OVERLAPS = ("ub_bulk_wgrad", "ub_bulk_dgrad", "ub_overlap_ag_dgrad", "ub_overlap_rs_dgrad")


@dataclass(frozen=True)
class _TeProduct:
    """A product that a layer left out, with its operands."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    operands: Sequence[Any]
    product: _Product

    def form(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """See :class:`Deferred`. The bias's gradient comes with it where the product sums it on the way."""
        weight_gradient, bias_gradient, *_ = self.product(*self.operands)
        yield self.weight, weight_gradient.to(self.weight.dtype).view(self.weight.shape)
        if self.bias is not None and bias_gradient is not None and bias_gradient.numel():
            yield self.bias, bias_gradient.to(self.bias.dtype)


class QueueStore:
    """What a layer asks of its ``WeightGradStore``, answered by the switch of the model's split layers."""

    def __init__(self, switch: SplitLinears, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        self._switch, self._weight, self._bias = switch, weight, bias

    def delay_wgrad_compute(self) -> bool:
        """Whether a backward pass that begins or runs now leaves the weight's gradient out."""
        return self._weight.requires_grad and self._switch.defers(self._weight) is not None

    def put(self, tensor_list: Sequence[Any], func: _Product) -> None:
        """Called by the layer's backward pass. Raises ``RuntimeError`` when no piece is deferring."""
        queue = self._switch.defers(self._weight)
        if queue is None:
            raise RuntimeError("a layer left its weight gradient out although no piece is deferring")
        queue.put(_TeProduct(self._weight, self._bias, tensor_list, func))


def split_te_linears(model: torch.nn.Module, switch: SplitLinears) -> None:
    """Give each layer of ``model`` that keeps a ``WeightGradStore`` for one weight our own. Idempotent."""
    for module in model.modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(weight, torch.nn.Parameter) and _splits(module):
            has_bias = getattr(module, "use_bias", False) and isinstance(bias, torch.nn.Parameter)
            module.wgrad_store = QueueStore(switch, weight, bias if has_bias else None)  # type: ignore[assignment]


def _splits(module: torch.nn.Module) -> bool:
    overlaps = any(getattr(module, name, False) for name in _OVERLAPS)
    return (
        hasattr(getattr(module, "wgrad_store", None), "delay_wgrad_compute")
        and getattr(module, "weight_names", None) == ["weight"]
        and not getattr(module, "fuse_wgrad_accumulation", False)
        and not overlaps
    )
