"""Which vendor's library moves a platform's tensors, and how it is reached from a rank.

CUDA: ``libnccl.so.2``, as torch's own wheel brings it. Ascend: ``torch_npu``, whose
groups HCCL makes. Neither has been run by this project yet (docs/support.md).
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.fabric import DeviceFabric
from megatron.elastic.comm.vendor.hccl import HcclCommunicator
from megatron.elastic.comm.vendor.library import VendorCommunicator
from megatron.elastic.comm.vendor.nccl import NcclCommunicator, NcclLibrary
from megatron.elastic.config import ConfigError

__all__ = ["ABORT_SECONDS", "Vendor", "vendor_of"]

ABORT_SECONDS = 10.0
"""Time-out in seconds of a vendor call that can block; then the process ends and is started again."""


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


def vendor_of(platform: str, store: dist.Store | Callable[[], dist.Store]) -> Vendor:
    """The library of ``platform`` ("cuda" or "npu"). Raises ``ConfigError`` when it cannot be opened."""
    try:
        return _nccl() if platform == "cuda" else _hccl(store)
    except (OSError, ImportError, AssertionError, RuntimeError) as error:
        # VendorError is one of the last; torch's own are the last two: built without the device, no driver for it.
        raise ConfigError(
            f"--elastic-comm elastic on {platform} needs the vendor's library ({error}); use --elastic-comm gloo"
        ) from error


def _nccl() -> Vendor:
    library, index = NcclLibrary(), torch.cuda.current_device()
    device = torch.device("cuda", index)

    def stream() -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def communicator(rank: int) -> VendorCommunicator:
        return NcclCommunicator(library, rank, ABORT_SECONDS, lambda: torch.cuda.set_device(index), stream)

    return Vendor(device, str(torch.cuda.get_device_properties(index).uuid), communicator)


def _hccl(store: dist.Store | Callable[[], dist.Store]) -> Vendor:
    npu = importlib.import_module("torch_npu")
    index = npu.npu.current_device()

    def communicator(rank: int) -> VendorCommunicator:
        def make_backend(members: Sequence[int], name: str) -> Any:
            client = dist.PrefixStore(f"hccl/{name}", store() if callable(store) else store)
            kind = npu._C._distributed_c10d.ProcessGroupHCCL
            options = kind.Options()
            options.global_ranks_in_group, options.group_id = list(members), name
            return kind(client, list(members).index(rank), len(members), options)

        return HcclCommunicator(rank, make_backend, ABORT_SECONDS)

    return Vendor(torch.device("npu", index), f"{socket.gethostname()}/npu{index}", communicator)
