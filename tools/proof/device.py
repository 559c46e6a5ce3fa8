"""One process on the first device: what the device and its vendor's library are, and what the library can do.

    ELASTIC_PLATFORM=cuda python -m tools.proof.device

The library is used as the engine uses it, in a group of one: connect, add up, stop, close. The last line is one JSON
object.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.library import VendorCommunicator, VendorError
from megatron.elastic.comm.vendor.nccl import NcclLibrary
from megatron.elastic.comm.vendor.selection import vendor_of
from megatron.elastic.config import ConfigError
from megatron.elastic.platform.base import Platform
from megatron.elastic.platform.own_device import use_own_device
from megatron.elastic.platform.select import select

__all__ = ["described"]


def described() -> dict[str, Any]:
    """Return the facts of this process's device."""
    platform = select()
    platform.prepare()
    use_own_device(platform)
    memory = platform.memory(0)
    return {
        "device": platform.describe(),
        "devices": platform.device_count(),
        "memory_bytes": memory.total,
        "torch": torch.__version__,
        "library": _library(platform),
    }


def _library(platform: Platform) -> dict[str, Any]:
    try:
        vendor = vendor_of(platform, dist.HashStore())
    except ConfigError as error:
        return {"fault": str(error)}
    communicator = vendor.communicator(0)
    found: dict[str, Any] = {"name": platform.default_backend}
    found |= {"shrink": communicator.can_shrink, "grow": communicator.can_grow}
    if platform.default_backend == "nccl":
        library = NcclLibrary()
        found |= {"version": library.version(), "revoke": library.can_revoke}
    if communicator.takes(torch.empty(1), dist.ReduceOp.SUM):
        found |= _alone(communicator, vendor.device)
    return found


def _alone(communicator: VendorCommunicator, device: torch.device) -> dict[str, Any]:
    """The seconds of each call of a group of one, and whether its sum was right."""
    seconds: dict[str, float] = {}
    tensor = torch.full((1 << 20,), 2.0, device=device)

    def timed(name: str, call: Any, *arguments: Any) -> None:
        began = time.monotonic()
        call(*arguments)
        torch.accelerator.synchronize(device)
        seconds[name] = time.monotonic() - began

    try:
        timed("start", communicator.start, (0,), communicator.new_identity())
        timed("all_reduce", communicator.all_reduce, tensor, dist.ReduceOp.SUM)
        right = bool((tensor == 2).all().item())
        timed("revoke", communicator.revoke)
        timed("close", communicator.close)
    except VendorError as error:
        return {"fault": str(error), "seconds": seconds}
    return {"right": right, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(described()))
