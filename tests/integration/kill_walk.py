"""Many losses in one job: a list of cases, each begun when every rank is back from the one before.

A job that never ends by itself is given a script of faults ordered by the number of
losses before them (``losses=``, ``rejoin=`` of ``--elastic-inject``), is watched until the
last lost rank has come back, and is then drained. :func:`walk` checks, against an
undisturbed run of the same job:

- every fault happened, at its point, in the order of the script, and no other rank was lost;
- every lost rank came back;
- every step was committed once with its samples, and its loss is within 1e-5;
- no recovery lost a step, no checkpoint failed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.elastic.engine.inject import KILL_POINTS
from megatron.elastic.observe.events import read_events
from tests.integration.elastic_job import ROOT, JobResult, elastic_command, elastic_job, largest_deviation

__all__ = [
    "DROPOUT",
    "LAYOUTS",
    "MANY",
    "PHASES",
    "RATES",
    "TWO",
    "Case",
    "Layout",
    "cases_of",
    "compare",
    "undisturbed",
    "walk",
]

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
MANY = 4000
LEAVING_SECONDS = 20.0
RATES = ("--lr", "1e-4", "--lr-decay-iters", "400", "--lr-warmup-iters", "2")
PHASES = ("--eval-interval", "3", "--eval-iters", "2", "--save-interval", "4")
TWO = ("--elastic-mirrors", "2")
"""Where two ranks are lost at once: with one mirror they may share a block (of tied embeddings even across stages)."""
DRAINED = 3
INJECTED = r"(?<!Fault: )injected \w+: rank (\d+)"
"""A fault as it happens; a traceback that tells of it again does not count."""
NAMING = ("save_named", "save_tracked")
"""Points that only the first rank comes to while nobody is missing."""


@dataclass(frozen=True)
class Layout:
    """Sizes of a job. Ranks are numbered tensor, data, pipeline."""

    tensor: int
    pipeline: int
    data: int

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def elsewhere(self, rank: int) -> int:
        """A rank whose loss beside that of ``rank`` leaves every stage a cell, and with ``TWO`` every block a copy."""
        if self.tensor > 1:
            return rank ^ 1  # its partner in the tensor-parallel group
        return (rank + self.data) % self.ranks  # the same replica, the next stage


LAYOUTS = {
    "pp2dp2": Layout(1, 2, 2),
    "tp2dp2": Layout(2, 1, 2),
    "tp2pp2dp2": Layout(2, 2, 2),
    "pp4dp2": Layout(1, 4, 2),
}


@dataclass(frozen=True)
class Case:
    """Faults of one episode, in order: (rank, ``losses`` or ``rejoin``, losses into the episode, point)."""

    name: str
    faults: tuple[tuple[int, str, int, str], ...]
    kind: str = "kill"

    def script(self, before: int) -> list[str]:
        """The faults, ``before`` losses into the job."""
        return [f"{self.kind}:rank={r},{when}={before + n},point={point}" for r, when, n, point in self.faults]


def cases_of(layout: Layout, point: str) -> list[Case]:
    """Every rank that comes to ``point`` killed there.

    Points of recovery, admission and movement need a loss of another rank first.
    """
    cases = []
    for rank in range(1 if point in NAMING else layout.ranks):
        other = layout.elsewhere(rank)
        name = f"{point} of rank {rank}"
        if point == "in_join":
            cases.append(Case(name, ((rank, "losses", 0, "mid_backward"), (rank, "rejoin", 1, point))))
        elif point.startswith("in_movement"):
            cases.append(Case(name, ((other, "losses", 0, "before_reduce"), (rank, "rejoin", 1, point))))
        elif point.startswith("in_recovery"):
            cases.append(Case(name, ((other, "losses", 0, "before_reduce"), (rank, "losses", 0, point))))
            if point in ("in_recovery_edit", "in_recovery_promote", "in_recovery_resume"):
                late = ((other, "losses", 0, "before_reduce"), (rank, "rejoin", 1, point))
                cases.append(Case(f"{name} while another is let in", late))
        else:
            cases.append(Case(name, ((rank, "losses", 0, point),)))
    return cases


def run_walk(folder: Path, layout: Layout, cases: Sequence[Case], *flags: str, seconds: float) -> JobResult:
    """One job through all ``cases``; drained when the last lost rank is back, killed after ``seconds``."""
    script, losses = list[str](), 0
    for case in cases:
        script += case.script(losses)
        losses += len(case.faults)
    slow = "delay:missing=1,rank=0|1|2|3,count=0,seconds=0.1"  # the processor is needed for whoever comes back
    command = elastic_command(
        folder / "events", layout.ranks, layout.tensor, layout.pipeline, MANY, *DROPOUT, *RATES, *flags,
        "--elastic-allow-inject", "--elastic-inject", ";".join([slow, *script]),
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / "output.txt"
    with said.open("w") as out:
        job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        end = time.monotonic() + seconds
        try:
            while job.poll() is None and time.monotonic() < end:
                late = time.monotonic() > end - LEAVING_SECONDS  # the checks then say how far it came
                if late or _whole_again(folder, said.read_text(), losses):
                    job.send_signal(signal.SIGTERM)
                    job.wait(max(1.0, end - time.monotonic()))
                time.sleep(0.2)
        finally:
            if job.poll() is None:
                job.kill()
            job.wait()
    return JobResult(job.returncode, said.read_text(), read_events(folder / "events"))


def _whole_again(folder: Path, output: str, losses: int) -> bool:
    """Whether all faults have happened and the newest life of every rank has taken part in a step.

    Not by the log: who is to say that a rank is back may be the next to die.
    """
    killed = Counter(int(rank) for rank in re.findall(INJECTED, output))
    if killed.total() < losses:
        return False
    lives = {(record.rank, record.incarnation) for record in read_events(folder / "events") if record.kind == "phases"}
    return set(killed.items()) <= lives


def undisturbed(folder: Path, layout: Layout, steps: int, *flags: str) -> JobResult:
    """The same job without faults, ended after ``steps``."""
    result = elastic_job(
        folder, layout.ranks, layout.tensor, layout.pipeline, MANY, *DROPOUT, *RATES, *flags,
        "--exit-interval", str(steps),
    )  # fmt: skip
    assert result.code == 0, result.output[-4000:]
    return result


def check(cases: Sequence[Case], result: JobResult) -> None:
    """What can be told without the undisturbed run."""
    tail = result.output[-6000:]
    expected = [(rank, point) for case in cases for rank, _, _, point in case.faults]
    happened = [(int(r), p) for r, p in re.findall(INJECTED + r", step -?\d+, (\w+)", result.output)]
    assert happened == expected, f"happened {happened}\nexpected {expected}\n{tail}"
    assert result.code == DRAINED, tail
    lives: dict[int, int] = {}
    for rank, _ in expected:
        lives[rank] = lives.get(rank, 0) + 1
    lost = {(record.fields["lost_rank"], record.fields["lost_incarnation"]) for record in result.of("loss")}
    scripted = {(rank, life) for rank, count in lives.items() for life in range(count)}
    assert lost == scripted, f"lost {lost}, by the script {scripted}"
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    assert "could not be written" not in result.output, "a loss is no reason to do without a checkpoint"
    steps = set(result.committed)
    assert steps == set(range(1, max(steps) + 1)), f"not committed: {set(range(1, max(steps) + 1)) - steps}"
    samples = {record.fields["step"]: tuple(record.fields["samples"]) for record in result.of("step")}
    assert samples == {step: (16 * (step - 1), 16 * step) for step in samples}
    assert {point for _, point in expected} <= set(KILL_POINTS)


def compare(result: JobResult, reference: JobResult) -> float:
    """Largest relative deviation of a loss, also of validation; every sample of every step counted once."""
    steps = set(result.committed)
    ledgers = {r.fields["step"]: r.fields["ledger"] for r in result.of("step")}
    assert ledgers == {r.fields["step"]: r.fields["ledger"] for r in reference.of("step") if r.fields["step"] in steps}
    told = [int(step) for step in re.findall(r"validation loss at iteration (\d+) ", result.output)]
    assert len(told) == len(set(told)), f"evaluated twice: {told}"
    expected = {step: loss for step, loss in reference.validation.items() if step < max(steps)}
    evaluated = largest_deviation(expected, result.validation) if expected else 0.0
    trained = largest_deviation({s: v for s, v in reference.committed.items() if s in steps}, result.committed)
    return max(evaluated, trained)


def walk(folder: Path, layout: Layout, cases: Sequence[Case], *flags: str, seconds: float = 170.0) -> float:
    """Run, check and compare; returns the largest relative deviation."""
    result = run_walk(folder, layout, cases, *flags, seconds=seconds)
    check(cases, result)
    reference = undisturbed(folder / "undisturbed", layout, max(result.committed), *flags)
    deviation = compare(result, reference)
    assert deviation < 1e-5, f"losses deviate by {deviation}"
    return deviation
