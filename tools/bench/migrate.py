"""Layers that move to other workers after a loss: cost for the steps, beside moving the same bytes at once.

    python -m tools.bench.migrate [--trials 3] [--link tcp] [--gbit 1] [--hidden 512] [--seq 32] [--batch 16]
                                  [--waiting 0.1]

Per trial four real jobs under the launcher, PP 2 x DP 2: each ownership, interleaved and contiguous, moving in the
background and blocking. Rank 3 is killed and not started again; its copies are made anew, then come quiet steps, then
its replica is cut anew, then quiet steps follow. A movement is compared with the steps of its own job.

With ``--gbit R`` (root, programs ip and tc) everything runs in a network namespace of
its own, whose loopback passes R Gbit/s (token bucket): links as slow as between hosts,
but one medium for all ranks. Without it TCP moves bytes about as fast as the
processors copy them, so that a transfer costs processor time.

With ``--waiting S`` every forward and every backward waits S seconds besides, as a host does whose accelerator
computes: its cores are free for transfers. Without it a transfer takes the processor from a rank that computes.

From the event logs, for the movement with which layers change place:

bytes       state that came to ranks in added copies, all ranks together, and to the busiest rank
background  seconds from the first byte to the end of the step whose vote names the new placement, the stall not among
            them, and the steps committed in it
stall       wait of the slowest rank for it in that step, and its parts: the last bytes, before shipping (finish);
            plan, modules and groups, after the vote (switch); certificate, after the gather
longer      what the steps of the background, that of the vote with them, took longer than the median of the quiet
            ones before them
first       what the first step of the new cut took longer than the median of the quiet ones after it
exposed     longer and first
share       exposed, as a share of moving the bytes over an idle link: the busiest rank's over a link of its own, with
            ``--gbit`` all ranks' over the one there is (bandwidth: the same run, two processes, 64 MiB)
step        the quiet step before, and how far one such step is from the next (median of the distances from the median)
of_blocking exposed in the background, as a share of the exposed time when all ranks wait for the same movement

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from megatron.elastic.observe.events import EventRecord, read_events
from tools.bench._common import Here, Ranks, Spread, median_of, print_result
from tools.bench._jobs import QUIET, command, faults, finished
from tools.bench.comm import connect

WORLD, RANK, AT = 4, 3, 3
PATIENCE = 8
"""Steps from the loss to the movement: two to four make copies anew, the others are quiet."""
STEPS = AT + PATIENCE + 7
"""Two or three of the last seven are those of the movement."""
LINK_BYTES = 64 << 20
INSIDE = "BENCH_BEHIND_A_SLOW_LINK"
MODEL = QUIET + shlex.split(f"""
    --pipeline-model-parallel-size 2 --num-layers 4 --num-attention-heads 4 --micro-batch-size 1 --vocab-size 1023
    --train-iters 1000 --exit-interval {STEPS}
""")


PARTS = ("finish", "switch", "certificate")


@dataclass(frozen=True)
class Moved:
    """One movement of one job; seconds and bytes."""

    bytes: float
    busiest_bytes: float
    background: float
    steps: float
    """Whose commits the background spans."""
    stall: float
    finish: float
    switch: float
    certificate: float
    longer: float
    first: float
    exposed: float
    share: float
    step: float
    scatter: float


def job(options: argparse.Namespace, *flags: str) -> list[EventRecord]:
    """Events of one job. Raises ``RuntimeError`` with its output when it does not finish."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = [
            "--hidden-size",
            str(options.hidden),
            "--seq-length",
            str(options.seq),
            "--max-position-embeddings",
            str(options.seq),
            "--global-batch-size",
            str(options.batch),
        ]
        elastic = ("--elastic", "--no-elastic-respawn", "--elastic-migrate-after", str(PATIENCE))
        links = ("--elastic-transport", options.link, "--elastic-event-log", folder)
        script = [f"kill:rank={RANK},step={AT},point=before_step", *waits(options)]
        finished(command(WORLD, *MODEL, *sizes, *elastic, *links, *faults(";".join(script)), *flags))
        return read_events(Path(folder))


def waits(options: argparse.Namespace) -> list[str]:
    """Faults by which every forward and backward waits ``--waiting`` seconds."""
    if not options.waiting:
        return []
    passes = [(point, nth + 1) for point in ("mid_forward", "mid_backward") for nth in range(options.batch)]
    return [f"delay:point={p},nth={n},count=0,seconds={options.waiting}" for p, n in passes]


def commits(records: list[EventRecord]) -> dict[int, float]:
    """Step → seconds (monotonic) at which it was committed."""
    return {r.fields["step"]: r.monotonic_ns / 1e9 for r in records if r.kind == "step"}


def migrations(records: list[EventRecord]) -> dict[int, list[EventRecord]]:
    """Step → the events of each rank about the movement that its vote ended."""
    found: dict[int, list[EventRecord]] = {}
    for record in records:
        if record.kind == "migration":
            found.setdefault(record.fields["step"], []).append(record)
    return found


def recut_at(records: list[EventRecord]) -> int:
    """The step whose vote has layers change place. Raises ``RuntimeError`` when none did."""
    plans = [record.fields for record in records if record.kind == "plan" and record.fields["step"] >= AT]
    cuts = {tuple(map(tuple, plan["stages"])): plan["step"] for plan in reversed(plans)}
    if len(cuts) != 2:
        raise RuntimeError(f"one change of pipelines was expected after the loss, there are {len(cuts) - 1}")
    return int(max(cuts.values()))


def began_at(moved: Sequence[EventRecord]) -> float:
    """When a movement began (monotonic seconds)."""
    waits = ("background_seconds", "stall_seconds")
    return min(r.monotonic_ns / 1e9 - sum(float(r.fields[name]) for name in waits) for r in moved)


def evaluated(records: list[EventRecord], bandwidth: float, shared: bool) -> Moved:
    """The re-cut of one job. ``shared``: one link for all ranks."""
    at, by_end, end = commits(records), migrations(records), recut_at(records)
    taken = {step: when - at[step - 1] for step, when in at.items() if step - 1 in at}
    moved = by_end[end]
    first = min(step for step in taken if at[step] > began_at(moved))
    settled = max((step for step in by_end if step < end), default=AT)
    before = [taken[step] for step in range(settled + 2, first)]
    after = [taken[step] for step in range(end + 2, max(taken) + 1)]
    if len(before) < 2 or len(after) < 2:
        raise RuntimeError(f"too few quiet steps around the movement: {len(before)} before, {len(after)} after")
    usual = statistics.median(before)
    longer = sum(taken[step] - usual for step in range(first, end + 1))
    last = taken[end + 1] - statistics.median(after)
    received = [r.fields["bytes_received"] for r in moved]
    finish, switch, certificate = (max(r.fields["seconds"][part] for r in moved) for part in PARTS)
    return Moved(
        bytes=sum(received),
        busiest_bytes=max(received),
        background=max(r.fields["background_seconds"] for r in moved),
        steps=end + 1 - first,
        stall=max(r.fields["stall_seconds"] for r in moved),
        finish=finish,
        switch=switch,
        certificate=certificate,
        longer=longer,
        first=last,
        exposed=longer + last,
        share=(longer + last) * bandwidth / (sum(received) if shared else max(received)),
        step=usual,
        scatter=statistics.median(abs(one - usual) for one in before),
    )


def link_bandwidth(link: str) -> float:
    """Bytes a second from one process to another over a native link (``shm`` or ``tcp``), nothing else going on."""

    def body(here: Here) -> float:
        made, fabric = connect(here, link)
        group: Any = made
        payload, together, seconds = torch.zeros(LINK_BYTES // 4), torch.zeros(1), []
        for _ in range(6):
            group.allreduce([together]).wait()
            began = time.perf_counter()
            (group.recv if here.rank else group.send)([payload], 1 - here.rank, 0).wait()
            seconds.append(time.perf_counter() - began)
        group.allreduce([together]).wait()
        assert fabric is not None
        fabric.close()
        return LINK_BYTES / statistics.median(seconds[1:])

    with Ranks(2, body, seconds=120.0) as ranks:
        return float(min(ranks.results((0, 1)).values()))


def behind_a_slow_link(options: argparse.Namespace, bench: str) -> None:
    """With ``--gbit``, begin ``bench`` again in a network namespace whose loopback passes that.

    Raises ``SystemExit`` where none can be made.
    """
    if not options.gbit or os.environ.get(INSIDE):
        return
    if options.link != "tcp" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("--gbit wants --link tcp, root, and the programs ip and tc (Debian: iproute2)")
    shape = f"tc qdisc add dev lo root tbf rate {options.gbit}gbit burst 256kb latency 50ms"
    again = shlex.join([sys.executable, "-m", f"tools.bench.{bench}", *sys.argv[1:]])
    os.environ[INSIDE] = "1"
    os.execvp("unshare", ["unshare", "--net", "sh", "-ec", f"ip link set lo up; {shape}; exec {again}"])


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--link", choices=("shm", "tcp"), default="tcp")
    parser.add_argument("--gbit", type=float, default=0.0, help="Gbit/s of all links together; 0: as fast as they go.")
    for name, default in (("hidden", 512), ("seq", 32), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--waiting", type=float, default=0.0, help="Seconds that every forward and backward waits.")
    options = parser.parse_args()
    behind_a_slow_link(options, "migrate")
    variants = [(ownership, how) for ownership in ("interleaved", "contiguous") for how in ("background", "blocking")]
    found: dict[tuple[str, str], list[Moved]] = {variant: [] for variant in variants}
    bandwidths = []
    for _ in range(options.trials):
        bandwidths.append(link_bandwidth(options.link))
        for (ownership, how), moved in found.items():
            records = job(options, "--elastic-ownership", ownership, "--elastic-migration", how)
            moved.append(evaluated(records, bandwidths[-1], bool(options.gbit)))
            print(ownership, how, moved[-1], file=sys.stderr, flush=True)
    figures: dict[str, dict[str, Spread]] = {
        f"{ownership}_{how}": {
            item.name: median_of([getattr(each, item.name) for each in moved]) for item in fields(Moved)
        }
        for (ownership, how), moved in found.items()
    }
    of_blocking = {
        ownership: median_of(
            [
                one.exposed / other.exposed
                for one, other in zip(found[ownership, "background"], found[ownership, "blocking"], strict=True)
            ]
        )
        for ownership in ("interleaved", "contiguous")
    }
    settings = {name: getattr(options, name) for name in ("link", "gbit", "hidden", "seq", "batch", "waiting")}
    measured = {"link_bytes_a_second": median_of(bandwidths)}
    print_result("migrate", {**settings, **measured, **figures, "of_blocking": of_blocking})


if __name__ == "__main__":
    main()
