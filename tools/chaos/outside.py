"""Jobs whose workers are killed and stopped from outside, at any instant."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from tests.chaos.test_training_chaos import Havoc, Reshaping
from tests.chaos.unsteady import Unsteady
from tests.integration.elastic_job import ROOT, elastic_command, environment_of
from tests.integration.kill_walk import DRAINED, LAYOUTS, MANY, Watch
from tests.integration.launcher import start_launcher
from tests.scenario.scenario import Layout
from tools.chaos.jobs import Job
from tools.chaos.reference import Played, check_losses, environment_on_device, flags_of_job, rules_for

__all__ = ["play_outside"]

UNSAVED = 4
JOB_SECONDS = 1800.0
"""Seconds that a job of the kind ``outside`` may take for all its losses."""


def play_outside(job: Job, folder: Path, played: Played) -> None:
    """Lose as many workers as the job says, end it, and compare its losses."""
    played.rules = rules_for(job)
    name, layout = f"chaos-{job.dice}-{os.getpid()}", LAYOUTS[job.layout]
    command = _command(job, folder, "--rdzv-id", name)
    if job.full_disk:
        (folder / "saved").mkdir()
        inside = f"mount -t tmpfs -o size=1600k none {folder / 'saved'} && exec {shlex.join(command)}"
        command = ["unshare", "--mount", "sh", "-c", inside]
    watch = Watch(folder / "output.txt", folder / "events")
    machine = Unsteady(folder / "machine") if job.unsteady else None
    reshaping = Reshaping(name, job.through)
    further = {**environment_on_device(job, folder), **(machine.environment if machine else {})}
    with watch.said.open("w") as out:
        launcher = start_launcher(command, environment_of(further), out)
        try:
            dice = random.Random(job.dice)
            havoc = Havoc(launcher, watch, layout.ranks, dice, JOB_SECONDS)
            havoc.wait_until_whole()
            with reshaping.going_round() if job.through else nullcontext():
                while havoc.lost.total() < job.faults:
                    troubles = 0 if machine is None else _trouble(machine, dice)
                    before = havoc.lost.total()
                    havoc.strike()
                    played.faults += havoc.lost.total() - before + troubles
                havoc.wait_until_whole()
            if job.drains:
                _drain(name, job.dice % layout.ranks)
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(120.0)
        finally:
            if launcher.poll() is None:
                launcher.kill()
            code = launcher.wait()
            played.output = watch.said.read_text()[-6000:]
    allowed = (DRAINED, UNSAVED) if job.full_disk else (DRAINED,)
    assert code in allowed, f"exit status {code}"
    if job.through:
        done = sum("since step" in line for line in reshaping.told)
        print(f"  reshaped {done} times of {len(reshaping.told)}", flush=True)
        (folder / "told.txt").write_text("\n".join(reshaping.told))
    check_losses(job, folder, layout, watch.said.read_text(errors="replace"))


def _command(job: Job, folder: Path, *launch: str) -> list[str]:
    layout: Layout = LAYOUTS[job.layout]
    sizes = (layout.ranks, layout.tensor, layout.pipeline, MANY)
    saved = ("--save", str(folder / "saved"), *layout.flags, *layout.batch_flags)
    return elastic_command(folder / "events", *sizes, *flags_of_job(job, folder), *saved, launch=launch)


def _trouble(machine: Unsteady, dice: random.Random) -> int:
    """Let the machine's clock jump, and its disk be slow or not; return the number of these faults."""
    slow = dice.random() < 0.5
    machine.clock(dice.randint(-7200, 7200))
    machine.disk(dice.uniform(0.001, 0.02) if slow else 0.0)
    print(f"  the clock jumps, the disk is {'slow' if slow else 'quick'}", flush=True)
    return 1 + slow


def _drain(name: str, rank: int) -> None:
    command = [sys.executable, "-m", "megatron.elastic.ctl", "drain", "--ranks", str(rank), "--run-id", name]
    asked = subprocess.run(command, cwd=ROOT, env=environment_of(), capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    time.sleep(3.0)
