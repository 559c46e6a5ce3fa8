"""One death among N processes: how long until Megatron's groups work again.

``python -m tools.bench.edit --ranks 8,16,32,64``. In one run, on the same
processes and the same death, four ways to go on:

- ``native``   the communicator's edit in place;
- ``gloo``     ``--elastic-comm gloo``: every group rebuilt, all at once, under the same group objects;
- ``full``     stock torch, full rebuild: the default group and every group, one by one by ``new_group``;
- ``partial``  stock torch, partial rebuild: only groups the dead rank was in (the default group among them).

The groups are those Megatron's own ``parallel_state`` asks for at TP 2 × PP 2 ×
DP N/4, recorded from its calls. Phases apart: ``abort`` (interrupt → the blocked
collective has returned), ``agree`` (every rank reports its address, the lowest rank writes one record of all,
on which the others wait, as in FREEZE and DECIDE), ``edit`` (the edit proper), ``first`` (a first all-reduce over
every living rank), ``every_group`` (an all-reduce on each group).

Where ranks outnumber cores, one rank's phase would be measured with the others'
next phase running in its turn. So no rank begins a phase before all have ended
the one before (:class:`Gate`: a rank that waits there sleeps), in every way alike, the
first not before the dead process has been reaped, as its agent would, and

- a phase's time is from its first rank's begin to its last rank's end (``edit``, ...);
- ``edit_slowest`` and ``edit_middle`` are the slowest and the middle rank's own time,
  ``edit_cpu`` the most processor time of a thread in its edit;
- ``total`` is edit and first collective.

Medians over trials, each trial one more death. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist

from megatron.elastic.comm.address import Address
from megatron.elastic.comm.backend import make_fabric
from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.config import ElasticConfig
from tools.bench._common import Here, Ranks, median_of, print_result

Span = tuple[float, float]
"""Begin and end of a phase in one rank: seconds of a clock that all processes of a machine share."""
Trial = dict[str, Span | float]
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
    """Groups as a script makes them with torch alone: ``new_group`` one by one, all ranks in each call."""
    place = {rank: index for index, rank in enumerate(living)}
    made = []
    for index, (_, members) in enumerate(groups):
        left = [place[rank] for rank in members if rank in place]
        if left and (chosen is None or index in chosen):
            made.append(dist.new_group(left, timeout=timedelta(seconds=SECONDS)))
    return made


class Gate:
    """No rank passes before all have come. A rank that waits sleeps in the kernel; one write wakes all."""

    def __init__(self) -> None:
        self._come = os.eventfd(0, os.EFD_SEMAPHORE)
        # In turns: a rank at the next gate must not take the wake-up of a rank that still sleeps at this one.
        self._go = [os.eventfd(0, os.EFD_SEMAPHORE) for _ in range(2)]

    def enter(self, rank: int, living: Sequence[int]) -> None:
        go = self._go[0]
        self._go.reverse()
        if rank == living[0]:
            for _ in living[1:]:
                os.eventfd_read(self._come)
            os.eventfd_write(go, len(living) - 1)
        else:
            os.eventfd_write(self._come, 1)
            os.eventfd_read(go)


class Worker:
    """One rank of the bench: both fabrics and the stock groups, side by side."""

    def __init__(self, here: Here, groups: Groups, kinds: Sequence[str], gate: Gate) -> None:
        self.here = here
        self.gate = gate
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
        """Every member's address, from one record; no rank polls."""
        place = f"agree/{kind}/{generation}"
        self.records.set(f"{place}/{self.here.rank}", json.dumps(msgspec.to_builtins(self.fabrics[kind].address())))
        if self.here.rank == living[0]:
            reports = self.records.multi_get([f"{place}/{rank}" for rank in living])
            self.records.set(place, json.dumps([json.loads(report) for report in reports]))
        return {int(one["rank"]): Address(**one) for one in json.loads(self.records.get(place))}

    def first_edit(self, kind: str) -> None:
        fabric = self.fabrics[kind]
        fabric.edit(1, self.agree(kind, self.living, 1), SECONDS)
        self.use_groups(kind)

    def block(self) -> dict[str, threading.Thread]:
        """A collective in flight on each fabric, which the rank that is about to die does not join."""
        threads = {}
        for kind, fabric in self.fabrics.items():
            threads[kind] = threading.Thread(target=_until_error, args=(fabric.world,), daemon=True)
            threads[kind].start()
        return threads

    def phase(self, living: Sequence[int], act: Callable[[], object]) -> Span:
        self.gate.enter(self.here.rank, living)
        began = time.perf_counter()
        act()
        return began, time.perf_counter()

    def fabric_trial(self, kind: str, living: tuple[int, ...], generation: int, blocked: threading.Thread) -> Trial:
        fabric, found = self.fabrics[kind], Trial()
        members: dict[int, Address] = {}

        def abort() -> None:
            fabric.interrupt(generation)
            blocked.join()

        def edit() -> None:
            cpu = time.thread_time()
            fabric.edit(generation, members, SECONDS)
            found["edit_cpu"] = time.thread_time() - cpu

        found["abort"] = self.phase(living, abort)
        found["agree"] = self.phase(living, lambda: members.update(self.agree(kind, living, generation)))
        found["edit"] = self.phase(living, edit)
        found["first"] = self.phase(living, lambda: fabric.world.allreduce([torch.ones(1)]).wait())
        found["every_group"] = self.phase(living, lambda: self.use_groups(kind))
        return found

    def use_groups(self, kind: str) -> None:
        for role, members in self.groups:
            if self.here.rank in members:
                self.fabrics[kind].group(f"{kind} {role}", members).allreduce([torch.ones(1)]).wait()

    def stock_trial(self, kind: str, living: tuple[int, ...], generation: int) -> Trial:
        """The default group must be made anew either way: it holds the dead rank."""
        lost = set(self.living) - set(living)
        chosen = None
        if kind == "partial":
            chosen = {index for index, (_, members) in enumerate(self.groups) if lost & set(members)}
        self.stock.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # the groups of the trial before end here, not inside the measurement

        def rebuild() -> None:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"{kind}/{generation}", self.store),
                rank=living.index(self.here.rank),
                world_size=len(living),
                timeout=timedelta(seconds=SECONDS),
            )
            self.stock = stock_groups(self.groups, living, chosen)

        return {
            "edit": self.phase(living, rebuild),
            "first": self.phase(living, lambda: dist.all_reduce(torch.ones(1))),
        }


def _until_error(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(CommError):
        group.allreduce([torch.ones(1 << 14)]).wait()


def body(here: Here, groups: Groups, kinds: Sequence[str], deaths: Sequence[int], gate: Gate) -> str:
    """Run as one rank: lose peers and take them back, in every way of ``kinds``."""
    worker = Worker(here, groups, kinds, gate)
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


def times_of(heard: Sequence[Trial]) -> dict[str, float]:
    """Seconds by phase of one trial, from the times of each rank (see the module docstring)."""
    times: dict[str, float] = {}
    for phase, one in heard[0].items():
        if isinstance(one, float):
            times[phase] = max(cast(float, trial[phase]) for trial in heard)
            continue
        spans = [cast(Span, trial[phase]) for trial in heard]
        times[phase] = max(end for _, end in spans) - min(begin for begin, _ in spans)
        if phase == "edit":
            own = [end - begin for begin, end in spans]
            times["edit_slowest"], times["edit_middle"] = max(own), statistics.median(own)
    times["total"] = times["edit"] + times["first"]
    return times


def run(ranks: int, kinds: Sequence[str], trials: int) -> dict[str, dict[str, Any]]:
    """Median over trials of the seconds of each phase, by way."""
    groups, gate = megatron_groups(ranks), Gate()
    deaths = [ranks - 1 - 2 * trial for trial in range(min(trials, ranks // 2 - 1))]
    found: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    with Ranks(ranks, lambda here: body(here, groups, kinds, deaths, gate), seconds=900) as workers:
        living = list(range(ranks))
        for dead in deaths:
            for rank in living:
                workers.hear(rank)
            workers.kill(dead)
            workers.exit_code(dead)  # the kernel takes its memory apart on one of the cores: no part of any phase
            living.remove(dead)
            for rank in living:
                workers.say(rank, "go")
            heard = [workers.hear(rank) for rank in living]
            for kind in kinds:
                for phase, seconds in times_of([one[kind] for one in heard]).items():
                    found[kind].setdefault(phase, []).append(seconds)
        workers.results(living)
    return {
        "groups": {"made": len(groups), "a_rank": sum(0 in members for _, members in groups)},
        **{kind: {phase: median_of(times) for phase, times in by_phase.items()} for kind, by_phase in found.items()},
    }


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Ratio of each other way of making the groups to the native edit, all ranks each time.

    ``gloo`` connects its groups aside, so its figure is the time until every group has been used.
    """
    if "native" not in found:
        return {}
    ours = found["native"]["edit"].median
    phases = {"gloo": ("edit", "first", "every_group"), "full": ("edit",), "partial": ("edit",)}
    return {
        way: sum(found[way][phase].median for phase in parts) / ours for way, parts in phases.items() if way in found
    }


def main() -> None:
    """Measure the ways of the command line."""
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
