"""Which vendor's library moves a platform's tensors, and how it is reached from a rank.

CUDA: ``libnccl.so.2``, as torch's own wheel brings it. Ascend: ``torch_npu``, whose
groups HCCL makes. Neither has been run by this project yet (docs/support.md). A device
without such a library: all its tensors go through host memory.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.fabric import DeviceFabric
from megatron.elastic.comm.vendor.hccl import HcclCommunicator
from megatron.elastic.comm.vendor.library import VendorCommunicator
from megatron.elastic.comm.vendor.nccl import NcclCommunicator, NcclLibrary
from megatron.elastic.comm.vendor.through_host import ThroughHost
from megatron.elastic.config import ConfigError
from megatron.elastic.platform.base import Platform
from megatron.elastic.platform.own_device import own_device

__all__ = ["ABORT_SECONDS", "START_SECONDS", "Vendor", "vendor_of"]

ABORT_SECONDS = 10.0
"""Time-out in seconds of a vendor call that ends operations; then the process ends and is started again."""
START_SECONDS = 120.0
"""Time-out in seconds of a vendor call that connects members: the first one loads kernels and opens the network.

A change of members interrupts it. HCCL has a limit of its own (HCCL_CONNECT_TIMEOUT)."""


@dataclass(frozen=True)
class Vendor:
    """A vendor's library, opened."""

    device: torch.device
    device_name: str
    """Tells devices of the job apart, whichever process names them."""
    communicator: Callable[[int], VendorCommunicator]

    def fabric(self, rank: int, slots: int, incarnation: int, **native: Any) -> DeviceFabric:
        """The fabric of ``rank`` whose device tensors go through this library."""
        return DeviceFabric(
            rank,
            slots,
            incarnation,
            vendor=self.communicator,
            device=self.device,
            device_name=self.device_name,
            **native,
        )


def vendor_of(platform: Platform, store: dist.Store | Callable[[], dist.Store]) -> Vendor:
    """The library of ``platform``, for its current device. Raises ``ConfigError`` when it cannot be opened."""
    try:
        index = own_device(platform)
        device, name = platform.device(index), platform.device_name(index)
        match platform.default_backend:
            case "nccl":
                return Vendor(device, name, _nccl(platform, device))
            case "hccl":
                return Vendor(device, name, _hccl(store, functools.partial(platform.set_device, index), device))
            case _:
                return Vendor(device, name, lambda rank: ThroughHost())
    except (OSError, ImportError, AssertionError, RuntimeError) as error:
        # VendorError is one of the last; torch's own are the last two: built without the device, no driver for it.
        raise ConfigError(
            f"--elastic-comm elastic on {platform.name} needs the vendor's library ({error}); use --elastic-comm gloo"
        ) from error


def _nccl(platform: Platform, device: torch.device) -> Callable[[int], VendorCommunicator]:
    # Else NCCL connects members in their first collective: a loss then leaves the training thread inside a call that
    # has to be ended by force, where a communicator that is being made can be left behind.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    library = NcclLibrary()

    def stream() -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def communicator(rank: int) -> VendorCommunicator:
        return NcclCommunicator(
            library, rank, ABORT_SECONDS, lambda: platform.set_device(device.index), stream, START_SECONDS
        )

    return communicator


def _hccl(
    store: dist.Store | Callable[[], dist.Store], set_device: Callable[[], None], device: torch.device
) -> Callable[[int], VendorCommunicator]:
    npu = importlib.import_module("torch_npu")

    @functools.cache
    def client() -> dist.Store:  # kept: torch finds the methods of a store in Python only while its object lives
        return store() if callable(store) else store

    def communicator(rank: int) -> VendorCommunicator:
        def make_backend(members: Sequence[int], name: str) -> Any:
            kind = npu._C._distributed_c10d.ProcessGroupHCCL
            options = kind.Options()
            options.global_ranks_in_group, options.group_id = list(members), name
            return kind(dist.PrefixStore(f"hccl/{name}", client()), list(members).index(rank), len(members), options)

        return HcclCommunicator(rank, make_backend, ABORT_SECONDS, set_device, device)

    return communicator
