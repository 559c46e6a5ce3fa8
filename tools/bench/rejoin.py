"""Rejoin of a lost rank: time from ready to taking part, and the wait of the other ranks.

    python -m tools.bench.rejoin [--trials 3] [--ranks 4] [--batch 16] [--comm elastic] [--waiting 0.05]

Each trial is a real job under the launcher, data parallel, default settings, with one
rank killed (SIGKILL). Its process is started again, runs the script from the top, and
is admitted at a step boundary. With ``--waiting S`` every forward and every backward waits S seconds besides, as
a host does whose accelerator computes. From the event logs, per trial:

admission      from "ready" (model built, waiting) until the generation that admits it is settled: it takes part
boundary       the part of it until the members get to the boundary where they let it in: the rest of the step under
               way (of the next one, if that had been voted on already), in which they train on
joining        the rest of it: the runtime's own time
stall          time of the slowest member in that generation, from asking for it on, as a share of the median step:
               where ranks share cores, with its wait for a turn while others train again
stall_mean     the same of all members on average
longer         by how much the step that begins with it took longer, admission and a newcomer's first pass through the
               model included, as a share of the median of later steps
switch         wait of the slowest rank where its state copies began to count, as a share of a step
background     seconds in which those copies were made while steps went on
links_opened   links that the members opened in that generation; links_ahead, those that stood already

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

from megatron.elastic.observe.events import EventRecord, read_events
from tools.bench._common import median_of, print_result
from tools.bench._jobs import QUIET, command, faults, finished, waits

MODEL = QUIET + shlex.split("""
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 1 --vocab-size 2047
""")

_SETTLED = 8
"""Steps after an admission that do not count as usual steps: copies are made beside them."""


@dataclass(frozen=True)
class Trial:
    """Seconds, and shares of a step; counts of links over all members."""

    admission: float
    boundary: float
    boundary_of_step: float
    joining: float
    stall: float
    stall_of_step: float
    stall_mean_of_step: float
    longer_of_step: float
    switch: float
    switch_of_step: float
    background: float
    step: float
    links_opened: int
    links_ahead: int


def run_trial(options: argparse.Namespace) -> Trial:
    """One job. Raises ``RuntimeError`` with its output when it does not finish or no rank came back."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = ("--global-batch-size", str(options.batch), "--train-iters", str(options.steps))
        elastic = ("--elastic", "--elastic-comm", options.comm, "--elastic-event-log", folder)
        fault = faults(";".join(["kill:rank=1,step=4,point=mid_forward", *waits(options.waiting)]))
        output = finished(command(options.ranks, *MODEL, *sizes, *elastic, *fault))
        records = read_events(Path(folder))
        joined = [r for r in records if r.kind == "generation" and r.fields["joined"]]
        moved = [r for r in records if r.kind == "migration" and joined and r.generation == joined[0].generation]
        if not moved:
            raise RuntimeError(f"the rank that was killed did not come back in time\n{output[-3000:]}")
    return evaluated(records, joined, moved)


def evaluated(records: list[EventRecord], joined: list[EventRecord], moved: list[EventRecord]) -> Trial:
    """The figures of one job's events: ``joined`` are those of the generation, ``moved`` of the movement after it."""
    steps = statistics.median(r.fields["seconds"] for r in records if r.kind == "step")
    ready = next(r for r in records if r.kind == "ready")
    recoveries = [r for r in records if r.kind == "recovery" and r.generation == joined[0].generation]
    stalls = [sum(r.fields["seconds"].values()) for r in recoveries]
    stall = max(stalls)
    switch = max(r.fields["stall_seconds"] for r in moved)
    admission = (max(r.monotonic_ns for r in recoveries) - ready.monotonic_ns) / 1e9
    boundary = max(0.0, admission - stall)
    return Trial(
        admission=admission,
        boundary=boundary,
        boundary_of_step=boundary / steps,
        joining=admission - boundary,
        stall=stall,
        stall_of_step=stall / steps,
        stall_mean_of_step=statistics.mean(stalls) / steps,
        longer_of_step=_longer(records, max(r.monotonic_ns for r in recoveries), joined[0].fields["joined"]),
        switch=switch,
        switch_of_step=switch / steps,
        background=max(r.fields["background_seconds"] for r in moved),
        step=steps,
        links_opened=sum(r.fields["links_opened"] for r in recoveries),
        links_ahead=sum(r.fields["links_ahead"] for r in recoveries),
    )


def _longer(records: list[EventRecord], admitted_ns: int, returned: list[int]) -> float:
    """Members' steps, commit to commit: the first that ends after ``admitted_ns``, beside the median of later ones."""
    commits = dict[int, list[int]]()
    for record in records:
        if record.kind == "step" and record.rank not in returned:
            commits.setdefault(record.rank, []).append(record.monotonic_ns)
    shares = []
    for times in commits.values():
        first = next(number for number, time in enumerate(times) if time > admitted_ns)
        later = [end - begin for begin, end in pairwise(times[first + _SETTLED :])]
        shares.append((times[first] - times[first - 1]) / statistics.median(later) - 1)
    return statistics.median(shares)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, 128 tokens each")
    parser.add_argument("--comm", choices=("elastic", "gloo"), default="elastic")
    parser.add_argument("--waiting", type=float, default=0.0, help="seconds that every forward and backward waits")
    options = parser.parse_args()
    trials = []
    for _ in range(options.trials):
        trials.append(run_trial(options))
        print(trials[-1], file=sys.stderr, flush=True)
    figures = {item.name: median_of([getattr(trial, item.name) for trial in trials]) for item in fields(Trial)}
    settings = {name: getattr(options, name) for name in ("ranks", "batch", "comm", "waiting")}
    print_result("rejoin", {**settings, **figures})


if __name__ == "__main__":
    main()
