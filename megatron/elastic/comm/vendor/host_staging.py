"""Device tensors over host links, by way of page-locked copies.

For what the vendor library cannot do: several ranks on one GPU, types and forms
it lacks, a world of one. Each tensor is copied device → host, the operation runs
on host memory, and what it wrote is copied back. Host copies are page-locked, so
that each is a single DMA transfer; torch's host allocator keeps them for the next
call. With tensors of the CPU the same path runs with ordinary memory, which is
how it is tested; ranks that shared an H200 have used it (docs/gpu.md).

Invariant: a staged call returns when the result is in the tensor (its stream is
synchronised), so no later kernel can read half of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.staged_message import StagedMessage

__all__ = ["begun_through_host", "through_host"]

T = TypeVar("T")


def through_host(
    read: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    act: Callable[[list[torch.Tensor], list[torch.Tensor]], T],
) -> T:
    """``act(host copies of read, host copies of written)``; what it wrote goes back to ``written``.

    ``act`` must be done when it returns. A tensor in both lists is one host tensor.
    """
    copies: dict[int, torch.Tensor] = {}
    for tensor in (*read, *written):  # what is written is copied too: holes keep what was there
        if id(tensor) not in copies:
            pinned = tensor.device.type != "cpu"
            copies[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            copies[id(tensor)].copy_(tensor.detach(), non_blocking=True)
    _finish((*read, *written))
    result = act([copies[id(tensor)] for tensor in read], [copies[id(tensor)] for tensor in written])
    for tensor in written:
        tensor.detach().copy_(copies[id(tensor)], non_blocking=True)
    _finish(written)
    return result


def begun_through_host(tensor: torch.Tensor, begin: Callable[[torch.Tensor], dist.Work]) -> dist.Work:
    """Begin an operation on a host copy of ``tensor``; the wait of the work copies what it wrote back."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
    host.copy_(tensor.detach(), non_blocking=True)
    _finish([tensor])
    return StagedMessage(begin(host), host, tensor)


def _finish(tensors: Sequence[torch.Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.current_stream(device).synchronize()
