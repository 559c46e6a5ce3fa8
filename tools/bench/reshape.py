"""Other parallel sizes while training (``ctl reshape``), beside moving the same bytes at once and beside a restart.

    python -m tools.bench.reshape [--trials 3] [--link tcp] [--gbit 1] [--hidden 512] [--seq 32] [--batch 16]
                                  [--waiting 0.05] [--overlap both]

A trial is one real job under the launcher that begins as TP 2 x PP 2 and goes through ``SIZES``, each after quiet
steps. Then the same changes as they are made without it, by plain Megatron-LM under torchrun: the job saves a
checkpoint and ends, and one of the other sizes loads it.

With ``--gbit R`` (root, programs ip and tc) everything runs in a network namespace of its own, whose loopback passes
R Gbit/s (token bucket). With ``--waiting S`` every forward and backward of that job waits S seconds besides, as a host
does whose accelerator computes; the restarts wait for nothing but themselves. ``--overlap`` is the job's
``--elastic-overlap``: whether gradients are reduced and shipped behind the backward, as most scripts for accelerators
ask for.

Of each change, from the event log:

bytes       state that came to ranks in added copies, all ranks together, and to the busiest rank
background  seconds from the first byte to the end of the step whose vote names the new sizes, and the steps in it
stall       wait of the slowest rank in that step
longer      what the steps of the background took longer than the median of the quiet ones before them
first       what the first step of the new sizes took longer than the median of the quiet ones after it
exposed     longer and first
share       exposed, as a share of moving the bytes over an idle link (with ``--gbit`` over the one that all ranks have)

restart     seconds from the last step of the one job to the first of the other, less a step: save, end, start, load
of_restart  exposed, as a share of the restart

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path

from megatron.elastic.control.requests import ParallelSizes
from megatron.elastic.observe.events import EventRecord, read_events
from tools.bench._common import median_of, print_result
from tools.bench._jobs import ROOT, TORCHRUN, command, environment, faults, followed, waits
from tools.bench._movement import (
    Paid,
    add_options,
    begin,
    link_bandwidth,
    model_of,
    paid,
    settings_of,
)

WORLD = 4
SIZES = (ParallelSizes(2, 2, 1), ParallelSizes(1, 4, 1), ParallelSizes(4, 1, 1), ParallelSizes(2, 2, 1))
QUIET_STEPS = 8
"""Before the first change, and after each."""
SECONDS = 300.0
ENDED = "[exiting program at iteration"
"""The line that Megatron-LM prints once it has saved.

Over gloo a process may abort while the interpreter ends after that (pytorch issue 190489): no job waits for it."""
_ITERATION = re.compile(r"iteration\s+(\d+)/")


@dataclass(frozen=True)
class Change(Paid):
    """One change of sizes; what it costs without ``ctl reshape``."""

    restart: float
    of_restart: float


def flags_of(options: argparse.Namespace, sizes: ParallelSizes) -> list[str]:
    """Megatron-LM's flags for a job that trains on."""
    return [*model_of(options), *sizes_of(sizes), "--train-iters", "100000", "--ckpt-format", "torch_dist"]


def sizes_of(sizes: ParallelSizes) -> list[str]:
    """Megatron-LM's flags."""
    return [
        "--tensor-model-parallel-size", str(sizes.tensor), "--pipeline-model-parallel-size", str(sizes.pipeline)
    ]  # fmt: skip


class Training:
    """A job that trains until it is drained: its newest step, and requests to it."""

    def __init__(self, job: Sequence[str], run_id: str) -> None:
        self._run_id = run_id
        self._newest, self._ended, self._news = 0, False, threading.Condition()
        self.output: list[str] = []
        self._process = subprocess.Popen(
            job,
            cwd=ROOT,
            env=environment(PYTHONUNBUFFERED="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output.append(line)
            if found := _ITERATION.search(line):
                with self._news:
                    self._newest = int(found[1])
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def quiet_steps(self, count: int) -> None:
        """Wait until ``count`` further steps are committed. Raises ``RuntimeError`` when they are not."""
        with self._news:
            end = self._newest + count
            self._news.wait_for(lambda: self._newest >= end or self._ended, SECONDS)
            if self._newest < end:
                raise RuntimeError("the job does not go on\n" + "".join(self.output[-60:]))

    def ask(self, *words: str) -> None:
        """One request of ``ctl``, until it is carried out. Raises ``RuntimeError`` with its output when it fails."""
        request = [sys.executable, "-m", "megatron.elastic.ctl", *words, "--run-id", self._run_id]
        done = subprocess.run(
            request, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(f"ctl {' '.join(words)}: {done.stderr}" + "".join(self.output[-60:]))

    def drained(self) -> None:
        """Have it end."""
        self.ask("drain")
        self._process.wait(SECONDS)
        self._reader.join(SECONDS)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def reshaped(options: argparse.Namespace) -> list[EventRecord]:
    """Events of a job that goes through ``SIZES``."""
    with tempfile.TemporaryDirectory() as folder:
        run_id = f"bench-reshape-{os.getpid()}-{time.monotonic_ns()}"
        elastic = ["--elastic", "--elastic-transport", options.link, "--elastic-event-log", folder]
        elastic += ["--elastic-overlap", options.overlap]
        if options.waiting:
            elastic += faults(";".join(waits(options.waiting)))
        job = command(WORLD, *flags_of(options, SIZES[0]), *elastic)
        job[3:3] = ["--rdzv-id", run_id]  # an argument of the launcher
        with Training(job, run_id) as training:
            training.quiet_steps(2 + QUIET_STEPS)
            for sizes in SIZES[1:]:
                training.ask(
                    "reshape", "--tp", str(sizes.tensor), "--pp", str(sizes.pipeline), "--dp", str(sizes.data)
                )  # fmt: skip
                training.quiet_steps(2 + QUIET_STEPS)
            training.drained()
        return read_events(Path(folder))


def restarts(options: argparse.Namespace) -> list[float]:
    """Seconds without a step at each change, when plain Megatron-LM saves, ends, and begins with the next sizes."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        before: list[tuple[float, float]] = []
        for number, sizes in enumerate(SIZES, start=1):
            saves = ("--save", folder, "--save-interval", "100000", "--load", folder, "--exit-interval", "6")
            flags = (*flags_of(options, sizes), *saves, "--no-load-rng")
            job = command(WORLD, *flags, "--distributed-timeout-minutes", "3", module=TORCHRUN)
            lines = followed(job, SECONDS, ended=ENDED)
            steps = [
                (when, float(took[1]) / 1e3)
                for when, line in lines
                if (took := re.search(r"elapsed time per iteration \(ms\): (\S+)", line))
            ]
            if len(steps) != 6:
                raise RuntimeError(f"job {number} took {len(steps)} steps\n" + "".join(line for _, line in lines[-60:]))
            if before:
                found.append(steps[0][0] - before[-1][0] - statistics.median(took for _, took in steps[2:]))
            before = steps
    return found


def evaluated(records: list[EventRecord], bandwidth: float, shared: bool, restart: Sequence[float]) -> list[Change]:
    """The changes of one job. ``shared``: one link for all ranks. ``restart``: the seconds of each, without it."""
    found = []
    for end, seconds in zip(_ends(records), restart, strict=True):
        cost = paid(records, end, bandwidth, shared)
        found.append(Change(**asdict(cost), restart=seconds, of_restart=cost.exposed / seconds))
    return found


def _ends(records: list[EventRecord]) -> list[int]:
    """The steps whose votes put sizes in force. Raises ``RuntimeError`` when there are others than ``SIZES``."""
    ends = [r.fields["step"] for r in records if r.kind == "plan"]
    if len(ends) != len(SIZES) - 1:
        raise RuntimeError(f"{len(SIZES) - 1} changes of sizes were expected, not at the steps {ends}")
    return ends


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--overlap", choices=("none", "reduce", "gather", "both"), default="none")
    options = parser.parse_args()
    begin(options, "reshape")
    found: list[list[Change]] = []
    bandwidths = []
    for _ in range(options.trials):
        bandwidths.append(link_bandwidth(options.link))
        found.append(evaluated(reshaped(options), bandwidths[-1], bool(options.gbit), restarts(options)))
        for change in found[-1]:
            print(change, file=sys.stderr, flush=True)
    changes = {
        f"{before} -> {after}": {
            item.name: median_of([getattr(trial[number], item.name) for trial in found]) for item in fields(Change)
        }
        for number, (before, after) in enumerate(pairwise(SIZES))
    }
    settings = {**settings_of(options), "overlap": options.overlap}
    print_result("reshape", {**settings, "link_bytes_a_second": median_of(bandwidths), "changes": changes})


if __name__ == "__main__":
    main()
