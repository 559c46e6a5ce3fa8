"""One death among N processes: how long until Megatron's groups work again.

``python -m tools.bench.edit --ranks 8,16,32,64``. In one run, on the same
processes and the same death, four ways to go on:

- ``native``   the communicator's edit in place;
- ``gloo``     ``--elastic-comm gloo``: every group rebuilt, all at once, under the same group objects;
- ``full``     stock torch, full rebuild: the default group and every group, one by one by ``new_group``;
- ``partial``  stock torch, partial rebuild: only groups the dead rank was in (the default group among them).

The groups are those Megatron's own ``parallel_state`` asks for at TP 2 × PP 2 ×
DP N/4, recorded from its calls. Phases apart: ``abort`` (interrupt → the blocked
collective has returned), ``agree`` (everybody reports its address, the lowest
rank writes one record of all, on which the others wait: what FREEZE and DECIDE
are made of), ``edit`` (the edit proper), ``first`` (a first all-reduce over
everybody alive). A phase's time is the slowest rank's; ``edit_middle`` is the
middle rank's and ``edit_cpu`` the most processor time a rank spent in it: where
ranks outnumber the cores, the rest of the slowest rank's time is waiting for its
turn. Medians over trials, each trial one more death. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import statistics
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.comm import Address, CommError, Fabric, make_fabric
from megatron.elastic.config import ElasticConfig
from tools.bench._common import Here, Ranks, median_of, print_result

Groups = list[tuple[str, tuple[int, ...]]]
SECONDS = 120.0


def megatron_groups(ranks: int) -> Groups:
    """(description, members) of each group ``parallel_state`` makes for TP 2 × PP 2, in its order."""
    from megatron.core import parallel_state

    recorded: Groups = []
    count: dict[tuple[str, tuple[int, ...]], int] = {}

    def record(ranks: Sequence[int] | None = None, group_desc: str | None = None, **_: Any) -> Any:
        key = (group_desc or "group", tuple(ranks or range(size)))
        count[key] = count.get(key, 0) + 1
        recorded.append((f"{key[0]}#{count[key]}", key[1]))
        return None

    size = ranks
    originals = dist.new_group, dist.is_initialized, dist.get_world_size, dist.get_rank
    dist.new_group, dist.is_initialized = record, lambda: True  # type: ignore[assignment]
    dist.get_world_size, dist.get_rank = lambda group=None: size, lambda group=None: 0
    try:
        parallel_state.initialize_model_parallel(2, 2)
    finally:
        dist.new_group, dist.is_initialized, dist.get_world_size, dist.get_rank = originals
        parallel_state.destroy_model_parallel()
    return recorded


def stock_groups(groups: Groups, living: Sequence[int], chosen: set[int] | None) -> list[Any]:
    """What a script does with torch alone: ``new_group`` one by one, everybody taking part in each."""
    place = {rank: index for index, rank in enumerate(living)}
    made = []
    for index, (_, members) in enumerate(groups):
        left = [place[rank] for rank in members if rank in place]
        if left and (chosen is None or index in chosen):
            made.append(dist.new_group(left, timeout=timedelta(seconds=SECONDS)))
    return made


class Worker:
    """One rank of the bench: both fabrics and the stock groups, side by side."""

    def __init__(self, here: Here, groups: Groups, kinds: Sequence[str]) -> None:
        self.here = here
        self.groups = groups
        self.store = here.store()
        self.records = dist.TCPStore("127.0.0.1", here.port, is_master=False, timeout=timedelta(seconds=SECONDS))
        self.fabrics = {kind: self._connect(kind) for kind in kinds if kind in ("native", "gloo")}
        self.living = tuple(range(here.size))
        self.stock: list[Any] = []
        self.generation = 0

    def _connect(self, kind: str) -> Fabric:
        config = ElasticConfig(comm="gloo" if kind == "gloo" else "elastic")
        run = f"{kind}{self.here.port}"
        return make_fabric(config, self.here.rank, self.here.size, 0, run, b"bench", self.here.store, timeout=SECONDS)

    def agree(self, kind: str, living: Sequence[int], generation: int) -> dict[int, Address]:
        """Every member's address, from one record; nobody polls."""
        place = f"agree/{kind}/{generation}"
        self.records.set(f"{place}/{self.here.rank}", json.dumps(vars(self.fabrics[kind].address())))
        if self.here.rank == living[0]:
            reports = self.records.multi_get([f"{place}/{rank}" for rank in living])
            self.records.set(place, json.dumps([json.loads(report) for report in reports]))
        return {int(one["rank"]): Address(**one) for one in json.loads(self.records.get(place))}

    def first_edit(self, kind: str) -> None:
        fabric = self.fabrics[kind]
        fabric.edit(1, self.agree(kind, self.living, 1), SECONDS)
        for role, members in self.groups:
            if self.here.rank in members:
                fabric.group(f"{kind} {role}", members).allreduce([torch.ones(1)]).wait()

    def block(self) -> dict[str, threading.Thread]:
        """A collective in flight on each fabric, which the rank that is about to die does not join."""
        threads = {}
        for kind, fabric in self.fabrics.items():
            threads[kind] = threading.Thread(target=_until_error, args=(fabric.world,), daemon=True)
            threads[kind].start()
        return threads

    def fabric_trial(
        self, kind: str, living: tuple[int, ...], generation: int, blocked: threading.Thread
    ) -> dict[str, float]:
        fabric = self.fabrics[kind]
        began = time.perf_counter()
        fabric.interrupt(generation)
        blocked.join()
        aborted = time.perf_counter()
        members = self.agree(kind, living, generation)
        agreed, cpu = time.perf_counter(), time.thread_time()
        fabric.edit(generation, members, SECONDS)
        edited, cpu = time.perf_counter(), time.thread_time() - cpu
        fabric.world.allreduce([torch.ones(1)]).wait()
        first = time.perf_counter()
        for role, group in self.groups:
            if self.here.rank in group:
                fabric.group(f"{kind} {role}", group).allreduce([torch.ones(1)]).wait()
        all_used = time.perf_counter()
        return {
            "abort": aborted - began,
            "agree": agreed - aborted,
            "edit": edited - agreed,
            "edit_cpu": cpu,
            "first": first - edited,
            "every_group": all_used - first,
            "total": all_used - agreed,
        }

    def stock_trial(self, kind: str, living: tuple[int, ...], generation: int) -> dict[str, float]:
        """The default group must be made anew either way: it holds the dead rank."""
        lost = set(self.living) - set(living)
        chosen = None
        if kind == "partial":
            chosen = {index for index, (_, members) in enumerate(self.groups) if lost & set(members)}
        self.stock.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # the groups of the trial before end here, not inside the measurement
        self.store.set(f"ready/{kind}/{generation}/{self.here.rank}", "yes")
        while not self.store.check([f"ready/{kind}/{generation}/{rank}" for rank in living]):
            time.sleep(0.001)
        began = time.perf_counter()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"{kind}/{generation}", self.store),
            rank=living.index(self.here.rank),
            world_size=len(living),
            timeout=timedelta(seconds=SECONDS),
        )
        self.stock = stock_groups(self.groups, living, chosen)
        made = time.perf_counter()
        dist.all_reduce(torch.ones(1))
        first = time.perf_counter()
        return {"edit": made - began, "first": first - made, "total": first - began}


def _until_error(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(CommError):
        group.allreduce([torch.ones(1 << 14)]).wait()


def body(here: Here, groups: Groups, kinds: Sequence[str], deaths: Sequence[int]) -> str:
    worker = Worker(here, groups, kinds)
    for kind in worker.fabrics:
        worker.first_edit(kind)
    if {"full", "partial"} & set(kinds):
        worker.stock_trial("warm-up", worker.living, 1)
    for generation, dead in enumerate(deaths, start=2):
        living = tuple(rank for rank in worker.living if rank != dead)
        if here.rank == dead:
            here.tell("blocked")
            time.sleep(SECONDS)
        blocked = worker.block()
        time.sleep(0.1)
        here.tell("blocked")
        here.ask()
        trials = {}
        for kind in kinds:
            if kind in worker.fabrics:
                trials[kind] = worker.fabric_trial(kind, living, generation, blocked[kind])
            else:
                trials[kind] = worker.stock_trial(kind, living, generation)
        here.tell(trials)
        worker.living = living
    return "done"


def run(ranks: int, kinds: Sequence[str], trials: int) -> dict[str, dict[str, Any]]:
    """Median over trials of the slowest rank's seconds (``edit_middle``: the middle one's), by way and phase."""
    groups = megatron_groups(ranks)
    deaths = [ranks - 1 - 2 * trial for trial in range(trials)]
    slowest: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    with Ranks(ranks, lambda here: body(here, groups, kinds, deaths), seconds=900) as workers:
        living = list(range(ranks))
        for dead in deaths:
            for rank in living:
                workers.hear(rank)
            workers.kill(dead)
            living.remove(dead)
            for rank in living:
                workers.say(rank, "go")
            heard = [workers.hear(rank) for rank in living]
            for kind in kinds:
                for phase in heard[0][kind]:
                    slowest[kind].setdefault(phase, []).append(max(one[kind][phase] for one in heard))
                middle = statistics.median(one[kind]["edit"] for one in heard)
                slowest[kind].setdefault("edit_middle", []).append(middle)
        workers.results(living)
    return {
        "groups": {"made": len(groups), "a_rank": sum(0 in members for _, members in groups)},
        **{kind: {phase: median_of(times) for phase, times in found.items()} for kind, found in slowest.items()},
    }


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """How many times faster the native edit is than making the groups by each other way.

    ``gloo`` connects its groups aside, so its figure is the time until every group has been used.
    """
    if "native" not in found:
        return {}
    ours = found["native"]["edit"].median
    phase = {"gloo": "total", "full": "edit", "partial": "edit"}
    return {way: found[way][phase[way]].median / ours for way in phase if way in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,16,32,64")
    parser.add_argument("--ways", default="native,gloo,full,partial")
    parser.add_argument("--trials", type=int, default=3)
    options = parser.parse_args()
    ways = options.ways.split(",")
    if "native" in ways and importlib.util.find_spec("megatron.elastic.comm.native") is None:
        print("native links are not built: left out")
        ways.remove("native")
    figures = {}
    for ranks in map(int, options.ranks.split(",")):
        found = run(ranks, ways, options.trials)
        figures[str(ranks)] = {**found, "native_is_faster": ratios(found)}
        print(f"{ranks} processes, {found['groups']['a_rank']} groups a rank")
        for way in ways:
            phases = "  ".join(f"{phase} {1e3 * spread.median:8.1f} ms" for phase, spread in found[way].items())
            print(f"  {way:>8}  {phases}")
    print_result("edit", {"by_processes": figures})


if __name__ == "__main__":
    main()
