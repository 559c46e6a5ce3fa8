"""Backward in two parts for Transformer Engine's linear layers: their own split, with the engine's queue.

Since 2.3 a Transformer Engine layer can leave its weight gradient in a ``WeightGradStore``: its backward pass then
calls ``put([input, output gradient], product)`` and returns no weight gradient. Megatron-LM uses this for experts
only, and for a whole run. Here each layer has a store that defers exactly while a piece is deferring, and whose
products go into that piece's :class:`WeightQueue`; the layer's ``backward_dw`` is not called.
The product is the one that the whole backward would have computed, with the same operands.

Some layers are not split, so the same schedule defers less: layers with several weights (grouped experts, the fused
LayerNormMLP), layers that add into ``main_grad``, and layers whose tensor-parallel communication overlaps the
product. Transformer Engine does not split those.

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
"""Function of the stored tensors that returns (weight gradient, bias gradient or ``None``, …)."""

_OVERLAPS = ("ub_bulk_wgrad", "ub_bulk_dgrad", "ub_overlap_ag_dgrad", "ub_overlap_rs_dgrad")


@dataclass(frozen=True)
class _TeProduct:
    """A product that a layer deferred, with its operands."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    operands: Sequence[Any]
    product: _Product

    def form(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield the weight's gradient (:class:`Deferred`), and the bias's if the product computes it too."""
        weight_gradient, bias_gradient, *_ = self.product(*self.operands)
        yield self.weight, weight_gradient.to(self.weight.dtype).view(self.weight.shape)
        if self.bias is not None and bias_gradient is not None and bias_gradient.numel():
            yield self.bias, bias_gradient.to(self.bias.dtype)


class QueueStore:
    """The interface of ``WeightGradStore`` that a layer uses, controlled by the switch of the model's split layers."""

    def __init__(self, switch: SplitLinears, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        self._switch, self._weight, self._bias = switch, weight, bias

    def delay_wgrad_compute(self) -> bool:
        """Return whether the present backward pass defers the weight's gradient."""
        return self._weight.requires_grad and self._switch.defers(self._weight) is not None

    def put(self, tensor_list: Sequence[Any], func: _Product) -> None:
        """Queue a product; called by the layer's backward pass. Raises ``RuntimeError`` if no piece is deferring."""
        queue = self._switch.defers(self._weight)
        if queue is None:
            raise RuntimeError("a layer deferred its weight gradient although no piece is deferring")
        queue.put(_TeProduct(self._weight, self._bias, tensor_list, func))


def split_te_linears(model: torch.nn.Module, switch: SplitLinears) -> None:
    """Replace the ``WeightGradStore`` of each layer of ``model`` with one weight. Idempotent."""
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
