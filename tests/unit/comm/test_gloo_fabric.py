"""The gloo baseline loses ranks and takes them back with the same group objects.

Real processes, a real store in the parent, real SIGKILL.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.elastic.comm import (
    Address,
    CommError,
    CommTimeout,
    GenerationChanged,
    PeerLost,
    install,
)
from megatron.elastic.comm.gloo import GlooFabric
from tools.bench._common import Here, Ranks


def make(here: Here, incarnation: int = 0) -> GlooFabric:
    return GlooFabric(here.rank, here.size, incarnation, here.store(), timeout=20.0)


def swap(here: Here, fabric: GlooFabric, ranks: Sequence[int], generation: int) -> dict[int, Address]:
    """Exchange addresses of ``ranks`` through the store, as the control plane would."""
    store = here.store()
    own = fabric.address()
    store.set(f"address/{generation}/{here.rank}", repr(own))
    return {rank: eval(store.get(f"address/{generation}/{rank}").decode()) for rank in ranks}  # noqa: S307


def total(group: dist.ProcessGroup | None = None) -> float:
    value = torch.tensor([float(dist.get_rank()) + 1.0])
    dist.all_reduce(value, group=group)
    return float(value)


def survive(here: Here) -> tuple[str, float, float, list[int], bool]:
    fabric = make(here)
    install(fabric)
    fabric.edit(1, swap(here, fabric, range(4), 1), 20.0)
    world, pair = fabric.world, fabric.group("dp", (0, 1, 2, 3))
    assert total() == total(pair) == 10.0
    here.tell("ready")
    if here.rank == 2:
        time.sleep(60)
    here.ask()
    try:
        dist.all_reduce(torch.zeros(1 << 20), group=pair)
        outcome = "completed"
    except CommError as error:
        outcome = type(error).__name__
        here.tell(outcome)
        here.ask()
    fabric.interrupt(2)
    fabric.edit(2, swap(here, fabric, (0, 1, 3), 2), 20.0)
    same = fabric.world is world and fabric.group("dp", (0, 1, 2, 3)) is pair
    return outcome, total(), total(pair), dist.get_process_group_ranks(pair), same


def test_survivors_of_a_kill_are_told_and_go_on_with_the_same_groups() -> None:
    with Ranks(4, survive) as ranks:
        for rank in range(4):
            assert ranks.hear(rank) == "ready"
        for rank in (0, 1, 3):
            ranks.say(rank, "go")
        time.sleep(0.3)
        ranks.kill(2)
        for rank in (0, 1, 3):
            assert ranks.hear(rank) in ("PeerLost", "CommTimeout")
        for rank in (0, 1, 3):
            ranks.say(rank, "edit")
        for outcome, world, pair, members, same in ranks.results((0, 1, 3)).values():
            assert outcome in ("PeerLost", "CommTimeout")
            assert world == pair == 1.0 + 2.0 + 4.0
            assert members == [0, 1, 3]
            assert same


def wait_and_be_woken(here: Here) -> tuple[str, float]:
    fabric = make(here)
    install(fabric)
    fabric.edit(1, swap(here, fabric, range(2), 1), 20.0)
    total()
    if here.rank == 1:
        here.ask()
        return "idle", 0.0
    woken_at = 0.0

    def wake() -> None:
        nonlocal woken_at
        time.sleep(0.3)
        woken_at = time.monotonic()
        fabric.interrupt(2)

    threading.Thread(target=wake).start()
    try:
        total()
    except CommError as error:
        took = time.monotonic() - woken_at
        try:
            total()
        except GenerationChanged as again:
            return f"{type(error).__name__} {again.generation}", took
    return "completed", 0.0


def test_interrupt_wakes_a_wait_for_a_living_peer() -> None:
    with Ranks(2, wait_and_be_woken) as ranks:
        outcome, took = ranks.hear(0)
        ranks.say(1, "end")
        assert outcome == "GenerationChanged 2"
        assert took < 1.0
