"""Random lives of a fabric: collectives, kills in the middle of them, rejoins; no hang, no wrong sum, no leak.

The sequence comes from a seed, printed on failure. ``ELASTIC_SOAK_ROUNDS`` and
``ELASTIC_SOAK_SEEDS`` make it long.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import queue
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm import CommError, install, make_fabric
from megatron.elastic.config import ElasticConfig
from tests.unit.comm.fabric_checks import addresses
from tools.bench._common import Here, Ranks

KINDS = {
    "gloo": ElasticConfig(comm="gloo"),
    "shm": ElasticConfig(comm="elastic", transport="shm"),
    "tcp": ElasticConfig(comm="elastic", transport="tcp"),
}
SIZE = 5
ROUNDS = int(os.environ.get("ELASTIC_SOAK_ROUNDS", "8"))
SEEDS = range(int(os.environ.get("ELASTIC_SOAK_SEEDS", "1")))


def live(here: Here, kind: str, incarnation: int) -> tuple[int, int]:
    """Obey the parent; (descriptors, threads) at the end."""
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
            return len(os.listdir("/proc/self/fd")), threading.active_count()
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
            group = dice.choice([None, *groups])
            count = dice.choice([1, 100, 10_000, 300_000])
            if dice.random() < 0.5:
                tensor = torch.full((count,), float(rank + 1))
                dist.all_reduce(tensor, group=group)
                wanted = float(sum(one + 1 for one in living))
            else:
                root = dice.choice(living)
                tensor = torch.full((count,), float(rank))
                dist.broadcast(tensor, src=root, group=group)
                wanted = float(root)
            if not bool((tensor == wanted).all()):
                return f"wrong: {tensor[0]} is not {wanted}"
    except CommError as error:
        return type(error).__name__
    return "done"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_lives(kind: str, seed: int) -> None:
    if kind != "gloo" and importlib.util.find_spec("megatron.elastic.comm.native") is None:
        pytest.skip("the native core is not built")
    segments = set(Path("/dev/shm").iterdir())
    dice = random.Random(seed)
    incarnation = dict.fromkeys(range(SIZE), 0)
    with Ranks(SIZE, lambda here: live(here, kind, 0), seconds=60 + 20 * ROUNDS) as ranks:
        living = list(range(SIZE))
        for rank in living:
            ranks.hear(rank)
        for generation in range(1, ROUNDS + 1):
            edit(ranks, living, generation)
            victims = dice.sample(living, dice.choice([0, 1, 1, 2]) if len(living) > 2 else 0)
            run = dice.randrange(1 << 30)
            for rank in living:
                ranks.say(rank, ("work", run, tuple(sorted(living))))
            time.sleep(dice.random() * 0.1)
            for rank in victims:
                ranks.kill(rank)
            living = [rank for rank in living if rank not in victims]
            if victims:
                for rank in living:
                    ranks.say(rank, ("freeze", generation + 1))
            for rank in living:
                heard = ranks.hear(rank)
                allowed = {"done", "PeerLost", "GenerationChanged"} if victims else {"done"}
                assert heard in allowed, f"seed {seed}, generation {generation}, rank {rank}: {heard}"
            for rank in set(range(SIZE)) - set(living):
                if dice.random() < 0.5:
                    incarnation[rank] += 1
                    ranks.start(rank, functools.partial(live, kind=kind, incarnation=incarnation[rank]))
                    ranks.hear(rank)
                    living.append(rank)
        for rank in living:
            ranks.say(rank, ("end",))
        for descriptors, threads in ranks.results(living).values():
            assert descriptors < 60 and threads < 12, f"seed {seed}: {descriptors} descriptors, {threads} threads"
    assert set(Path("/dev/shm").iterdir()) <= segments, f"seed {seed}: shared memory left behind"


def edit(ranks: Ranks, living: list[int], generation: int) -> None:
    for rank in living:
        ranks.say(rank, ("freeze", generation))
        ranks.say(rank, ("edit", generation, tuple(sorted(living))))
    for rank in living:
        assert ranks.hear(rank) == "edited"
