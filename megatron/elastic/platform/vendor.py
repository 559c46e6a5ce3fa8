"""The common part of CUDA and Ascend: torch gives both the same module of functions.

``torch.cuda`` and ``torch.npu`` have the same names for devices, streams, memory
and generators, so one class drives either; a subclass says which module, which
backend, and what has to be imported first.
"""

from __future__ import annotations

import socket
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from megatron.elastic.platform.base import Memory, Platform, Stream, StreamEvent

__all__ = ["VendorPlatform"]


class VendorPlatform(Platform):
    """Drives a ``torch.<device>`` module. ``module()`` is looked up at each call: import order stays free."""

    synchronous = False

    @abstractmethod
    def module(self) -> Any:
        """``torch.cuda`` or ``torch.npu``."""

    def describe(self) -> str:
        module = self.module()
        return f"{self.name}: {module.device_count()} × {module.get_device_name(0)}, torch {torch.__version__}"

    def device_count(self) -> int:
        return int(self.module().device_count())

    def device(self, index: int = 0) -> torch.device:
        return torch.device(self.name, index)

    def set_device(self, index: int) -> None:
        self.module().set_device(index)

    def device_name(self, index: int = 0) -> str:
        return f"{socket.gethostname()}/{self.name}{index}"

    def synchronize(self) -> None:
        self.module().synchronize()

    def new_stream(self) -> Stream:
        return cast(Stream, self.module().Stream())

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return cast(Stream, self.module().current_stream(device))

    def use_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return cast("AbstractContextManager[object]", self.module().stream(stream))

    def new_event(self, timing: bool = False) -> StreamEvent:
        return cast(StreamEvent, self.module().Event(enable_timing=timing))

    def memory(self, index: int = 0) -> Memory:
        module = self.module()
        free, total = module.mem_get_info(index)
        return Memory(
            total=int(total),
            free=int(free),
            used=int(module.memory_allocated(index)),
            peak=int(module.max_memory_allocated(index)),
        )

    def release_cached_memory(self) -> None:
        self.module().empty_cache()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type != "cpu" else tensor.pin_memory()

    def seed(self, seed: int) -> None:
        self.module().manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        return cast(torch.Tensor, self.module().get_rng_state())

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.module().set_rng_state(state)
