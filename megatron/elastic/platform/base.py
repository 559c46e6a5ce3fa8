"""The interface a platform offers: device, streams, memory, seeds, default backend.

Small on purpose: what the engine needs and cannot say in plain torch. Megatron's
own calls to ``torch.cuda`` are not routed through here; where there is no CUDA
they are redirected (``cpu_redirect``) or taken over by the vendor's own adaptor
(``torch_npu.contrib.transfer_to_npu``).

Invariant: nothing here touches a device or changes torch before
:meth:`Platform.prepare` is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

__all__ = ["Memory", "Platform", "PlatformUnavailable", "Stream", "StreamEvent"]


class PlatformUnavailable(RuntimeError):
    """The requested platform is not on this machine; the text names the missing part."""


@dataclass(frozen=True)
class Memory:
    """Memory of one device in bytes. On CPU: of the machine, and of this process."""

    total: int
    free: int
    used: int
    """By this process."""
    peak: int
    """Most this process has used so far."""


class StreamEvent(Protocol):
    """A point in a stream's work."""

    def record(self, stream: object | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: StreamEvent) -> float:
        """Milliseconds from this event to ``end_event``."""
        ...


class Stream(Protocol):
    """A queue of device work. On CPU everything is done when the call returns."""

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: StreamEvent) -> None: ...


class Platform(ABC):
    """One kind of device. Instances are cheap and hold no state."""

    name: ClassVar[str]
    """'cpu', 'cuda', 'npu', or the type that torch knows the device by."""
    default_backend: ClassVar[str]
    """Backend of torch.distributed for bulk data; 'gloo' on a device: its tensors go through host memory."""
    synchronous: ClassVar[bool]
    """Work is finished when a call returns: no stream order to keep."""

    @classmethod
    @abstractmethod
    def available(cls) -> bool:
        """True if this machine has such a device. Cheap, and without side effects."""

    @abstractmethod
    def prepare(self) -> None:
        """Make Megatron importable here. Before the first megatron import; idempotent."""

    @abstractmethod
    def describe(self) -> str:
        """One line for logs: device, count, library versions."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices this process may use."""

    @abstractmethod
    def device(self, index: int = 0) -> torch.device:
        """Device ``index`` of this machine (on CPU always the one device)."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make device ``index`` current in the calling thread."""

    def device_name(self, index: int = 0) -> str:
        """A name that no other device of any machine has; empty where ranks have no device of their own."""
        return ""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all queued work of the current device is done."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A side stream of the current device."""

    @abstractmethod
    def current_stream(self, device: torch.device | None = None) -> Stream:
        """The stream that work of the calling thread is queued on now: of ``device``, else of the current one.

        Events of :meth:`new_event` take streams of this kind, and those of ``torch.accelerator`` not everywhere.
        """

    @abstractmethod
    def use_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Queue the work of a block on ``stream``."""

    @abstractmethod
    def new_event(self, timing: bool = False) -> StreamEvent:
        """An event; with ``timing`` its distance to another can be read."""

    @abstractmethod
    def memory(self, index: int = 0) -> Memory:
        """Bytes in use now on device ``index``."""

    @abstractmethod
    def release_cached_memory(self) -> None:
        """Return cached free blocks to the device, where the allocator keeps any."""

    @abstractmethod
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` (host memory) in page-locked memory, where that means anything."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the device's default generator. On CPU it is the only one."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """State of the device's default generator (uint8, 1-D, host memory)."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore the state that :meth:`rng_state` returned."""
