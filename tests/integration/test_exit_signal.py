"""A scheduler's early warning drains the job, whichever process gets it: Megatron's ``--exit-signal`` or torchrun's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron.elastic.control.exits import ExitCode
from tests.integration.elastic_job import RunningJob, elastic_command

LOADERS = ("--num-workers", "1")
FLAGS = ("--exit-signal-handler", "--exit-signal", "SIGUSR1", *LOADERS)


def ranks_of(launcher: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(launcher).children(recursive=True) if one.name().startswith("rank")]


def launcher_alone(launcher: int) -> list[int]:
    return [launcher]


def one_rank(launcher: int) -> list[int]:
    return [min(ranks_of(launcher), key=lambda one: one.name()).pid]


def all_processes(launcher: int) -> list[int]:
    """As Slurm's ``--signal`` does."""
    return [launcher, *(one.pid for one in psutil.Process(launcher).children(recursive=True))]


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(launcher_alone, marks=pytest.mark.slow),
        pytest.param(one_rank, marks=pytest.mark.slow),
        all_processes,
    ],
)
def test_the_signal_saves_and_ends_the_job(told: Callable[[int], list[int]], tmp_path: Path) -> None:
    drained_by(signal.SIGUSR1, told, tmp_path, *FLAGS)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGQUIT, marks=pytest.mark.slow)])
def test_what_the_launcher_handles_ends_no_worker_of_a_job_that_gets_it_as_a_whole(
    number: signal.Signals, tmp_path: Path
) -> None:
    drained_by(number, all_processes, tmp_path, *LOADERS)


def test_a_signal_to_all_processes_of_a_job_that_starts_ends_it_as_a_drained_one(tmp_path: Path) -> None:
    with job_of(tmp_path, *LOADERS) as job:
        while len(ranks_of(job.launcher.pid)) < 2:
            time.sleep(0.01)
        for pid in all_processes(job.launcher.pid):
            os.kill(pid, signal.SIGINT)
        result = job.finish()
    assert result.code == ExitCode.DRAINED, result.output[-4000:]
    assert not result.of("loss") and "Traceback" not in result.output


def job_of(folder: Path, *flags: str) -> RunningJob:
    saved = "--save", str(folder / "saved"), "--save-interval", "9999"
    return RunningJob(folder / "events", elastic_command(folder / "events", 2, 1, 1, 4000, *flags, *saved))


def drained_by(number: signal.Signals, told: Callable[[int], list[int]], folder: Path, *flags: str) -> None:
    with job_of(folder, *flags) as job:
        job.wait_for("iteration +3/")
        for pid in told(job.launcher.pid):
            os.kill(pid, number)
        result = job.finish()
    assert result.code == ExitCode.DRAINED, result.output[-4000:]
    assert not result.of("loss")
    assert (folder / "saved" / "latest_checkpointed_iteration.txt").read_text() == str(max(result.committed))
