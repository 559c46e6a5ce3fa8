"""Tensors in a form gloo takes, with the way back.

Data that is only moved travels as bytes, so every dtype goes; what gloo cannot
add (bool, int16) is widened, ``AVG`` is a sum divided afterwards, ``PREMUL_SUM``
a sum of products.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from megatron.elastic.comm.call_arguments import Op
from megatron.elastic.comm.errors import CommError

__all__ = ["Movable", "Reducible"]

WIDENED = {torch.bool: torch.uint8, torch.int16: torch.int32}
"""Types gloo cannot reduce → the type the reduction is done in."""


class Movable:
    """A tensor as contiguous bytes, with the way back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._dense = tensor.detach().contiguous()
        # A tensor of one element or none counts as contiguous with any strides, but bytes need a stride of 1.
        self.data = self._dense.as_strided((self._dense.numel(),), (1,)).view(torch.uint8)

    def finish(self) -> None:
        """Write received bytes to the tensor they are for."""
        if self._dense.data_ptr() != self.tensor.data_ptr():
            self.tensor.detach().copy_(self._dense)


class Reducible:
    """A tensor in a form gloo can reduce, with the way back.

    Raises ``CommError`` for a ``PREMUL_SUM`` of anything but floating point.
    """

    def __init__(self, tensor: torch.Tensor, op: Op, count: int) -> None:
        self.tensor = tensor
        self._average = op == dist.ReduceOp.AVG and tensor.dtype != torch.bool  # whose sum is an or
        self._count = count
        self.op = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
        if tensor.dtype == torch.bool:
            self.op = {dist.ReduceOp.SUM: dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT: dist.ReduceOp.MIN}.get(
                _kind(self.op), self.op
            )
        dense = tensor.detach().contiguous()
        if _kind(op) == dist.ReduceOp.PREMUL_SUM:
            self.op = dist.ReduceOp.SUM
            dense = dense * _factor(op, tensor)
        self.data = dense.to(WIDENED[tensor.dtype]) if tensor.dtype in WIDENED else dense

    def reduced(self) -> torch.Tensor:
        """The result in the tensor's own type and shape."""
        data = self.data
        if self._average:
            data.div_(self._count, rounding_mode=None if data.is_floating_point() else "trunc")
        if self.tensor.dtype == torch.bool:
            return data != 0
        return data

    def finish(self) -> None:
        data = self.reduced()
        if data.data_ptr() != self.tensor.data_ptr():
            self.tensor.detach().copy_(data)


def _kind(op: Op) -> dist.ReduceOp.RedOpType:
    return op if isinstance(op, dist.ReduceOp.RedOpType) else cast(dist.ReduceOp.RedOpType, cast(Any, op).op)


def _factor(op: Op, tensor: torch.Tensor) -> float:
    """Return the number by which each member multiplies its input."""
    if not tensor.is_floating_point():
        raise CommError(f"PREMUL_SUM multiplies floating-point tensors only, not {tensor.dtype}")
    return float(cast(Any, op).factor)
