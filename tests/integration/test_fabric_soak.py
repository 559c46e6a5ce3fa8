"""Random lives of a fabric: collectives, kills, stops and broken links in the middle of them, rejoins.

No hang, no wrong sum, no leak. The sequence comes from a seed, printed on failure.
``ELASTIC_SOAK_ROUNDS``, ``ELASTIC_SOAK_SEEDS`` (how many) and ``ELASTIC_SOAK_FIRST``
(the first) make it long. A stopped rank is executed after a while, as its agent
would do; a link is broken between two ranks that both live on.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import queue
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.backend import install, make_fabric
from megatron.elastic.comm.errors import CommError
from megatron.elastic.config import ElasticConfig
from tests.unit.comm.fabric_checks import addresses
from tools.bench._common import Here, Ranks

KINDS = {
    "gloo": ElasticConfig(comm="gloo"),
    "shm": ElasticConfig(comm="elastic", transport="shm"),
    "tcp": ElasticConfig(comm="elastic", transport="tcp"),
}
SIZE = 5
THREADS = 12
"""As many threads as this are a leak: the interpreter, torch and a fabric have about ten."""
ROUNDS = int(os.environ.get("ELASTIC_SOAK_ROUNDS", "8"))
FIRST = int(os.environ.get("ELASTIC_SOAK_FIRST", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("ELASTIC_SOAK_SEEDS", "1")))


def held() -> tuple[int, int, int]:
    """Descriptors, threads (of the kernel's table) and mapped segments of this process."""
    mapped = Path("/proc/self/maps").read_text().count("memfd:elastic")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mapped


def settled(seconds: float = 35.0) -> tuple[int, int, int]:
    """Return what is held once the threads are gone that connect or end groups in the background.

    They end within a group's time-out.
    """
    end = time.monotonic() + seconds
    while (now := held())[1] >= THREADS and time.monotonic() < end:
        time.sleep(0.1)
    return now


def live(here: Here, kind: str, incarnation: int) -> tuple[int, int, int]:
    """Obey the parent; what is held when the fabric is closed (descriptors, threads, segments)."""
    fabric = make_fabric(
        KINDS[kind], here.rank, SIZE, incarnation, f"soak{here.port}", b"soak", here.store, timeout=30.0
    )
    install(fabric)
    orders: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def listen() -> None:
        while True:
            order = here.ask()
            if order[0] == "freeze":
                fabric.interrupt(order[1])
            elif order[0] == "sever":
                fabric.sever(order[1], order[2])  # type: ignore[attr-defined]  # native only
            else:
                orders.put(order)
            if order[0] == "end":
                return

    threading.Thread(target=listen, daemon=True).start()
    here.tell("listening")
    while True:
        order = orders.get()
        if order[0] == "end":
            fabric.close()
            return settled()
        if order[0] == "edit":
            _, generation, living = order
            fabric.edit(generation, addresses(here, fabric, living, generation), 30.0)
            here.tell("edited")
        else:
            here.tell(work(fabric.rank, order[1], order[2], [fabric.group(role, range(SIZE)) for role in "ab"]))


def work(rank: int, seed: int, living: tuple[int, ...], groups: list[dist.ProcessGroup]) -> str:
    """A random run of collectives, each checked; the name of the error that ended it, or 'done'."""
    dice = random.Random(seed)
    try:
        for _ in range(dice.randint(1, 30)):
            tensor, wanted = collective(dice, rank, living, dice.choice([None, *groups]))
            if not bool((tensor == wanted).all()):
                return f"wrong: {tensor} is not {wanted}"
    except CommError as error:
        return type(error).__name__
    return "done"


def collective(
    dice: random.Random, rank: int, living: tuple[int, ...], group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One operation of a random kind and size: what came out and what should have."""
    count = dice.choice([1, 100, 10_000, 300_000])
    kind, root = dice.choice(["all_reduce", "broadcast", "all_gather", "reduce_scatter", "ring"]), dice.choice(living)
    own = torch.full((count,), float(rank + 1))
    seats = SIZE if group is None else len(living)
    seat = {one: one if group is None else place for place, one in enumerate(living)}
    total = float(sum(one + 1 for one in living))
    if kind == "all_reduce":
        dist.all_reduce(own, group=group)
        return own, torch.full((count,), total)
    if kind == "broadcast":
        dist.broadcast(own, src=root, group=group)
        return own, torch.full((count,), float(root + 1))
    if kind == "all_gather":
        flat = torch.zeros(seats * count)
        dist.all_gather_into_tensor(flat, own, group=group)
        wanted = torch.zeros(seats, count)
        for one in living:
            wanted[seat[one]] = one + 1
        return flat, wanted.view(-1)
    if kind == "reduce_scatter":
        parts = (own * torch.arange(1.0, seats + 1).view(-1, 1)).reshape(-1)
        part = torch.zeros(count)
        dist.reduce_scatter_tensor(part, parts, group=group)
        return part, torch.full((count,), total * (seat[rank] + 1))
    place = living.index(rank)
    after, before = living[(place + 1) % len(living)], living[place - 1]
    got = torch.zeros(count)
    if after == rank:
        return own, own
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, own, after, group=group), dist.P2POp(dist.irecv, got, before, group=group)]
    )
    for work in works:
        work.wait()
    return got, torch.full((count,), float(before + 1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_lives(kind: str, seed: int) -> None:
    if kind != "gloo" and importlib.util.find_spec("megatron.elastic.comm.native") is None:
        pytest.skip("the native core is not built")
    segments = set(Path("/dev/shm").iterdir())
    dice = random.Random(seed)
    incarnation = dict.fromkeys(range(SIZE), 0)
    at_end: list[tuple[int, int, int]] = []
    with Ranks(SIZE, lambda here: live(here, kind, 0), seconds=60 + 20 * ROUNDS) as ranks:
        living = list(range(SIZE))
        for rank in living:
            ranks.hear(rank)
        for generation in range(1, ROUNDS + 1):
            edit(ranks, living, generation)
            living = disturbed_work(ranks, living, generation, kind, dice, f"{kind}, seed {seed}")
            for rank in set(range(SIZE)) - set(living):
                if dice.random() < 0.5:
                    incarnation[rank] += 1
                    ranks.start(rank, functools.partial(live, kind=kind, incarnation=incarnation[rank]))
                    ranks.hear(rank)
                    living.append(rank)
        for rank in living:
            ranks.say(rank, ("end",))
        at_end.extend(ranks.results(living).values())
    for descriptors, threads, mapped in at_end:
        assert descriptors < 60 and threads < THREADS and mapped <= 1, f"{kind}, seed {seed}: {at_end}"
    assert not left_in_memory(segments), f"{kind}, seed {seed}: shared memory left behind"


def left_in_memory(before: set[Path], seconds: float = 30.0) -> set[Path]:
    """Segments that are new since ``before`` and stay. Those of jobs that run beside this test go when the jobs end."""
    end = time.monotonic() + seconds
    while (left := set(Path("/dev/shm").iterdir()) - before) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def disturbed_work(
    ranks: Ranks, living: list[int], generation: int, kind: str, dice: random.Random, where: str
) -> list[int]:
    """One run of collectives with what befalls the ranks in the middle of it; who lives on."""
    victims = dice.sample(living, dice.choice([0, 1, 1, 2]) if len(living) > 2 else 0)
    stopped = [rank for rank in victims if dice.random() < 0.3]
    broken = (
        dice.sample(living, 2) if kind != "gloo" and not victims and len(living) > 1 and dice.random() < 0.5 else []
    )
    run = dice.randrange(1 << 30)
    for rank in living:
        ranks.say(rank, ("work", run, tuple(sorted(living))))
    time.sleep(dice.random() * 0.1)
    for rank in victims:
        ranks.kill(rank, signal.SIGSTOP if rank in stopped else signal.SIGKILL)
    if broken:
        ranks.say(broken[0], ("sever", broken[1], dice.random() < 0.5))
    left = [rank for rank in living if rank not in victims]
    if stopped:
        time.sleep(dice.random() * 0.05)
    for rank in stopped:
        ranks.kill(rank)
    if victims or broken:
        for rank in left:
            ranks.say(rank, ("freeze", generation + 1))
    for rank in left:
        heard = ranks.hear(rank)
        allowed = {"done", "PeerLost", "GenerationChanged"} if victims or broken else {"done"}
        assert heard in allowed, f"{where}, generation {generation}, rank {rank}: {heard}"
    return left


def edit(ranks: Ranks, living: list[int], generation: int) -> None:
    for rank in living:
        ranks.say(rank, ("freeze", generation))
        ranks.say(rank, ("edit", generation, tuple(sorted(living))))
    for rank in living:
        assert ranks.hear(rank) == "edited"
