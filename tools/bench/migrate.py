"""Layers that move to other workers after a loss: what the steps pay for it, beside moving the same bytes at once.

    python -m tools.bench.migrate [--trials 3] [--link tcp] [--hidden 256] [--batch 16] [--steps 40]

Per trial five real jobs under the launcher, PP 2 x DP 2, one rank killed and not
started again: one whose layers stay where they are (the normal step after the loss),
and one for each ownership, interleaved and contiguous, moving in the background and
blocking, whose damaged pipeline is cut anew. With ``--hidden 1024 --seq 32 --batch 8
--steps 20`` some 600 MB of state are there to move. From their event logs, for the
movement with the most bytes:

bytes       state that came to ranks in added copies, all ranks together, the busiest rank
background  seconds from the first byte to the boundary at which the copies count
stall       what the slowest rank waited at that boundary
exposed     the stall, and what the steps in the background were longer than normal
share       exposed, as a share of moving the busiest rank's bytes over one link with nothing else going on
            (measured in the same run: two processes, 64 MiB, shared memory or TCP as the jobs)
of_blocking exposed in the background, as a share of the same movement's stall when everybody waits for it

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from megatron.elastic.observe.events import Record, read_events
from tools.bench._common import Here, Ranks, Spread, median_of, print_result
from tools.bench._jobs import QUIET, command, faults, finished
from tools.bench.comm import connect

WORLD, RANK, AT = 4, 3, 6
LINK_BYTES = 64 << 20
MODEL = QUIET + shlex.split("""
    --pipeline-model-parallel-size 2 --num-layers 4 --num-attention-heads 4 --micro-batch-size 1 --vocab-size 1023
""")


@dataclass(frozen=True)
class Moved:
    """One movement of one job; seconds and bytes."""

    bytes: float
    busiest_bytes: float
    background: float
    stall: float
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


def seconds_of_steps(records: list[Record], first: int, last: int) -> list[float]:
    """Durations of the steps ``first`` … ``last``, as whoever wrote them saw them."""
    return [r.fields["seconds"] for r in records if r.kind == "step" and first <= r.fields["step"] <= last]


def evaluated(records: list[Record], normal: float, bandwidth: float) -> Moved:
    """The re-cut of one job: the movement after the loss with the most bytes."""
    movements: dict[int, list[Record]] = {}
    for record in records:
        if record.kind == "movement" and record.fields["step"] >= AT:
            movements.setdefault(record.fields["step"], []).append(record)
    if not movements:
        raise RuntimeError("no layer moved")
    end, moved = max(movements.items(), key=lambda item: sum(r.fields["bytes_received"] for r in item[1]))
    received = [r.fields["bytes_received"] for r in moved]
    background, stall = (max(r.fields[name] for r in moved) for name in ("background_seconds", "stall_seconds"))
    spanned = round(background / normal)
    longer = sum(seconds - normal for seconds in seconds_of_steps(records, end - spanned + 1, end))
    exposed = stall + max(0.0, longer)
    return Moved(sum(received), max(received), background, stall, exposed, exposed / (max(received) / bandwidth))


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


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--link", choices=("shm", "tcp"), default="shm")
    for name, default in (("steps", 40), ("hidden", 256), ("seq", 64), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    variants = [(ownership, how) for ownership in ("interleaved", "contiguous") for how in ("background", "blocking")]
    found: dict[tuple[str, str], list[Moved]] = {variant: [] for variant in variants}
    bandwidths, normals = [], []
    for _ in range(options.trials):
        bandwidths.append(link_bandwidth(options.link))
        still = job(options, "--elastic-migrate-after", "-1")
        normals.append(statistics.median(seconds_of_steps(still, AT + 3, options.steps)))
        for (ownership, how), moved in found.items():
            records = job(options, "--elastic-ownership", ownership, "--elastic-migration", how)
            moved.append(evaluated(records, normals[-1], bandwidths[-1]))
            print(ownership, how, moved[-1], file=sys.stderr, flush=True)
    figures: dict[str, dict[str, Spread]] = {
        f"{ownership}_{how}": {
            item.name: median_of([getattr(each, item.name) for each in moved]) for item in fields(Moved)
        }
        for (ownership, how), moved in found.items()
    }
    of_blocking = {
        ownership: median_of([
            one.exposed / other.stall
            for one, other in zip(found[ownership, "background"], found[ownership, "blocking"], strict=True)
        ])
        for ownership in ("interleaved", "contiguous")
    }  # fmt: skip
    settings = {name: getattr(options, name) for name in ("link", "hidden", "seq", "batch", "steps")}
    measured = {"link_bytes_a_second": median_of(bandwidths), "normal_step_s": median_of(normals)}
    print_result("migrate", {**settings, **measured, **figures, "of_blocking": of_blocking})


if __name__ == "__main__":
    main()
