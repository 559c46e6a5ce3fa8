"""Layers that move to other workers after a loss: what the steps pay for it, beside moving the same bytes at once.

    python -m tools.bench.migrate [--trials 3] [--link tcp] [--gbit 1] [--hidden 256] [--batch 16] [--steps 24]

Per trial five real jobs under the launcher, PP 2 x DP 2, one rank killed and not
started again: one whose layers stay where they are (the normal step after the loss),
and one for each ownership, interleaved and contiguous, moving in the background and
blocking, whose damaged pipeline is cut anew.

With ``--gbit R`` (root, programs ip and tc) everything runs in a network namespace of
its own, whose loopback passes R Gbit/s (token bucket): links as slow as between hosts,
but one medium for all ranks. Without it TCP moves bytes about as fast as the
processors copy them, so that what moves is paid for in processor time.

From the event logs, for the movement with the most bytes:

bytes       state that came to ranks in added copies, all ranks together, and to the busiest rank
background  seconds from the first byte to the boundary at which the copies count
stall       what the slowest rank waited at that boundary, and its parts: the last steps' gradients (finish); plan,
            modules and groups (stand); parameters; certificate
exposed     from the commit before the movement begins to that of the first step after the switch, less what as
            many steps take otherwise: decision, background, stall and the new cut's first step, all of it
share       exposed, as a share of moving the bytes over an idle link: the busiest rank's over a link of its own, with
            ``--gbit`` all ranks' over the one there is (bandwidth: the same run, two processes, 64 MiB)
of_blocking exposed in the background, as a share of what is exposed when everybody waits for the same movement

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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron.elastic.observe.events import Record, read_events
from tools.bench._common import Here, Ranks, Spread, median_of, print_result
from tools.bench._jobs import QUIET, command, faults, finished
from tools.bench.comm import connect

WORLD, RANK, AT = 4, 3, 6
LINK_BYTES = 64 << 20
INSIDE = "BENCH_BEHIND_A_SLOW_LINK"
MODEL = QUIET + shlex.split("""
    --pipeline-model-parallel-size 2 --num-layers 4 --num-attention-heads 4 --micro-batch-size 1 --vocab-size 1023
""")


PARTS = ("finish", "stand", "parameters", "certificate")


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
    stand: float
    parameters: float
    certificate: float
    exposed: float
    share: float


def job(options: argparse.Namespace, *flags: str) -> list[Record]:
    """Events of one job. Raises ``RuntimeError`` with its output when it does not finish."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = [
            "--hidden-size", str(options.hidden), "--seq-length", str(options.seq), "--max-position-embeddings",
            str(options.seq), "--global-batch-size", str(options.batch), "--train-iters", str(options.steps),
        ]  # fmt: skip
        elastic = ("--elastic", "--no-elastic-respawn", "--elastic-transport", options.link)
        fault = faults(f"kill:rank={RANK},step={AT},point=before_step")
        finished(command(WORLD, *MODEL, *sizes, *elastic, "--elastic-event-log", folder, *fault, *flags))
        return read_events(Path(folder))


def commits(records: list[Record]) -> dict[int, float]:
    """Step → seconds (monotonic) at which it was committed."""
    return {r.fields["step"]: r.monotonic_ns / 1e9 for r in records if r.kind == "step"}


def usual_step(at: dict[int, float], first: int, last: int) -> float:
    """Median seconds from commit to commit of the steps ``first`` … ``last``."""
    return statistics.median(at[step] - at[step - 1] for step in range(first, last + 1))


def evaluated(records: list[Record], normal: float, bandwidth: float, shared: bool) -> Moved:
    """The re-cut of one job: the movement after the loss with the most bytes. ``shared``: one link for all ranks."""
    movements: dict[int, list[Record]] = {}
    for record in records:
        if record.kind == "movement" and record.fields["step"] >= AT:
            movements.setdefault(record.fields["step"], []).append(record)
    if not movements:
        raise RuntimeError("no layer moved")
    end, moved = max(movements.items(), key=lambda item: sum(r.fields["bytes_received"] for r in item[1]))
    received = [r.fields["bytes_received"] for r in moved]
    background, stall = (max(r.fields[name] for r in moved) for name in ("background_seconds", "stall_seconds"))
    at = commits(records)
    began = min(r.monotonic_ns / 1e9 - r.fields["background_seconds"] - r.fields["stall_seconds"] for r in moved)
    before = max(step for step, when in at.items() if when <= began)
    after = usual_step(at, end + 2, max(at))
    exposed = at[end + 1] - at[before] - (end - before) * normal - after
    moving = (sum(received) if shared else max(received)) / bandwidth
    finish, stand, parameters, certificate = (max(r.fields["seconds"][part] for r in moved) for part in PARTS)
    return Moved(
        sum(received), max(received), background, end - before, stall, finish, stand, parameters, certificate,
        exposed, max(0.0, exposed) / moving,
    )  # fmt: skip


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


def behind_a_slow_link(options: argparse.Namespace) -> NoReturn:
    """Begin again in a network namespace whose loopback passes ``--gbit``. Raises ``SystemExit`` where none can be."""
    if options.link != "tcp" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("--gbit wants --link tcp, root, and the programs ip and tc (Debian: iproute2)")
    shape = f"tc qdisc add dev lo root tbf rate {options.gbit}gbit burst 256kb latency 50ms"
    again = shlex.join([sys.executable, "-m", "tools.bench.migrate", *sys.argv[1:]])
    os.environ[INSIDE] = "1"
    os.execvp("unshare", ["unshare", "--net", "sh", "-ec", f"ip link set lo up; {shape}; exec {again}"])


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--link", choices=("shm", "tcp"), default="tcp")
    parser.add_argument("--gbit", type=float, default=0.0, help="Gbit/s of all links together; 0: as fast as they go.")
    for name, default in (("steps", 24), ("hidden", 256), ("seq", 64), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.gbit and not os.environ.get(INSIDE):
        behind_a_slow_link(options)
    variants = [(ownership, how) for ownership in ("interleaved", "contiguous") for how in ("background", "blocking")]
    found: dict[tuple[str, str], list[Moved]] = {variant: [] for variant in variants}
    bandwidths, normals = [], []
    for _ in range(options.trials):
        bandwidths.append(link_bandwidth(options.link))
        still = job(options, "--elastic-migrate-after", "-1")
        normals.append(usual_step(commits(still), AT + 3, options.steps))
        for (ownership, how), moved in found.items():
            records = job(options, "--elastic-ownership", ownership, "--elastic-migration", how)
            moved.append(evaluated(records, normals[-1], bandwidths[-1], bool(options.gbit)))
            print(ownership, how, moved[-1], file=sys.stderr, flush=True)
    figures: dict[str, dict[str, Spread]] = {
        f"{ownership}_{how}": {
            item.name: median_of([getattr(each, item.name) for each in moved]) for item in fields(Moved)
        }
        for (ownership, how), moved in found.items()
    }
    of_blocking = {
        ownership: median_of([
            one.exposed / other.exposed
            for one, other in zip(found[ownership, "background"], found[ownership, "blocking"], strict=True)
        ])
        for ownership in ("interleaved", "contiguous")
    }  # fmt: skip
    settings = {name: getattr(options, name) for name in ("link", "gbit", "hidden", "seq", "batch", "steps")}
    measured = {"link_bytes_a_second": median_of(bandwidths), "normal_step_s": median_of(normals)}
    print_result("migrate", {**settings, **measured, **figures, "of_blocking": of_blocking})


if __name__ == "__main__":
    main()
