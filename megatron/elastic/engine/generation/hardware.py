"""What every rank can count on: the least memory and the slowest link among those of the launch.

Measured once, together, when the job is founded; whoever comes later is told. The
planner weighs with it whether moving units pays back and whether they fit
(``plan/search/steady.py``), so it must be the same number everywhere.

The link is measured by all ranks gathering from all at once: what a rank then
takes in a second is what it can count on while others move units too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.plan.model import Profile
from megatron.elastic.platform.select import select
from megatron.elastic.platform.threads import OS_THREADS, Threads

__all__ = ["Hardware", "survey"]

_GATHERED = 4 << 20
"""Bytes that a rank takes in for one measurement."""
_ROUNDS = 3


@dataclass(frozen=True)
class Hardware:
    """What the worst-off rank of the launch had."""

    memory_bytes: int
    """For parameters, state and activations."""
    link_bytes_per_s: int
    """In and out of a rank while all others transfer as well."""


def survey(fabric: Fabric, threads: Threads = OS_THREADS) -> Hardware:
    """Measure and agree. Collective over ``fabric.world``."""
    found = gather_messages(fabric, Hardware, Hardware(_own_memory(), _own_link(fabric, threads))).values()
    return Hardware(min(one.memory_bytes for one in found), min(one.link_bytes_per_s for one in found))


def _own_memory() -> int:
    """Bytes of this rank's device; on CPU its share of the machine's."""
    platform, local = select(), int(os.environ.get("LOCAL_RANK", "0"))
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if platform.name == "cpu" else 1
    return platform.memory(0 if platform.name == "cpu" else local).total // sharing


def _own_link(fabric: Fabric, threads: Threads) -> int:
    """Bytes a second this rank takes in, the best of a few rounds; the planner's assumption where it is alone."""
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
