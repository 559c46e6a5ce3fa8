"""Spares and further nodes, in real jobs: a lost rank's place is taken at once, more workers make the job wider.

Real SIGKILLs of real processes, each only when a spare is ready (as the launcher says), dropout 0.1,
compared step by step with an undisturbed run of the launch's ranks.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.elastic.control import env
from megatron.elastic.control.answers import JobStatus
from megatron.elastic.control.requests import Status
from megatron.elastic.ctl import ask
from megatron.elastic.observe.events import read_events
from tests.integration.elastic_job import (
    ROOT,
    JobResult,
    RunningJob,
    elastic_command,
    elastic_job,
    environment_of,
    largest_deviation,
)

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
RATES = ("--lr", "1e-4", "--lr-decay-iters", "400", "--lr-warmup-iters", "2")
SLOW = ("--elastic-allow-inject", "--elastic-inject", "delay:count=0,seconds=0.1")
"""The processor is needed for whoever starts."""
MANY, DRAINED, SECONDS = 4000, 3, 200.0


def status(job: RunningJob) -> JobStatus:
    return ask(job.run_id, 0, Status())


def until(job: RunningJob, holds: Callable[[JobStatus], bool]) -> JobStatus:
    """The launcher's answer once ``holds`` of it is true; fails when the job ends or time is up first."""
    end = time.monotonic() + SECONDS / 2
    while time.monotonic() < end:
        assert job.launcher.poll() is None, job.output[-4000:]
        said = status(job)
        if holds(said):
            return said
        time.sleep(0.1)
    raise AssertionError(f"not so in time: {said}\n{job.output[-4000:]}")


def waiting(*ranks: int) -> Callable[[JobStatus], bool]:
    return lambda said: all(said.ranks[rank].standing == "waiting" for rank in ranks)


def kill(job: RunningJob, rank: int) -> None:
    os.kill(status(job).workers_here[rank].pid, signal.SIGKILL)


def begun(job: RunningJob, step: int = 3) -> None:
    job.wait_for(rf"iteration +{step}/")


def copies_are_back(job: RunningJob, folder: Path) -> None:
    """Wait until the copies that the newest loss took were made anew and a vote has confirmed them."""
    while not any(record.kind == "migration" for record in read_events(folder)):
        begun(job, 1 + newest(job))
    begun(job, 3 + newest(job))


def newest(job: RunningJob) -> int:
    return max(map(int, re.findall(r"iteration +(\d+)/", job.output)))


def drained(job: RunningJob) -> JobResult:
    job.launcher.send_signal(signal.SIGTERM)
    result = job.finish()
    assert result.code == DRAINED, result.output[-6000:]
    return result


def checked(result: JobResult, folder: Path, world: int, tensor: int, pipeline: int) -> None:
    """Every step committed once, none lost, losses those of a run of the launch's ranks without a loss."""
    last = max(result.committed)
    assert set(result.committed) == set(range(1, last + 1))
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    reference = elastic_job(folder, world, tensor, pipeline, min(last, 60), *DROPOUT, *RATES, seconds=SECONDS)
    assert reference.code == 0, reference.output[-4000:]
    assert largest_deviation(reference.committed, result.committed) < 1e-5


def generations(result: JobResult) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(lost, joined) of each generation after the first, in order."""
    found = {r.fields["number"]: (tuple(r.fields["lost"]), tuple(r.fields["joined"])) for r in result.of("generation")}
    return [change for number, change in sorted(found.items()) if number > 1]


@pytest.mark.slow
def test_a_spare_takes_a_lost_place_at_once_and_the_lost_rank_is_the_next_spare(tmp_path: Path) -> None:
    command = elastic_command(tmp_path / "spared", 3, 1, 1, MANY, *DROPOUT, *RATES, *SLOW, "--elastic-spares", "1")
    with RunningJob(tmp_path / "spared", command, SECONDS) as job:
        begun(job)
        until(job, waiting(2))
        kill(job, 1)
        job.wait_for("joined by 2")
        until(job, waiting(1))
        copies_are_back(job, tmp_path / "spared")
        kill(job, 0)
        job.wait_for("joined by 1")
        begun(job, 3 + newest(job))
        result = drained(job)
    assert generations(result) == [((1,), (2,)), ((0,), (1,))], "one generation each: the spare came with the loss"
    checked(result, tmp_path / "undisturbed", 2, 1, 1)


@pytest.mark.slow
def test_state_that_is_lost_ends_the_job_also_for_the_spare_that_came_in_its_place(tmp_path: Path) -> None:
    """Without mirrors a loss takes state along; the spare let in with it cannot know, and must not wait for ever."""
    command = elastic_command(
        tmp_path / "spared", 3, 1, 1, MANY, *DROPOUT, *RATES, *SLOW, "--elastic-spares", "1", "--elastic-mirrors", "0"
    )
    with RunningJob(tmp_path / "spared", command, SECONDS) as job:
        begun(job)
        until(job, waiting(2))
        kill(job, 1)
        result = job.finish()
    assert result.code == 4, result.output[-4000:]
    assert "have no surviving copy" in result.output.splitlines()[-1], result.output[-4000:]


@pytest.mark.slow
def test_with_a_checkpoint_all_begin_again_from_it_the_spare_among_them(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    command = elastic_command(
        tmp_path / "spared",
        3,
        1,
        1,
        MANY,
        *DROPOUT,
        *RATES,
        *SLOW,
        "--elastic-spares",
        "1",
        "--elastic-mirrors",
        "0",
        "--save",
        saved,
        "--load",
        saved,
        "--save-interval",
        "4",
    )
    with RunningJob(tmp_path / "spared", command, SECONDS) as job:
        begun(job, 6)
        until(job, waiting(2))
        kill(job, 1)
        job.wait_for("goes back to its last checkpoint, of step")
        reached = newest(job)
        begun(job, reached + 2)
        until(job, waiting(2))
        result = drained(job)
    assert "Traceback" not in result.output, result.output[-6000:]
    losses = elastic_job(tmp_path / "whole", 2, 1, 1, reached + 2, *DROPOUT, *RATES).committed
    assert largest_deviation(losses, {step: result.committed[step] for step in losses}) < 1e-5


@pytest.mark.slow
def test_spares_take_over_a_stage_that_had_no_other_tensor_parallel_group(tmp_path: Path) -> None:
    command = elastic_command(tmp_path / "spared", 6, 2, 2, MANY, *DROPOUT, *RATES, *SLOW, "--elastic-spares", "2")
    with RunningJob(tmp_path / "spared", command, SECONDS) as job:
        begun(job)
        until(job, waiting(4, 5))
        kill(job, 3)
        job.wait_for("joined by 4, 5")
        begun(job, 3 + newest(job))
        result = drained(job)
    assert generations(result)[0] == ((3,), (4, 5))
    checked(result, tmp_path / "undisturbed", 4, 2, 2)


@pytest.mark.slow
def test_a_spare_lost_on_its_way_in_is_one_more_loss(tmp_path: Path) -> None:
    script = f"{SLOW[-1]};kill:rank=2,point=in_join"
    command = elastic_command(
        tmp_path / "spared", 3, 1, 1, MANY, *DROPOUT, *RATES, *SLOW[:-1], script, "--elastic-spares", "1"
    )
    with RunningJob(tmp_path / "spared", command, SECONDS) as job:
        begun(job)
        until(job, waiting(2))
        kill(job, 1)
        job.wait_for(r"without .*rank 2 \(no part of a pipeline\)")
        until(job, lambda said: len(said.members) == 2)
        begun(job, 3 + newest(job))
        result = drained(job)
    assert generations(result)[0] == ((1, 2), ()), "neither was there when work went on"
    checked(result, tmp_path / "undisturbed", 2, 1, 1)


@pytest.mark.slow
def test_a_spare_that_is_asked_to_makes_the_job_wider(tmp_path: Path) -> None:
    command = elastic_command(tmp_path / "wider", 2, 1, 1, MANY, *DROPOUT, *RATES, *SLOW, "--elastic-spares", "1")
    with RunningJob(tmp_path / "wider", command, SECONDS) as job:
        begun(job)
        until(job, waiting(1))
        assert job.ctl("admit", "--ranks", "1").returncode == 0
        job.wait_for("joined by 1")
        job.wait_for("layers \\(embedding and head count\\) move to other ranks")
        begun(job, 10 + newest(job))
        result = drained(job)
    assert generations(result) == [((), (1,))]
    assert result.of("plan")[-1].fields["rows"] == {"0": 8, "1": 8}
    checked(result, tmp_path / "undisturbed", 1, 1, 1)


@pytest.mark.slow
def test_a_further_node_makes_the_job_wider_and_its_loss_narrower_again(tmp_path: Path) -> None:
    common = elastic_command(tmp_path / "grown", 2, 1, 1, MANY, *DROPOUT, *RATES, *SLOW)
    at = common.index("--nproc-per-node")
    port = str(20000 + os.getpid() % 20000)
    where = ["--nnodes", "1:2", "--master-port", port, "--node-rank"]
    # On one machine: told apart, or the copies of a block could both be on the node that is lost.
    domains = [environment_of({env.DOMAIN: node}) for node in ("first", "second")]
    with RunningJob(tmp_path / "grown", [*common[:at], *where, "0", *common[at:]], SECONDS, domains[0]) as job:
        begun(job)
        further = [*common[:at], "--rdzv-id", job.run_id, *where, "1", *common[at:]]
        more = subprocess.Popen(further, cwd=ROOT, env=domains[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(job, lambda said: said.members == (0, 1, 2, 3))
            job.wait_for("layers \\(embedding and head count\\) move to other ranks")
            begun(job, 20 + newest(job))
        finally:
            more.kill()
            more.wait()
        until(job, lambda said: said.members == (0, 1))
        begun(job, 3 + newest(job))
        result = drained(job)
    rows = [record.fields["rows"] for record in result.of("plan")]
    assert any(len(cells) == 4 for cells in rows), f"four replicas never shared the batch: {rows}"
    checked(result, tmp_path / "undisturbed", 2, 1, 1)
