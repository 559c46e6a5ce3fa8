"""Device memory as the place of a copy: owned blocks of an accelerator, stepped where parameters and gradients lie.

Steps are queued on the stream that is current in the calling thread; they are over for each reader that is ordered
after it. Copies between device and host have two streams of their own, one a direction, so that they run beside the
kernels. On the host's side their memory is page-locked, so that they are transfers without the processor.

Invariants
- A tensor that a stream of copies uses is known to the allocator as used by it, so its memory is not given to
  others before the copy has run.
- Memory that is filled in the background was reserved by the training thread (:meth:`DevicePlace.reserve`), so it
  belongs to that thread's stream, on which it is used from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.elastic.platform.base import Platform, Stream, StreamEvent
from megatron.elastic.state.adam import (
    AdamScalars,
    LionScalars,
    SgdScalars,
    adam_step_tensors,
    lion_step_tensors,
    sgd_step_tensors,
)
from megatron.elastic.state.place import Place, Staged

__all__ = ["DevicePlace", "Kernels", "Reserved", "tensor_kernels"]


@dataclass(frozen=True)
class Kernels:
    """The updates of a kind of device: correctly rounded operations in the order of the host's kernel."""

    name: str
    adam: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, AdamScalars], None]
    """Of master, exp_avg, exp_avg_sq, gradient."""
    lion: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LionScalars], None]
    """Of master, momentum, gradient."""
    sgd: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SgdScalars], None]
    """Of master, momentum, gradient."""


def tensor_kernels() -> Kernels:
    """Return the updates as separate torch operations, which every device has."""
    return Kernels("torch operations", adam_step_tensors, lion_step_tensors, sgd_step_tensors)


@dataclass(frozen=True)
class Reserved:
    """Device memory that another thread may fill once ``free`` has happened."""

    values: torch.Tensor
    free: StreamEvent


@dataclass(frozen=True)
class _Leaving:
    """A tensor on its way to page-locked host memory."""

    host: torch.Tensor
    arrived: StreamEvent

    def wait(self) -> torch.Tensor:
        """See :meth:`Staged.wait`."""
        self.arrived.synchronize()
        return self.host

    def is_here(self) -> bool:
        """See :meth:`Staged.is_here`."""
        return self.arrived.query()


class DevicePlace(Place):
    """The memory of one device (module docstring)."""

    on_device = True

    def __init__(self, platform: Platform, device: torch.device, kernels: Kernels) -> None:
        self.device = device
        self.kernels = kernels
        self._platform = platform

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def bring(self, values: torch.Tensor) -> torch.Tensor:
        return values if values.device == self.device else values.to(self.device)

    def stage(self, values: torch.Tensor) -> Staged:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pins)
        out = self._outwards
        out.wait_stream(self._current())
        with self._platform.use_stream(out):
            host.copy_(values.detach(), non_blocking=True)
            arrived = self._platform.new_event()
            arrived.record(out)
        self._used_by(values, out)
        return _Leaving(host, arrived)

    def reserve(self, *shape: int) -> Reserved:
        """Return memory for :meth:`fill`; on the training thread. Raises torch's out-of-memory error."""
        values, free = self.empty(*shape), self._platform.new_event()
        free.record(self._current())
        return Reserved(values, free)

    def fill(self, reserved: Reserved, values: torch.Tensor) -> None:
        """Copy host ``values`` into reserved memory; they are there when this returns. On any thread."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pins).copy_(values)
        into, arrived = self._inwards, self._platform.new_event()
        into.wait_event(reserved.free)
        with self._platform.use_stream(into):
            reserved.values.copy_(host, non_blocking=True)
            arrived.record(into)
        arrived.synchronize()

    def adam(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        scalars: AdamScalars,
    ) -> None:
        self.kernels.adam(master, exp_avg, exp_avg_sq, grad, scalars)

    def lion(self, master: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor, scalars: LionScalars) -> None:
        self.kernels.lion(master, momentum, grad, scalars)

    def sgd(self, master: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor, scalars: SgdScalars) -> None:
        self.kernels.sgd(master, momentum, grad, scalars)

    def round_to_bf16(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    @property
    def _pins(self) -> bool:
        return self.device.type != "cpu"

    @cached_property
    def _outwards(self) -> Stream:
        return self._new_stream()

    @cached_property
    def _inwards(self) -> Stream:
        return self._new_stream()

    def _new_stream(self) -> Stream:
        with self._platform.use_stream(self._current()):  # so that it is one of this device, on any thread
            return self._platform.new_stream()

    def _current(self) -> Stream:
        """Return the calling thread's stream of this device, whatever device is current in the thread."""
        return self._platform.current_stream(self.device)

    def _used_by(self, values: torch.Tensor, stream: Stream) -> None:
        if self.device.type != "cpu":
            values.record_stream(stream)  # type: ignore[arg-type]
