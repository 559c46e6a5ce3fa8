"""Ascend: ``torch_npu`` and its own redirection of ``torch.cuda``; HCCL carries bulk data.

``torch_npu.contrib.transfer_to_npu`` does for Ascend what ``cpu_redirect`` does
here, but for the names of tensor types. Written against torch-npu
2.14's documented names; contract-tested only (no such device at hand).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from megatron.elastic.platform.base import PlatformUnavailable
from megatron.elastic.platform.type_names import named_as_cuda
from megatron.elastic.platform.vendor import VendorPlatform

__all__ = ["NpuPlatform"]


class NpuPlatform(VendorPlatform):
    """See the module docstring."""

    name = "npu"
    default_backend = "hccl"

    @classmethod
    def available(cls) -> bool:
        if importlib.util.find_spec("torch_npu") is None:
            return False
        importlib.import_module("torch_npu")
        return bool(torch.get_device_module("npu").is_available())

    def module(self) -> Any:
        return torch.get_device_module("npu")

    def prepare(self) -> None:
        if not self.available():
            raise PlatformUnavailable("no Ascend device: torch_npu is not installed or sees none (npu-smi info)")
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
        named_as_cuda(self.name)
