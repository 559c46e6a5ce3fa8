"""The least memory and the slowest link among the ranks of the launch.

All ranks measure them once, at the start of the job; newcomers receive them. With them the
planner decides whether moving units pays off and whether they fit
(``plan/search/steady.py``), so all ranks must have equal numbers.

For the link, all ranks gather from all at once. The bytes a second that a rank then receives
are available to it while other ranks move units too.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.plan.model import Profile
from megatron.elastic.platform.own_device import own_device
from megatron.elastic.platform.select import select
from megatron.elastic.platform.threads import OS_THREADS, Threads

__all__ = ["Hardware", "OwnerMemory", "survey"]

_GATHERED = 4 << 20
"""Bytes that a rank receives in one measurement."""
_ROUNDS = 3


@dataclass(frozen=True)
class OwnerMemory:
    """The memory of owned blocks, and how it is stepped; the same on all ranks."""

    on_device: bool = False
    """True if owned blocks lie in device memory."""
    same_bits: bool = True
    """True if every rank's device steps with the bits of the host's kernel."""


@dataclass(frozen=True)
class Hardware:
    """The minimum over all ranks of the launch, and how they share devices."""

    memory_bytes: int
    """Bytes for parameters, state and activations."""
    link_bytes_per_s: int
    """Bytes a second in and out of a rank while all others transfer as well."""
    owners: OwnerMemory = OwnerMemory()
    sharing: int = 1
    """Most ranks that share a device; 1 on CPUs."""


@dataclass(frozen=True)
class _Rank:
    """The measurements of one rank."""

    memory_bytes: int
    """Of its device as a whole."""
    link_bytes_per_s: int
    device: str
    """The device's name, which ranks that share it have in common; empty on CPU."""


def survey(fabric: Fabric, threads: Threads = OS_THREADS) -> Hardware:
    """Measure on every rank and return the minimum. Collective over ``fabric.world``."""
    found = list(gather_messages(fabric, _Rank, _own(fabric, threads)).values())
    sharing = Counter(one.device for one in found if one.device)
    return Hardware(
        min(one.memory_bytes // max(1, sharing[one.device]) for one in found),
        min(one.link_bytes_per_s for one in found),
        sharing=max(sharing.values(), default=1),
    )


def _own(fabric: Fabric, threads: Threads) -> _Rank:
    """Return what this rank measures; on CPU its memory is a share of the machine's."""
    platform = select()
    index = own_device(platform)
    memory = platform.memory(index).total
    if platform.name == "cpu":
        memory //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return _Rank(memory, _own_link(fabric, threads), platform.device_name(index))


def _own_link(fabric: Fabric, threads: Threads) -> int:
    """Return the bytes a second this rank receives, best of a few rounds; the planner's default if it is alone."""
    others = dist.get_world_size(fabric.world) - 1
    if not others:
        return Profile(()).link_bytes_per_s
    size = max(1 << 12, _GATHERED // others)
    own = torch.zeros(size, dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(fabric.slots)]
    seconds = []
    for _ in range(_ROUNDS):
        started = threads.monotonic()
        dist.all_gather(gathered, own, group=fabric.world)
        seconds.append(threads.monotonic() - started)
    return max(1, round(others * size / min(seconds)))
