"""Collectives against gloo: time, bandwidth, and how much of the machine's copy bandwidth is used.

``python -m tools.bench.comm`` runs all-reduce, reduce-scatter and all-gather from
1 KiB to 64 MiB at 2, 4 and 8 ranks (``--full``: more sizes, to 256 MiB, and more
trials; ``--quick``: to 4 MiB), on
stock gloo (``ProcessGroupGloo`` as torch makes it) and on the native links over
shared memory and TCP, in alternating rounds so that a busy moment hits all of
them. A trial's time is that of the slowest rank. Last line: one JSON object.

"Size" is the bytes of the large side: the all-reduced tensor, the input of
reduce-scatter, the output of all-gather. Bandwidth is size / time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatron.elastic.comm.address import Address
from megatron.elastic.comm.backend import make_fabric
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.config import ConfigError, ElasticConfig
from tools.bench._common import Here, Ranks, median_of, print_result

KINDS = ("gloo", "shm", "tcp")
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
BUDGET_BYTES = 1 << 29
"""Bytes moved a measurement at most: large sizes get fewer trials."""


@dataclass(frozen=True)
class Case:
    """One operation of one kind of communicator; ``size`` in bytes."""

    ranks: int
    kind: str
    operation: str
    size: int


def copy_bandwidth(size: int = 1 << 28) -> float:
    """Bytes a second of a large copy on one thread (counted once, not read + write)."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    target.copy_(source)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return size / median_of(times).median


def connect(here: Here, kind: str) -> tuple[dist.ProcessGroup, Fabric | None]:
    """Make the world group of this ``kind``, and its fabric if it is one of ours."""
    if kind == "gloo":
        dist.init_process_group(
            "gloo", store=here.store(), rank=here.rank, world_size=here.size, timeout=timedelta(seconds=120)
        )
        return dist.group.WORLD, None  # type: ignore[return-value]
    config = ElasticConfig(transport="shm" if kind == "shm" else "tcp")
    fabric = make_fabric(config, here.rank, here.size, 0, f"bench{here.port}", b"bench", here.store, timeout=120.0)
    found = here.exchange("address", msgspec.to_builtins(fabric.address()), range(here.size))
    fabric.edit(1, {rank: Address(**value) for rank, value in found.items()}, 60.0)
    return fabric.group("bench", range(here.size)), fabric


def operation(name: str, group: dist.ProcessGroup, size: int, ranks: int) -> Callable[[], None]:
    """A closure that runs the collective once, waiting for it."""
    count = max(ranks, size // 4 // ranks * ranks)
    whole, part = torch.ones(count), torch.ones(count // ranks)
    stock: Any = group

    def act() -> None:
        if name == "all_reduce":
            stock.allreduce([whole]).wait()
        elif name == "reduce_scatter":
            stock._reduce_scatter_base(part, whole).wait()
        else:
            stock._allgather_base(whole, part).wait()

    return act


def measure(here: Here, kind: str, sizes: list[int], trials: int) -> dict[str, list[float]]:
    """Times of each trial of this rank, by "operation size"."""
    group, fabric = connect(here, kind)
    barrier = torch.zeros(1)
    times: dict[str, list[float]] = {}
    for name in OPERATIONS:
        for size in sizes:
            act = operation(name, group, size, here.size)
            act()
            found = times[f"{name} {size}"] = []
            inner = 10 if size <= 1 << 16 else 1
            for _ in range(max(3, min(trials, BUDGET_BYTES // size))):
                group.allreduce([barrier]).wait()
                began = time.perf_counter()
                for _ in range(inner):
                    act()
                found.append((time.perf_counter() - began) / inner)
    group.allreduce([barrier]).wait()
    here.tell(times)
    here.ask()
    if fabric is not None:
        fabric.close()
    else:
        dist.destroy_process_group()
    return times


def one_round(ranks: int, kind: str, sizes: list[int], trials: int) -> dict[str, list[float]]:
    """Slowest rank's time of each trial."""
    with Ranks(ranks, lambda here: measure(here, kind, sizes, trials), seconds=600) as run:
        heard = [run.hear(rank) for rank in range(ranks)]
        for rank in range(ranks):
            run.say(rank, "end")
        run.results(range(ranks))
    return {key: [max(row) for row in zip(*(one[key] for one in heard), strict=True)] for key in heard[0]}


def available(kinds: list[str]) -> list[str]:
    """Return those of ``kinds`` that are built."""
    try:
        from megatron.elastic.comm import native  # noqa: F401 - it fails where it is not built
    except (ImportError, ConfigError) as error:
        print(f"native links are not built ({error}): gloo only")
        return [kind for kind in kinds if kind == "gloo"]
    return kinds


def table(times: dict[Case, list[float]], copy: float) -> list[dict[str, Any]]:
    """Return a row a case, beside gloo and beside a plain copy of ``copy`` bytes a second."""
    rows = []
    for case, found in times.items():
        spread = median_of(found)
        rival = times.get(Case(case.ranks, "gloo", case.operation, case.size))
        rows.append(
            {
                **vars(case),
                "seconds": spread.median,
                "low": spread.low,
                "high": spread.high,
                "trials": spread.trials,
                "gb_s": case.size / spread.median / 1e9,
                "of_copy_bandwidth": case.size / spread.median / copy,
                "times_gloo": median_of(rival).median / spread.median if rival else None,
            }
        )
    return rows


def main() -> None:
    """Measure the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--trials", type=int, help="default: 7; with --full 15")
    parser.add_argument("--rounds", type=int, default=2)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="1 KiB to 4 MiB only, one round")
    extent.add_argument("--full", action="store_true", help="every size from 1 KiB to 256 MiB")
    options = parser.parse_args()
    trials = options.trials or (15 if options.full else 7)
    powers = (10, 16, 22) if options.quick else (10, 16, 20, 24, 26)
    sizes = [1 << power for power in ((10, 13, 16, 20, 22, 24, 26, 28) if options.full else powers)]
    kinds, copy = available(options.kinds.split(",")), copy_bandwidth()
    times: dict[Case, list[float]] = {}
    for ranks in map(int, options.ranks.split(",")):
        for _ in range(1 if options.quick else options.rounds):
            for kind in kinds:
                for key, found in one_round(ranks, kind, sizes, trials).items():
                    name, size = key.split()
                    times.setdefault(Case(ranks, kind, name, int(size)), []).extend(found)
    rows = table(times, copy)
    print(f"{'ranks':>5} {'links':>5} {'operation':>15} {'size':>10} {'ms':>10} {'GB/s':>8} {'x gloo':>7}")
    for row in sorted(rows, key=lambda row: (row["ranks"], row["operation"], row["size"], row["kind"])):
        ratio = f"{row['times_gloo']:.2f}" if row["times_gloo"] else "-"
        print(
            f"{row['ranks']:>5} {row['kind']:>5} {row['operation']:>15} {row['size']:>10} "
            f"{1e3 * row['seconds']:>10.3f} {row['gb_s']:>8.3f} {ratio:>7}"
        )
    print_result("comm", {"copy_gb_s": copy / 1e9, "cases": rows})


if __name__ == "__main__":
    main()
