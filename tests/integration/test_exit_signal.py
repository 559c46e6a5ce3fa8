"""Megatron's ``--exit-signal``: a scheduler's early warning drains the job, whichever process gets it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron.elastic.control.exits import ExitCode
from tests.integration.elastic_job import RunningJob, elastic_command

FLAGS = ("--exit-signal-handler", "--exit-signal", "SIGUSR1", "--num-workers", "1")


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
    saved = tmp_path / "saved"
    command = elastic_command(
        tmp_path / "events", 2, 1, 1, 4000, *FLAGS, "--save", str(saved), "--save-interval", "9999"
    )
    with RunningJob(tmp_path / "events", command) as job:
        job.wait_for("iteration +3/")
        for pid in told(job.launcher.pid):
            os.kill(pid, signal.SIGUSR1)
        result = job.finish()
    assert result.code == ExitCode.DRAINED, result.output[-4000:]
    assert not result.of("loss")
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(max(result.committed))
