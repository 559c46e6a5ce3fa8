"""Device tensors over host links, by way of page-locked buffers.

For what the vendor library cannot do: several ranks on one GPU, traffic that
must survive an aborted communicator, machines without one. Each transfer copies
device → host, runs on a host group, and copies back; the copies use a pinned
buffer, so that they are single DMA transfers. With tensors of the CPU the same
path runs with ordinary memory, which is how it is tested; no GPU has run it.

Invariant: a staged call returns when the result is in the tensor (its stream is
synchronised), so no later kernel can read half of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["HostStaging"]

SMALLEST = 1 << 12


class HostStaging:
    """Buffers of one thread, kept between calls (not for several threads at once).

    ``most`` bounds the bytes kept; larger transfers get a buffer of their own.
    """

    def __init__(self, most: int = 1 << 28) -> None:
        self._most = most
        self._buffers: dict[tuple[int, bool], torch.Tensor] = {}

    def all_reduce(self, group: dist.ProcessGroup, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """In place, over ``group``'s living."""
        self._round_trip(tensor, lambda host: dist.all_reduce(host, op, group=group))

    def broadcast(self, group: dist.ProcessGroup, tensor: torch.Tensor, src: int) -> None:
        """``src`` is a global rank."""
        self._round_trip(tensor, lambda host: dist.broadcast(host, src, group=group))

    def send(self, group: dist.ProcessGroup, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        dist.send(self._to_host(tensor), dst, group=group, tag=tag)

    def recv(self, group: dist.ProcessGroup, tensor: torch.Tensor, src: int, tag: int = 0) -> None:
        host = self._buffer(tensor)
        dist.recv(host, src, group=group, tag=tag)
        self._to_device(host, tensor)

    def all_gather(self, group: dist.ProcessGroup, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """``output``: ``group.size()`` × the elements of ``tensor``, in order of group rank."""
        source = self._to_host(tensor).clone()  # both sides may be of one size class
        host = self._buffer(output)
        host.copy_(output)  # holes in the slot space keep what was there
        dist.all_gather_into_tensor(host.view(-1), source.view(-1), group=group)
        self._to_device(host, output)

    def kept_bytes(self) -> int:
        """Bytes of host memory held between calls."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def _round_trip(self, tensor: torch.Tensor, act: Callable[[torch.Tensor], object]) -> None:
        host = self._to_host(tensor)
        act(host)
        self._to_device(host, tensor)

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory of ``tensor``'s shape and type, pinned when it comes from a device."""
        wanted = tensor.numel() * tensor.element_size()
        size = max(SMALLEST, 1 << max(0, wanted - 1).bit_length())
        pinned = tensor.device.type != "cpu"
        buffer = self._buffers.get((size, pinned))
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            if self.kept_bytes() + size <= self._most:
                self._buffers[size, pinned] = buffer
        return buffer[:wanted].view(tensor.dtype).view(tensor.shape)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self._buffer(tensor)
        host.copy_(tensor, non_blocking=True)
        _finish(tensor)
        return host

    def _to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        tensor.copy_(host, non_blocking=True)
        _finish(tensor)


def _finish(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        torch.accelerator.current_stream(tensor.device).synchronize()
