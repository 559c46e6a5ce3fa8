"""CPU: the first-class platform that every machine has.

Megatron asks for CUDA at run time only, so :meth:`CpuPlatform.prepare` redirects
``torch.cuda`` (``cpu_redirect``) and no Megatron source is touched. Collectives
run over gloo, or over the native links of ``comm``.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch

from megatron.elastic.platform import cpu_redirect, host_memory, streams
from megatron.elastic.platform.base import Memory, Platform, Stream, StreamEvent

__all__ = ["CpuPlatform"]


class CpuPlatform(Platform):
    """See the module docstring."""

    name = "cpu"
    default_backend = "gloo"
    synchronous = True

    @classmethod
    def available(cls) -> bool:
        return True

    def prepare(self) -> None:
        cpu_redirect.install()

    def describe(self) -> str:
        return f"cpu: {os.cpu_count()} cores, {torch.get_num_threads()} threads a rank, torch {torch.__version__}"

    def device_count(self) -> int:
        return 1

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        """There is one device."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def new_stream(self) -> Stream:
        return streams.HostStream()

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return streams.HostStream()

    def use_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return streams.use_stream(stream)

    def new_event(self, timing: bool = False) -> StreamEvent:
        return streams.HostEvent(enable_timing=timing)

    def memory(self, index: int = 0) -> Memory:
        total, free = host_memory.machine_memory()
        used, peak = host_memory.process_memory()
        return Memory(total=total, free=free, used=used, peak=peak)

    def release_cached_memory(self) -> None:
        """The host allocator keeps no cache of its own to return."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)
