"""CUDA: torch as it is. Nothing is redirected; NCCL carries bulk data."""

from __future__ import annotations

from typing import Any

import torch

from megatron.elastic.platform.base import PlatformUnavailable
from megatron.elastic.platform.vendor import VendorPlatform

__all__ = ["CudaPlatform"]


class CudaPlatform(VendorPlatform):
    """See the module docstring."""

    name = "cuda"
    default_backend = "nccl"

    @classmethod
    def available(cls) -> bool:
        return torch.version.cuda is not None and torch.cuda.is_available()

    def module(self) -> Any:
        return torch.cuda

    def device_name(self, index: int = 0) -> str:
        return str(torch.cuda.get_device_properties(index).uuid)

    def prepare(self) -> None:
        if not self.available():
            raise PlatformUnavailable("no CUDA device is visible to torch (check CUDA_VISIBLE_DEVICES and the driver)")
