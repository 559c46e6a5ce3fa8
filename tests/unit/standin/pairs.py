"""Two ranks on stand-in devices in one process, joined over host links, and work that keeps a device busy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.fabric import DeviceFabric
from megatron.elastic.comm.vendor.selection import vendor_of
from tests.standin import device as standin
from tests.standin.platform import StandinPlatform

__all__ = ["NAP", "Pair", "busy", "edit", "linked"]

NAP = 300_000_000
"""Nanoseconds that a device is kept busy, far longer than any call of these checks."""


@dataclass(frozen=True)
class Pair:
    """Two ranks of one process, linked, and their groups."""

    fabrics: tuple[DeviceFabric, DeviceFabric]
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup]


def linked() -> Pair:
    """In generation 1."""
    vendor = vendor_of(StandinPlatform(), dist.HashStore())
    first, second = (vendor.fabric(rank, 2, 0, run_id="pair", secret=b"pair", timeout=20.0) for rank in range(2))
    edit((first, second), 1)
    return Pair((first, second), (first.group_apart("pp", (0, 1)), second.group_apart("pp", (0, 1))))


def edit(fabrics: Sequence[DeviceFabric], generation: int) -> None:
    addresses = {fabric.rank: fabric.address() for fabric in fabrics}
    threads = [threading.Thread(target=one.edit, args=(generation, addresses, 20.0)) for one in fabrics]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def busy() -> torch.Event:
    """Keep the device busy; the event comes when it is free."""
    standin.set_lateness(0.0)
    standin._sleep(NAP)
    free = torch.Event(torch.device("standin", 0))
    free.record()
    return free
