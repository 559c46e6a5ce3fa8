"""``ctl reshape`` on real jobs: other parallel sizes while training, evaluation and saving go on.

Real processes and real SIGKILLs, dropout 0.1, compared step by step with an undisturbed run of the launch's sizes.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from megatron.elastic.control.requests import ParallelSizes
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
from tests.integration.ports import free_port
from tests.integration.test_checkpoints import QUIET, plain_job
from tests.integration.test_cpu_layouts import logs, losses, run_jobs
from tests.integration.test_spares import DROPOUT, MANY, RATES, begun, checked, drained, kill, newest, waiting
from tests.integration.test_spares import until as status_until
from tests.scenario.scenario import EVERY, EXPERTS

LOOKED_AT = ("--eval-interval", "20", "--eval-iters", "1")
SECONDS = 500.0


def job(folder: Path, *flags: str, world: int = 4) -> RunningJob:
    """A job of TP 2 by PP 2 that trains until it is drained."""
    events = folder / "events"
    command = elastic_command(events, world, 2, 2, MANY, *DROPOUT, *RATES, *LOOKED_AT, *flags)
    return RunningJob(events, command, SECONDS)


def reshape(job: RunningJob, tensor: int, pipeline: int, data: int, context: int = 1) -> str:
    """The line of ``ctl`` once the sizes are in force; a few steps later."""
    words = ("--tp", str(tensor), "--pp", str(pipeline), "--dp", str(data))
    parts = ("--cp", str(context)) if context > 1 else ()
    done = job.ctl("reshape", *words, *parts, seconds=SECONDS / 3)
    assert done.returncode == 0, (done.stderr, job.output[-4000:])
    assert f"{ParallelSizes(tensor, pipeline, data, context)} since step" in done.stdout
    begun(job, 3 + newest(job))
    return done.stdout


def iteration_saved(folder: Path) -> int:
    """The iteration of the first checkpoint, once it is whole."""
    tracker, end = folder / "latest_checkpointed_iteration.txt", time.monotonic() + SECONDS / 3
    while not tracker.is_file():
        assert time.monotonic() < end, "no checkpoint was saved"
        time.sleep(0.1)
    return int(tracker.read_text())


def cells(result: JobResult) -> list[int]:
    """The number of cells that compute, of each plan in order."""
    return [len({cell for _, cell, _, _ in record.fields["stages"]}) for record in result.of("plan")]


def test_through_all_sizes_of_four_ranks_and_back(tmp_path: Path) -> None:
    """Losses are those of the launch's sizes; plain Megatron resumes what other sizes have saved."""
    saved, folder, quiet = tmp_path / "saved", tmp_path / "events", (*QUIET, *RATES)
    saves = ("--save", str(saved), "--save-interval", "1000000")
    command = elastic_command(folder, 4, 2, 2, MANY, *quiet, *LOOKED_AT, *saves)
    with RunningJob(folder, command, SECONDS) as running:
        begun(running)
        reshape(running, 1, 4, 1)
        reshape(running, 4, 1, 1)
        refused = running.ctl("reshape", "--tp", "2", "--pp", "2", "--dp", "2")
        assert refused.returncode == 1 and "takes 8 ranks, and 4 are here" in refused.stderr
        assert running.ctl("checkpoint").returncode == 0
        at = iteration_saved(saved)
        reshape(running, 2, 2, 1)
        begun(running, at + 5)
        result = drained(running)
    assert cells(result)[-3:] == [4, 1, 2]
    reference = elastic_job(tmp_path / "undisturbed", 4, 2, 2, at + 4, *quiet, seconds=SECONDS)
    assert reference.code == 0 and largest_deviation(reference.committed, result.committed) < 1e-5
    flags = (*quiet, "--tensor-model-parallel-size", "2", "--train-iters", str(at + 4))
    plain = plain_job(
        "resumes", 4, 2, *flags, "--load", str(saved), "--ckpt-step", str(at), "--override-opt_param-scheduler"
    )
    codes = run_jobs(tmp_path, [plain])
    assert set(codes["resumes"]) == {0}, logs(tmp_path, "resumes")[-3000:]
    resumed = losses(logs(tmp_path, "resumes"))
    later = {step: loss for step, loss in result.committed.items() if at + 2 < step <= at + 4}
    assert len(later) == 2 and largest_deviation(later, resumed) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
def test_ranks_lost_on_the_way_and_afterwards(tmp_path: Path, rank: int) -> None:
    """Killed while state moves, and in a step of the new sizes: each time it returns to its place."""
    script = f"kill:rank={rank},point=in_migration_finish"
    with job(tmp_path, "--elastic-allow-inject", "--elastic-inject", script) as running:
        begun(running)
        reshape(running, 1, 4, 1)
        running.wait_for(f"joined by {rank}")
        kill(running, rank)
        running.wait_for(f"joined by {rank}", running.output.rindex(f"joined by {rank}") + 1)
        reshape(running, 4, 1, 1)
        result = drained(running)
    assert cells(result)[-1] == 1
    checked(result, tmp_path / "undisturbed", 4, 2, 2)


@pytest.mark.slow
def test_spares_grow_the_tensor_parallel_size(tmp_path: Path) -> None:
    with job(tmp_path, "--elastic-spares", "2", world=6) as running:
        begun(running)
        status_until(running, waiting(4, 5))
        reshape(running, 3, 2, 1)
        result = drained(running)
    checked(result, tmp_path / "undisturbed", 4, 2, 2)


@pytest.mark.slow
def test_a_further_node_doubles_the_tensor_parallel_size(tmp_path: Path) -> None:
    """TP 2 by PP 1 on one node; a second comes, and with it TP 4; the second is lost, and the cell lives on."""
    folder = tmp_path / "events"
    common = elastic_command(folder, 2, 2, 1, MANY, *DROPOUT, *RATES, *LOOKED_AT, "--elastic-tensor", "live-on")
    domains = [environment_of({"MEGATRON_ELASTIC_DOMAIN": node}) for node in ("first", "second")]
    at = common.index("--nproc-per-node")
    where = ["--nnodes", "1:2", "--master-port", str(free_port()), "--node-rank"]
    with RunningJob(folder, [*common[:at], *where, "0", *common[at:]], SECONDS, domains[0]) as running:
        begun(running)
        early = running.ctl("reshape", "--tp", "4", "--pp", "1", "--dp", "1")
        assert early.returncode == 1 and "takes 4 ranks, and 2 are here" in early.stderr
        further = [*common[:at], "--rdzv-id", running.run_id, *where, "1", *common[at:]]
        more = subprocess.Popen(further, cwd=ROOT, env=domains[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            status_until(running, lambda said: said.members == (0, 1, 2, 3))
            reshape(running, 4, 1, 1)
            assert cells(JobResult(0, running.output, read_events(folder)))[-1] == 1
        finally:
            more.kill()
            more.wait()
        status_until(running, lambda said: said.members == (0, 1))
        begun(running, 3 + newest(running))
        result = drained(running)
    checked(result, tmp_path / "undisturbed", 2, 2, 1)


@pytest.mark.slow
def test_replicas_come_to_share_the_sequence_and_back(tmp_path: Path) -> None:
    """Megatron has built this model without context parallelism. What the job cannot compute moves nothing."""
    folder = tmp_path / "events"
    command = elastic_command(folder, 2, 1, 1, MANY, *DROPOUT, *RATES, *LOOKED_AT)
    with RunningJob(folder, command, SECONDS) as running:
        begun(running)
        reshape(running, 1, 1, 1, context=2)
        refused = running.ctl("reshape", "--tp", "2", "--pp", "1", "--dp", "1", "--cp", "2")
        assert refused.returncode == 1 and "TP 2, CP 2, PP 1, DP 1 takes 4 ranks, and 2 are here" in refused.stderr
        reshape(running, 1, 1, 2)
        result = drained(running)
    assert cells(result)[-2:] == [1, 2]
    checked(result, tmp_path / "undisturbed", 2, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
def test_a_job_of_two_parts_into_other_sizes_with_losses(tmp_path: Path, rank: int) -> None:
    """Launched at TP 1, CP 2 and DP 2: a rank is killed while state moves, and in a step of each of the new sizes."""
    script = f"kill:rank={rank},point=in_migration_finish"
    flags, folder = (*DROPOUT, *RATES, "--context-parallel-size", "2"), tmp_path / "events"
    faults = (*LOOKED_AT, "--elastic-allow-inject", "--elastic-inject", script)
    with RunningJob(folder, elastic_command(folder, 4, 1, 1, MANY, *flags, *faults), SECONDS) as running:
        begun(running)
        reshape(running, 2, 1, 1, context=2)
        running.wait_for(f"joined by {rank}")
        for sizes in ((1, 2, 2), (2, 2, 1)):
            reshape(running, *sizes)
            heard = len(running.output)
            kill(running, rank)
            running.wait_for(f"joined by {rank}", heard)
        reshape(running, 1, 1, 2, context=2)
        result = drained(running)
    last = max(result.committed)
    assert set(result.committed) == set(range(1, last + 1))
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    reference = elastic_job(tmp_path / "undisturbed", 4, 1, 1, last, *flags, seconds=SECONDS)
    assert reference.code == 0 and largest_deviation(reference.committed, result.committed) < 1e-5


@pytest.mark.slow
def test_crews_are_formed_anew_for_other_stages_and_sets_of_experts(tmp_path: Path) -> None:
    """Launched as two crews of two ranks in one stage: to two stages, to one crew of all ranks, and back."""
    flags, folder = (*DROPOUT, *RATES, *EXPERTS, *EVERY, "--expert-model-parallel-size", "2"), tmp_path / "events"
    with RunningJob(folder, elastic_command(folder, 4, 1, 1, MANY, *flags, *LOOKED_AT), SECONDS) as running:
        begun(running)
        for pipeline, data, experts in ((2, 2, 2), (1, 4, 4), (1, 4, 2)):
            words = ("--tp", "1", "--pp", str(pipeline), "--dp", str(data), "--ep", str(experts))
            done = running.ctl("reshape", *words, seconds=SECONDS / 3)
            assert done.returncode == 0, (done.stderr, running.output[-4000:])
            begun(running, 3 + newest(running))
        refused = running.ctl("reshape", "--tp", "1", "--pp", "1", "--dp", "4", "--ep", "3")
        assert refused.returncode == 1 and "EP 3 does not divide 4 experts" in refused.stderr
        result = drained(running)
    last = max(result.committed)
    assert set(result.committed) == set(range(1, last + 1))
    reference = elastic_job(tmp_path / "undisturbed", 4, 1, 1, last, *flags, seconds=SECONDS)
    assert reference.code == 0 and largest_deviation(reference.committed, result.committed) < 1e-5


BESIDE = ("--moe-shared-expert-intermediate-size", "64", "--moe-shared-expert-gate", "--swiglu")
SHARE = (*EXPERTS, *EVERY, *BESIDE, "--expert-model-parallel-size", "2")
"""Two ranks share the experts of a layer, and each layer has a shared expert that every token passes."""


def reshape_crews(job: RunningJob, sizes: ParallelSizes) -> None:
    """``ctl reshape`` until the sizes are in force; a few steps later."""
    names = ("--tp", "--pp", "--dp", "--cp", "--ep")
    words = [word for pair in zip(names, map(str, sizes), strict=True) for word in pair]
    done = job.ctl("reshape", *words, seconds=SECONDS / 3)
    assert done.returncode == 0, (done.stderr, job.output[-4000:])
    assert f"{sizes} since step" in done.stdout
    begun(job, 3 + newest(job))


def undisturbed(result: JobResult, folder: Path, ranks: int, tensor: int, flags: tuple[str, ...]) -> None:
    """No step is lost, and losses are those of a job that keeps its sizes and loses no rank."""
    last = max(result.committed)
    assert set(result.committed) == set(range(1, last + 1))
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    reference = elastic_job(folder, ranks, tensor, 1, last, *flags, seconds=SECONDS)
    assert reference.code == 0 and largest_deviation(reference.committed, result.committed) < 1e-5


@pytest.mark.slow
def test_experts_through_another_tensor_parallel_size_and_back(tmp_path: Path) -> None:
    """A rank is killed while state moves; plain Megatron resumes what the other sizes have saved."""
    flags, folder, saved = (*QUIET, *RATES, *SHARE), tmp_path / "events", tmp_path / "saved"
    kill = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=1,point=in_migration_finish")
    saves = ("--save", str(saved), "--save-interval", "1000000")
    command = elastic_command(folder, 4, 1, 1, MANY, *flags, *LOOKED_AT, *saves, *kill)
    with RunningJob(folder, command, SECONDS) as running:
        begun(running)
        reshape_crews(running, ParallelSizes(2, 1, 2, 1, 2))
        running.wait_for("joined by 1")
        assert running.ctl("checkpoint").returncode == 0
        at = iteration_saved(saved)
        reshape_crews(running, ParallelSizes(1, 1, 4, 1, 2))
        begun(running, at + 5)
        result = drained(running)
    assert cells(result)[-2:] == [2, 4]
    undisturbed(result, tmp_path / "undisturbed", 4, 1, flags)
    resumes = ("--load", str(saved), "--ckpt-step", str(at), "--override-opt_param-scheduler")
    plain = plain_job("resumes", 4, 1, *flags, "--train-iters", str(at + 4), *resumes)
    codes = run_jobs(tmp_path, [plain])
    assert set(codes["resumes"]) == {0}, logs(tmp_path, "resumes")[-3000:]
    later = {step: loss for step, loss in result.committed.items() if at + 2 < step <= at + 4}
    assert len(later) == 2 and largest_deviation(later, losses(logs(tmp_path, "resumes"))) < 1e-5


@pytest.mark.slow
def test_ranks_that_share_experts_come_to_share_the_sequence_and_back(tmp_path: Path) -> None:
    """Megatron has built this model without context parallelism, and with losses that balance experts."""
    flags, folder = (*DROPOUT, *RATES, *SHARE, "--moe-z-loss-coeff", "1e-3"), tmp_path / "events"
    saves = ("--save", str(tmp_path / "saved"), "--save-interval", "20")
    command = elastic_command(folder, 4, 1, 1, MANY, *flags, *LOOKED_AT, *saves)
    with RunningJob(folder, command, SECONDS) as running:
        begun(running)
        reshape_crews(running, ParallelSizes(1, 1, 2, 2, 2))
        running.ctl("checkpoint")
        reshape_crews(running, ParallelSizes(1, 1, 4, 1, 4))
        result = drained(running)
    assert cells(result)[-2:] == [2, 4]
    undisturbed(result, tmp_path / "undisturbed", 4, 1, flags)
