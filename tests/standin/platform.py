"""The stand-in devices as a platform of the engine: ``ELASTIC_PLATFORM=tests.standin.platform:StandinPlatform``."""

from __future__ import annotations

from typing import Any

import torch

from megatron.elastic.platform.type_names import named_as_cuda
from megatron.elastic.platform.vendor import VendorPlatform
from tests.standin import device, redirect

__all__ = ["NcclPlatform", "StandinPlatform"]


class StandinPlatform(VendorPlatform):
    """See the module docstring. ``torch.cuda`` is redirected as ``torch_npu.contrib.transfer_to_npu`` does.

    Types have CUDA's names too, as on Ascend (:class:`NpuPlatform`).
    """

    name = device.NAME
    default_backend = "gloo"

    @classmethod
    def available(cls) -> bool:
        return device.register().is_available()

    def module(self) -> Any:
        return torch.get_device_module(device.NAME)

    def prepare(self) -> None:
        device.register()
        redirect.install()
        named_as_cuda(self.name)


class NcclPlatform(StandinPlatform):
    """Bulk data goes through a library with NCCL's names that the process finds (``tests/standin/vendor.py``)."""

    default_backend = "nccl"
