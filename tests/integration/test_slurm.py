"""A job under Slurm, launched with the options of ``scripts/pretrain_gpt.slurm``, outlives a worker and a whole task.

A real controller and two real slurmds on the loopback address; srun starts one
launcher a node, the node numbers come from Slurm's environment.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from tests.integration.elastic_job import ROOT, RunningJob, elastic_command, environment_of
from tests.integration.ports import free_port
from tests.integration.slurm_cluster import Cluster, cluster, launchers, why_not
from tests.integration.test_leaving import QUIET, RARELY, children, iteration_saved

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is here")]


def options_of_the_script() -> list[str]:
    """The arguments that the launch script gives srun."""
    found = re.search(r"^srun (.*) \\$", (ROOT / "scripts/pretrain_gpt.slurm").read_text(), re.MULTILINE)
    assert found is not None
    options = shlex.split(found.group(1))
    assert "--no-kill" in options and "--kill-on-bad-exit=0" in options and "--wait=0" in options
    return options


def under_srun(up: Cluster, folder: Path, *flags: str) -> RunningJob:
    """Two tasks, one worker each."""
    saving = (*RARELY, "--save", str(folder / "saved"))
    plain = elastic_command(folder / "events", 1, 1, 1, 100_000, *QUIET, *saving, *flags)
    at = plain.index("--nproc-per-node")
    # Both nodes are this machine, whose name is not theirs; $SLURM_NODEID is expanded on each node, as in the script.
    where = ["--nnodes", "2", "--master-addr", "localhost", "--master-port", str(free_port())]
    launch = shlex.join([*plain[:at], *where]) + " --node-rank $SLURM_NODEID " + shlex.join(plain[at:])
    srun = ["srun", *options_of_the_script(), "--nodes", "2", "--ntasks", "2", "bash", "-c", f"exec {launch}"]
    return RunningJob(folder / "events", srun, environ=up.environment, named=False)


def test_a_worker_and_then_a_whole_task_are_lost_and_the_job_goes_on(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    with cluster(tmp_path / "slurm", environment_of()) as up, under_srun(up, tmp_path) as job:
        job.wait_for(r"iteration +2/")
        tasks = launchers(job.folder)
        assert set(tasks) == {0, 1}
        (worker,) = [pid for parent in children(tasks[1]) for pid in children(parent)]
        os.kill(worker, signal.SIGKILL)
        lost = job.wait_for(r"lost rank 1").end()
        back = job.wait_for(r"joined by 1", lost).end()
        job.wait_for(r"iteration +\d+/", back)
        os.kill(tasks[1], signal.SIGKILL)
        gone = job.wait_for(r"recovered at generation", back).end()
        again = int(job.wait_for(r"iteration +(\d+)/", gone).group(1))
        job.wait_for(rf"iteration +{again + 3}/", gone)
        assert up.run("squeue", "--noheader", "--states=RUNNING").strip(), "the step is still there"
        os.kill(tasks[0], signal.SIGTERM)
        result = job.finish()
    assert "drained at iteration" in result.output
    assert iteration_saved(tmp_path / "saved") == max(result.committed)
    assert sorted(result.committed) == list(range(1, max(result.committed) + 1)), "every step is committed"


def test_slurms_signal_reaches_every_process_and_drains_the_job_once(tmp_path: Path) -> None:
    """``--signal=TERM@180`` and ``scancel --signal`` signal launchers and workers alike."""
    (tmp_path / "slurm").mkdir()
    with cluster(tmp_path / "slurm", environment_of()) as up, under_srun(up, tmp_path) as job:
        job.wait_for(r"iteration +2/")
        number = up.run("squeue", "--noheader", "--format=%i").split()[0]
        up.run("scancel", "--signal=TERM", "--full", number)
        up.run("scancel", "--signal=TERM", number)
        end = time.monotonic() + 120
        while job.launcher.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        result = job.finish()
    assert result.code == 3, result.output[-4000:]
    assert not result.of("loss")
    assert iteration_saved(tmp_path / "saved") == max(result.committed)
