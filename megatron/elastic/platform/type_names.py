"""Names of tensor types, which Megatron knows as CUDA's.

Its optimizer for parameters of 16 bits compares ``Tensor.type()`` with names such as ``'torch.cuda.HalfTensor'``. So
the name of a type on the platform's device also equals its CUDA twin, and a cast to a CUDA type is one to its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["TypeName", "named_as_cuda", "type_name"]


class TypeName(str):
    """``'torch.npu.FloatTensor'`` that also equals ``'torch.cuda.FloatTensor'``, as left or right operand."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return NotImplemented
        return str.__eq__(self, str(other)) or str(other) == f"torch.cuda.{self.rpartition('.')[2]}"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def type_name(device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper of ``Tensor.type`` for devices of this type (module docstring)."""
    own = "torch." if device == "cpu" else f"torch.{device}."

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def redirected(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
            if dtype is None:
                name = method(self)
                return TypeName(name) if self.device.type == device else name
            if isinstance(dtype, str):
                dtype = dtype.replace("torch.cuda.", own, 1)
            return method(self, dtype, non_blocking, **kwargs)

        return redirected

    return wrapped


def named_as_cuda(device: str) -> None:
    """Have ``Tensor.type`` name types on ``device`` so, from now on; once is enough, more do no harm."""
    if not isinstance(torch.empty(0, device=device).type(), TypeName):
        torch.Tensor.type = type_name(device)(torch.Tensor.type)  # type: ignore[method-assign]
