"""Cost of watching a job: live page, metrics, event log and TensorBoard, as shares of a step.

    python -m tools.bench.watching [--ranks 4] [--pairs 3] [--steps 50]

Pairs of jobs of the quickstart's model, data parallel over all ranks, one with all of it on and one with all of it
off. On: ``--elastic-dashboard`` with a client that follows the page, its metrics scraped every second,
``--elastic-event-log``, and scalars of every step (``--tensorboard-dir``). Steps that settle are left out.

share       CPU time of each part over the CPU time of a step of a job without them, all ranks and the launcher:
            ``events``            gathering and writing events, all ranks
            ``scalars``           this project's scalars, on the rank that reports
            ``scalar_writer``     TensorBoard's thread, by this project's share of all scalars
            ``published``         the committed step for the launcher; it cannot be switched off
            ``launcher``          CPU time of the launcher a second with everything on, less that of the job with
                                  all off, over that of the cores: it is asked by the second, not by the step. The two
                                  are the same where ranks keep the cores busy and no other process takes from them
            ``total``             all of these
            ``megatron_scalars``  Megatron's own scalars, which plain Megatron writes too; not in the total
            Clocks are of CPU time of a thread, and the launcher's is that of its process. So neither waiting nor
            other processes count, and the total varies far less than the time of a step does
cpu_ratio   CPU time of a whole step with everything on over that without, pair by pair. It has also what no
            clock sees, and the noise of two jobs
step_ratio  the same of the median wall time of a step
scrape_ms   times of answers to scrapes, one after the other: while a job of two ranks trains, and while one of its
            ranks is stopped (SIGSTOP) and the other waits for it

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.elastic.launch.workers.processes import process_state
from tools.bench._common import median_of, print_result
from tools.bench._jobs import QUIET, ROOT, command
from tools.bench._watched_job import Client, WatchedJob, asked, cpu_seconds, status_of, until_shown

WORKER = str(ROOT / "tools" / "bench" / "_watching_worker.py")
SKIPPED = 8
"""Steps that settle: those of the worker."""
MODEL = QUIET + shlex.split("""
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 1 --global-batch-size 16 --calculate-per-token-loss --vocab-size 2047
    --attention-dropout 0.1 --hidden-dropout 0.1 --elastic
""")
"""The quickstart's sizes (``tools/quickstart.py``); synthetic data, so that nothing has to be prepared."""
COSTS = {"events": ("events",), "scalars": ("scalars", "scalar"), "published": ("published",)}
"""Cost of watching → clocks of a rank."""
SCRAPES = 100


@dataclass(frozen=True)
class Measured:
    """One job, over the steps that count: CPU seconds of a step, unless a line says otherwise."""

    parts: Mapping[str, float]
    """Of all ranks, by clock."""
    ranks: float
    launcher: float
    launcher_rate: float
    """CPU seconds a second."""
    wall: float
    """Median seconds of a step."""
    answers: int = 0
    answered_bytes: int = 0

    @property
    def cpu(self) -> float:
        return self.ranks + self.launcher


def run(ranks: int, steps: int, watched: bool) -> Measured:
    """One job. Raises ``RuntimeError`` with its output when it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder, flags = Path(name), list[str]()
        if watched:
            flags = ["--elastic-dashboard", "0", "--elastic-event-log", str(folder / "events")]
            flags += ["--tensorboard-dir", str(folder / "board"), "--tensorboard-log-interval", "1"]
        job = command(ranks, *MODEL, "--train-iters", str(steps), *flags, script=WORKER)
        launcher, at = list[float](), list[float]()
        client: Client | None = None
        with ExitStack() as open_now:
            running = open_now.enter_context(WatchedJob(job, WATCHING_OUT=name))
            for step in running.steps():
                if step == 1 and watched:
                    client = open_now.enter_context(Client(running.address))
                if step in (SKIPPED, steps - 1):
                    launcher.append(cpu_seconds(running.launcher.pid))
                    at.append(time.monotonic())
        reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    spent = launcher[1] - launcher[0]
    return Measured(
        parts=_parts(reports),
        ranks=sum(report["process_seconds"] for report in reports),
        launcher=spent / (steps - 1 - SKIPPED),
        launcher_rate=spent / (at[1] - at[0]),
        wall=statistics.median(seconds for report in reports for seconds in report["walls"]),
        answers=client.answers if client else 0,
        answered_bytes=client.answered_bytes if client else 0,
    )


def _parts(reports: list[dict[str, Any]]) -> dict[str, float]:
    clocks = {**COSTS, "megatron_scalars": ("megatron_scalars",)}
    found = {
        name: sum(report["cpu_seconds"].get(clock, 0.0) for report in reports for clock in mine)
        for name, mine in clocks.items()
    }
    found["scalars_a_step"] = sum(report["scalars_a_step"] for report in reports)
    return {**found, "scalar_writer": sum(report["writer_seconds"] for report in reports)}


def shares(watched: Measured, alone: Measured) -> dict[str, float]:
    """Part → its CPU time, as a share of that of a step which nobody watches."""
    costs = {name: watched.parts[name] / alone.cpu for name in (*COSTS, "scalar_writer")}
    costs["launcher"] = (watched.launcher_rate - alone.launcher_rate) / len(os.sched_getaffinity(0))
    return {**costs, "total": sum(costs.values()), "megatron_scalars": watched.parts["megatron_scalars"] / alone.cpu}


def scraped() -> dict[str, Any]:
    """Times of scrapes (ms) while a job trains and while one of its ranks is stopped.

    Raises ``RuntimeError`` if the stopped rank was not stopped all the time: the time-out is for a slow machine.
    """
    flags = ("--train-iters", "100000", "--elastic-dashboard", "0", "--elastic-detection-timeout", "20")
    with WatchedJob(command(2, *MODEL, *flags)) as running:
        for step in running.steps():
            if step >= SKIPPED:
                break
        until_shown(running.address)
        training = [asked(running.address, "/metrics")[0] * 1e3 for _ in range(SCRAPES)]
        stopped = int(status_of(running.address)["workers_here"]["1"]["pid"])
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(1.0)  # now the other rank waits for it
        waiting = [asked(running.address, "/metrics")[0] * 1e3 for _ in range(SCRAPES)]
        if process_state(stopped) != "T":
            raise RuntimeError(f"rank 1 was not stopped until the last of {SCRAPES} scrapes")
    return {"training": median_of(training), "stopped": median_of(waiting)}


def main() -> None:
    """Parse, run in turn, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    pairs = list[tuple[Measured, Measured]]()
    for number in range(options.pairs):
        order = (True, False) if number % 2 == 0 else (False, True)  # so that a trend is in no one's favour
        done = {watched: run(options.ranks, options.steps, watched) for watched in order}
        pairs.append((done[True], done[False]))
        print(shares(*pairs[-1]), file=sys.stderr, flush=True)
    found = [shares(*pair) for pair in pairs]
    names = ("with", "without")
    print_result(
        "watching",
        {
            "ranks": options.ranks,
            "steps": options.steps,
            "share": {name: median_of([one[name] for one in found]) for name in found[0]},
            "cpu_seconds": {name: median_of([pair[at].cpu for pair in pairs]) for at, name in enumerate(names)},
            "step_seconds": {name: median_of([pair[at].wall for pair in pairs]) for at, name in enumerate(names)},
            "cpu_ratio": median_of([on.cpu / off.cpu for on, off in pairs]),
            "step_ratio": median_of([on.wall / off.wall for on, off in pairs]),
            "launcher_seconds_a_second": {
                name: median_of([pair[at].launcher_rate for pair in pairs]) for at, name in enumerate(names)
            },
            "scalars_a_step": median_of([on.parts["scalars_a_step"] for on, _ in pairs]),
            "answers": sum(on.answers for on, _ in pairs),
            "bytes_an_answer": sum(on.answered_bytes for on, _ in pairs) / sum(on.answers for on, _ in pairs),
            "scrape_ms": scraped(),
        },
    )


if __name__ == "__main__":
    main()
