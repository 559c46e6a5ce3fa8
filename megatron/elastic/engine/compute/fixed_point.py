"""Sums of gradients in 64-bit fixed point, in host memory or on a device, with the same bits in both.

A contribution is multiplied by a power of two, rounded to the nearest integer (ties to even) and added. Sums of
integers are exact in any order. They become fp32 by way of fp64, rounded twice.

Invariant: what :meth:`FixedPoint.flags` tells covers all contributions since :meth:`FixedPoint.begin`; integers of
contributions that are flagged mean nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from megatron.elastic import _state

__all__ = [
    "CONVERTIBLE",
    "NOT_FINITE",
    "OUT_OF_RANGE",
    "DeviceFixedPoint",
    "FixedPoint",
    "HostFixedPoint",
    "fixed_point",
]

OUT_OF_RANGE, NOT_FINITE = 1, 2
CONVERTIBLE = 51
"""The host's kernel converts magnitudes below 2^51."""
_CHUNK = 1 << 24
"""Elements of a device that are converted at once: each needs 16 bytes for the time of it."""


class FixedPoint(ABC):
    """One memory's arithmetic. ``limit``: magnitudes, in units of the last place, from which on a value is refused."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._scale = 1.0

    def begin(self, scale: float) -> None:
        """Forget all flags; contributions are multiplied by ``scale``, a power of two."""
        self._scale = scale

    @abstractmethod
    def fold(self, values: torch.Tensor, sums: torch.Tensor, first: bool) -> None:
        """Add ``values`` [n] of any type of floating point to ``sums`` int64 [n], or replace them (``first``)."""

    @abstractmethod
    def flags(self) -> int:
        """Return ``OUT_OF_RANGE`` | ``NOT_FINITE``, as contributions were. Waits for a device."""

    @abstractmethod
    def unfold(self, sums: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``sums`` int64 [n] to ``out`` fp32 [n]."""


class HostFixedPoint(FixedPoint):
    """In host memory, by a native kernel (``csrc/state/fixed_point.cpp``). Contributions may lie on a device."""

    def begin(self, scale: float) -> None:
        super().begin(scale)
        self._flags = 0

    def fold(self, values: torch.Tensor, sums: torch.Tensor, first: bool) -> None:
        here = values.to("cpu", torch.float32).contiguous()
        self._flags |= _state.fold(here.data_ptr(), sums.data_ptr(), here.numel(), self._scale, self._limit, first)

    def flags(self) -> int:
        return self._flags

    def unfold(self, sums: torch.Tensor, out: torch.Tensor) -> None:
        _state.unfold(sums.data_ptr(), out.data_ptr(), sums.numel(), self._scale)


class DeviceFixedPoint(FixedPoint):
    """On a device, by operations of torch that are rounded as IEEE 754 says. Nothing waits but :meth:`flags`."""

    def __init__(self, limit: float, device: torch.device) -> None:
        super().__init__(limit)
        self._device = device

    def begin(self, scale: float) -> None:
        super().begin(scale)
        self._largest = torch.zeros((), dtype=torch.float32, device=self._device)

    def fold(self, values: torch.Tensor, sums: torch.Tensor, first: bool) -> None:
        for start in range(0, values.numel(), _CHUNK):
            part, target = values[start : start + _CHUNK].float(), sums[start : start + _CHUNK]
            self._largest = torch.maximum(self._largest, part.abs().amax())  # NaN is the largest of all
            rounded = part.double().mul_(self._scale).round_().long()
            if first:
                target.copy_(rounded)
            else:
                target.add_(rounded)

    def flags(self) -> int:
        largest = float(self._largest)
        if not largest < float("inf"):
            return NOT_FINITE
        return 0 if largest * self._scale < self._limit else OUT_OF_RANGE

    def unfold(self, sums: torch.Tensor, out: torch.Tensor) -> None:
        for start in range(0, sums.numel(), _CHUNK):
            out[start : start + _CHUNK].copy_(sums[start : start + _CHUNK].double().mul_(1.0 / self._scale))


def fixed_point(limit: float, device: torch.device) -> FixedPoint:
    """Return the arithmetic of the memory of ``device``."""
    return HostFixedPoint(limit) if device.type == "cpu" else DeviceFixedPoint(limit, device)
