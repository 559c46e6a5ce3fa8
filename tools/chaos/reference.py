"""The checks of a job: one history in the logs of its ranks, and the losses of a run without faults."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from megatron.elastic.observe.events import read_events
from tests.integration.elastic_job import ROOT, JobResult
from tests.integration.kill_walk import (
    DROPOUT,
    PHASES,
    RATES,
    ROUNDING,
    TWO,
    cached,
    deviations,
    training_flags,
    undisturbed,
)
from tests.scenario.scenario import Layout
from tests.standin.library import build
from tools.chaos.jobs import DEVICES, MUON, STATE, Job
from tools.history.judge import Rules

__all__ = ["Played", "check_losses", "environment_on_device", "flags_of_job", "judge", "rules_for"]

LOST_STEPS = re.compile(r'"lost_steps":([1-9]\d*)')
BF16_ROUNDING = 1e-3
"""Largest deviation of losses in bf16, where other groups add up other roundings."""


@dataclass
class Played:
    """The outcome of a job. ``why``: what was wrong with it."""

    faults: int = 0
    rules: Rules = field(default_factory=Rules)
    why: list[str] = field(default_factory=list)
    output: str = ""
    smaller: str = ""
    """The scenario in which the in-process cluster fails too."""


def rules_for(job: Job) -> Rules:
    """With Muon copies receive stepped state, whatever the flags say."""
    return Rules(exact=job.exact, state_mode={STATE[-1], MUON[-1]} & {*job.flags} != set())


def judge(events: Path, played: Played) -> None:
    """The history checker, as a program of its own; and no step was lost."""
    flags = [*(["--exact"] if played.rules.exact else []), *(["--state-mode"] if played.rules.state_mode else [])]
    command = [sys.executable, "-m", "tools.history", str(events), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        played.why.append(f"{shlex.join(command[1:])}\n{done.stdout[-3000:]}{done.stderr}")
    lost = [file.name for file in events.glob("rank*.jsonl") if LOST_STEPS.search(file.read_text(errors="replace"))]
    if lost and not played.rules.state_mode:
        played.why.append(f"a step was lost: {', '.join(lost)}")


def flags_of_job(job: Job, folder: Path) -> list[str]:
    """Return the flags of a job but those of its layout."""
    return [*DROPOUT, *RATES, *PHASES, *TWO, *cached(folder), *job.flags]


def environment_on_device(job: Job, folder: Path) -> dict[str, str]:
    """Return the environment of a job on its device, whose library is built."""
    if not job.device:
        return {}
    build()
    return DEVICES[job.device](folder / "library")


def check_losses(job: Job, folder: Path, layout: Layout, output: str, *flags: str) -> None:
    """Assert that the job committed the losses of an undisturbed run, and printed its validation losses if any."""
    result = JobResult(0, output, read_events(folder / "events"))
    further = (*flags, *PHASES[:4], *training_flags(job.flags), *cached(folder))
    device = environment_on_device(job, folder / "undisturbed")
    steps = max(result.committed)
    reference = undisturbed(folder / "undisturbed" / "events", layout, steps, *further, environment=device)
    worst = max(deviations(result, reference, bool(output)).values())
    print(f"  losses deviate by {worst:.1e}", flush=True)
    bound = 0.0 if job.exact else BF16_ROUNDING if "--bf16" in job.flags else ROUNDING
    assert worst <= bound, f"losses deviate by {worst:.1e}, allowed are {bound:.0e}"
