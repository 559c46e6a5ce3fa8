"""Time in which state blocks have fewer mirrors than requested after a loss, over layouts and numbers of mirrors.

    python -m tools.bench.protection [--trials 3] [--hidden 128] [--steps 12] [--comm elastic]

Each trial of a layout is a real job under the launcher, default settings, with one rank killed (SIGKILL) while it
computes; its process is started again and comes back when it can, beside or after the measured time. From the event
logs, per layout over its trials (median, low and high):

unprotected      seconds from noticing the loss to the vote that names the last missing copy, of the slowest rank: a
                 further loss before that may cost a block (``time_unprotected_s``)
steps            committed in that time, the one whose vote it is included
recovery         the part of it before work goes on
of_step          the part after the recovery, as a share of the job's median step: 1 is the step computed again
blocks           the most that were short of a mirror at one time
copied_bytes     state that came to survivors in copies made for it, all ranks together
waited           seconds that the slowest rank waited for these copies, of its shipping

``median_s``, ``worst_s``, ``median_steps`` and ``worst_steps`` are over the trials of all layouts. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

from megatron.elastic.observe.events import EventRecord, read_events
from tools.bench._common import median_of, print_result
from tools.bench._jobs import QUIET, command, faults, finished

AT = 4
"""The step in which a rank is lost."""


@dataclass(frozen=True)
class Layout:
    """Sizes of one job; ``lost`` is the rank that is killed."""

    tensor: int
    pipeline: int
    data: int
    mirrors: int
    lost: int

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return f"tp{self.tensor}pp{self.pipeline}dp{self.data}k{self.mirrors}"


LAYOUTS = (Layout(1, 1, 4, 1, 1), Layout(1, 1, 4, 2, 1), Layout(1, 2, 3, 1, 4), Layout(2, 1, 3, 2, 3))


@dataclass(frozen=True)
class Trial:
    """One loss; seconds, bytes, shares of a step."""

    unprotected: float
    steps: float
    recovery: float
    of_step: float
    blocks: float
    copied_bytes: float
    waited: float
    step: float


def model(options: argparse.Namespace) -> list[str]:
    """Flags of every job."""
    return QUIET + shlex.split(f"""
        --num-layers 4 --hidden-size {options.hidden} --num-attention-heads 4 --seq-length 128
        --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 12 --vocab-size 2047
        --train-iters {options.steps}
    """)


def run_trial(layout: Layout, options: argparse.Namespace) -> Trial:
    """One job. Raises ``RuntimeError`` with its output when it does not finish or says nothing of its mirrors."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = ("--tensor-model-parallel-size", layout.tensor, "--pipeline-model-parallel-size", layout.pipeline)
        elastic = ("--elastic", "--elastic-comm", options.comm, "--elastic-event-log", folder)
        fault = faults(f"kill:rank={layout.lost},step={AT},point=mid_forward")
        flags = (*map(str, sizes), *elastic, "--elastic-mirrors", str(layout.mirrors), *fault)
        output = finished(command(layout.ranks, *model(options), *flags))
        records = read_events(Path(folder))
    if not any(r.kind == "protection" for r in records):
        raise RuntimeError(f"nothing was said of mirrors made anew\n{output[-3000:]}")
    return evaluated(records)


def evaluated(records: list[EventRecord]) -> Trial:
    """The figures of one job's events."""
    told = [r for r in records if r.kind == "protection"]
    first = min(r.fields["step"] for r in told)
    told = [r for r in told if r.fields["step"] == first]
    generation = told[0].generation
    recoveries = [r for r in records if r.kind == "recovery" and r.generation <= generation]
    urgent = [r for r in records if r.kind == "migration" and r.fields["urgent"] and r.generation <= generation]
    step = statistics.median(r.fields["seconds"] for r in records if r.kind == "step")
    recovery = max(sum(r.fields["seconds"].values()) for r in recoveries)
    unprotected = max(r.fields["time_unprotected_s"] for r in told)
    return Trial(
        unprotected=unprotected,
        steps=max(r.fields["steps"] for r in told),
        recovery=recovery,
        of_step=max(0.0, unprotected - recovery) / step,
        blocks=max(r.fields["blocks"] for r in told),
        copied_bytes=sum(r.fields["bytes_received"] for r in urgent),
        waited=max((r.fields["seconds"].get("finish", 0.0) for r in urgent), default=0.0),
        step=step,
    )


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--comm", choices=("elastic", "gloo"), default="elastic")
    options = parser.parse_args()
    trials = dict[str, list[Trial]]()
    for layout in LAYOUTS:
        for _ in range(options.trials):
            trial = run_trial(layout, options)
            trials.setdefault(str(layout), []).append(trial)
            print(layout, trial, file=sys.stderr, flush=True)
    everything = [trial for found in trials.values() for trial in found]
    layouts = {
        name: {item.name: median_of([getattr(trial, item.name) for trial in found]) for item in fields(Trial)}
        for name, found in trials.items()
    }
    figures = {
        "median_s": statistics.median(trial.unprotected for trial in everything),
        "worst_s": max(trial.unprotected for trial in everything),
        "median_steps": statistics.median(trial.steps for trial in everything),
        "worst_steps": max(trial.steps for trial in everything),
    }
    print_result("protection", {"hidden": options.hidden, "comm": options.comm, **figures, "layouts": layouts})


if __name__ == "__main__":
    main()
