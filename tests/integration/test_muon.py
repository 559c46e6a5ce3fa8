"""Muon under --elastic is Megatron's: the same losses, also when ranks are lost, and checkpoints that either resumes.

Plain Megatron builds its Muon over the package emerging-optimizers, which it is given here; --elastic needs none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.emerging import unpacked
from tests.integration.elastic_job import MODEL, JobResult, RunningJob, elastic_command, elastic_job, largest_deviation
from tests.integration.test_cpu_layouts import gradient_norms, logs, losses, run_jobs

STEPS = 12
QUIET = ("--hidden-dropout", "0", "--attention-dropout", "0", "--lr-decay-iters", "12")
MUON = ("--optimizer", "muon", "--muon-use-nesterov", "--muon-fp32-matmul-prec", "high")
FAULTS = "kill:rank=0,step=3,point=after_update;delay:rank=1,step=5-10,seconds=1.5"
"""An owner before its mirrors have followed. The steps after it take long enough that it comes back in one of them."""
KILLS = ("--elastic-allow-inject", "--elastic-inject", FAULTS)
LIVES_ON = ("--elastic-tensor", "live-on")
LOST = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=3,step=2,point=mid_forward")


def plain_losses(folder: Path, world: int, *flags: str) -> tuple[dict[int, float], str]:
    """Losses and output of plain Megatron with the package."""
    job = {"name": "plain", "world": world, "seconds": 300, "arguments": [*MODEL, *QUIET, *flags]}
    codes = run_jobs(folder, [job], unpacked(folder / "packages"))
    text = logs(folder, "plain")
    assert codes == {"plain": [0] * world}, text[-3000:]
    return losses(text), text


def ended(result: JobResult) -> JobResult:
    assert result.code == 0, result.output[-4000:]
    return result


@pytest.mark.slow
def test_losses_in_two_stages_cost_no_step_and_change_no_loss(tmp_path: Path) -> None:
    whole = ended(elastic_job(tmp_path / "whole", 4, 1, 2, STEPS, *MUON))
    killed = ended(elastic_job(tmp_path / "killed", 4, 1, 2, STEPS, *MUON, *KILLS))
    assert "--elastic-snapshot state" in killed.output
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {0}
    assert any(record.fields["transition"] == "join" for record in killed.of("certificate")), "the rank came back"
    assert set(killed.committed) == set(whole.committed) == set(range(1, STEPS + 1))
    assert largest_deviation(whole.committed, killed.committed) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_losses_are_plain_megatrons(tmp_path: Path, kind: str) -> None:
    flags = (*MUON, *(("--bf16",) if kind == "bf16" else ()), "--train-iters", "6")
    plain, text = plain_losses(tmp_path, 2, *flags)
    mine = ended(elastic_job(tmp_path / "events", 2, 1, 1, 0, *QUIET, *flags))
    assert len(plain) >= 5 and set(plain) == set(mine.losses)
    assert largest_deviation(plain, mine.losses) < (1e-4 if kind == "bf16" else 2e-6)
    assert gradient_norms(text) == gradient_norms(mine.output) or kind == "bf16"


def saved(folder: Path) -> tuple[str, ...]:
    return ("--save", str(folder), "--save-interval", "3", "--exit-interval", "3")


def tail(values: dict[int, float]) -> dict[int, float]:
    """Without the saved steps, and the line after a load, which Megatron averages over two steps."""
    return {step: loss for step, loss in values.items() if step > 5}


def check_either_resumes(folder: Path, allowed: float, *flags: str, stages: int = 1, resumed_in: int = 1) -> None:
    """Assert that plain Megatron resumes what a job of ours saved in ``folder / "ours"``, and ours what it saves.

    ``stages``: of plain Megatron's other runs; ``resumed_in``: of the one that resumes. ``allowed``: the largest
    deviation from a run without a checkpoint.
    """
    cut, again = (("--pipeline-model-parallel-size", str(count)) for count in (stages, resumed_in))
    runs = {
        "straight": cut,
        "writes": (*cut, *saved(folder / "theirs")),
        "resumes": (*again, "--load", str(folder / "ours")),
    }
    jobs: list[dict[str, Any]] = [
        {"name": name, "world": 2, "seconds": 300, "arguments": [*MODEL, *flags, *more]} for name, more in runs.items()
    ]
    codes = run_jobs(folder, jobs, unpacked(folder / "packages"))
    assert all(set(ranks) == {0} for ranks in codes.values()), (codes, logs(folder, "resumes")[-3000:])
    resumed = ended(elastic_job(folder / "later", 2, 1, 1, 0, *flags, "--load", str(folder / "theirs")))
    straight = tail(losses(logs(folder, "straight")))
    assert len(straight) == 3
    assert largest_deviation(straight, tail(losses(logs(folder, "resumes")))) < allowed
    assert largest_deviation(straight, tail(resumed.losses)) < allowed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["muon fp32", "muon bf16", "dist_muon bf16"])
def test_either_resumes_what_the_other_wrote(tmp_path: Path, kind: str) -> None:
    """In two stages and one; ours is written after a loss.

    Plain Megatron's ``dist_muon`` gathers parts of unequal sizes over replicas, which gloo cannot: it has one replica.
    """
    name, _, precision = kind.partition(" ")
    flags = (*QUIET, *MUON, "--optimizer", name, *(("--bf16",) if precision == "bf16" else ()), "--train-iters", "8")
    written = ended(elastic_job(tmp_path / "events", 4, 1, 2, 0, *flags, *saved(tmp_path / "ours"), *LOST))
    assert {record.fields["lost_rank"] for record in written.of("loss")} == {3}
    allowed = 2e-4 if precision == "bf16" else 2e-6
    check_either_resumes(tmp_path, allowed, *flags, stages=2, resumed_in=2 if name == "dist_muon" else 1)


EXPERTS = ("--num-experts", "4", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear")
SHARED = (*EXPERTS, "--expert-model-parallel-size", "2")
LAYOUTS = {
    "cut matrices, bf16": (8, 2, 2, ("--bf16", "--sequence-parallel"), 1e-4),
    "zero bubble": (4, 1, 2, ("--elastic-schedule", "zero-bubble"), 1e-5),
    "shared experts": (4, 1, 1, SHARED, 1e-5),
}
"""Ranks, tensor- and pipeline-parallel size, flags, and the largest deviation."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_change_no_loss_in_other_layouts(tmp_path: Path, name: str) -> None:
    """A tensor-parallel group goes on without its lost rank, and steps the launch's parts of matrices as before."""
    world, tensor, pipeline, flags, allowed = LAYOUTS[name]
    sizes, quiet = (world, tensor, pipeline, STEPS), (*QUIET, *MUON, *flags)
    whole = ended(elastic_job(tmp_path / "whole", *sizes, *quiet))
    lives_on = LIVES_ON if tensor > 1 else ()
    killed = ended(elastic_job(tmp_path / "killed", *sizes, *quiet, *lives_on, *KILLS))
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {0}
    assert set(killed.committed) == set(range(1, STEPS + 1))
    assert largest_deviation(whole.committed, killed.committed) < allowed


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--muon-no-split-qkv",)], ids=["split", "fused"])
def test_parts_of_matrices_are_stepped_as_by_plain_megatron(tmp_path: Path, flags: tuple[str, ...]) -> None:
    cut = ("--tensor-model-parallel-size", "2", "--group-query-attention", "--num-query-groups", "2", *flags)
    plain, _ = plain_losses(tmp_path, 2, *MUON, *cut, "--train-iters", "6")
    mine = ended(elastic_job(tmp_path / "events", 2, 2, 1, 6, *QUIET, *MUON, *cut))
    assert len(plain) >= 5 and largest_deviation(plain, mine.losses) < 2e-6


@pytest.mark.slow
def test_shared_experts_are_stepped_and_resumed_by_either(tmp_path: Path) -> None:
    flags = (*QUIET, *MUON, *SHARED, "--bf16", "--train-iters", "8")
    ended(elastic_job(tmp_path / "events", 2, 1, 1, 0, *flags, *saved(tmp_path / "ours")))
    check_either_resumes(tmp_path, 2e-4, *flags)


@pytest.mark.slow
def test_other_tensor_parallel_sizes_step_the_matrices_of_the_launch(tmp_path: Path) -> None:
    flags = (*QUIET, *MUON)
    whole = ended(elastic_job(tmp_path / "whole", 4, 2, 2, STEPS, *flags))
    slow = ("--elastic-allow-inject", "--elastic-inject", "delay:rank=0,step=1-12,seconds=2")
    command = elastic_command(tmp_path / "events", 4, 2, 2, STEPS, *flags, *slow)
    with RunningJob(tmp_path / "events", command) as running:
        running.wait_for(r"iteration +2/")
        done = running.ctl("reshape", "--tp", "4", "--pp", "1", "--dp", "1")
        assert done.returncode == 0 and "since step" in done.stdout, done.stderr + done.stdout
        result = ended(running.finish())
    assert any(record.fields["transition"] == "migration" for record in result.of("certificate"))
    assert largest_deviation(whole.committed, result.committed) < 1e-5
