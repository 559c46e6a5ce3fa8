"""Checkpoints are Megatron's: written under --elastic and resumed without it, and the other way round, elsewhere.

Losses after resuming, optimizer included, are those of a run that was never
interrupted (dropout 0; Megatron's second log line after a start averages the
first two steps, so steps are compared from the third on).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.elastic_job import MODEL, elastic_job, largest_deviation
from tests.integration.test_cpu_layouts import logs, losses, run_jobs

SAVED_AT, STEPS = 3, 7
QUIET = ("--hidden-dropout", "0", "--attention-dropout", "0", "--lr-decay-iters", "8")
FORMATS = {
    "fp32": (),
    "bf16-distributed-optimizer": ("--bf16", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
    "experts": ("--num-experts", "4", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear", "--sequence-parallel"),
    "bias of experts, a dense layer first": (
        *("--num-experts", "4", "--moe-layer-freq", "[0]+[1]*3", "--disable-bias-linear", "--sequence-parallel"),
        *("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "0.05"),
        *("--moe-router-score-function", "sigmoid", "--moe-router-load-balancing-type", "none"),
    ),
}
ROUNDING = dict.fromkeys(FORMATS, 2e-6) | {"bf16-distributed-optimizer": 2e-4}


def saving(folder: Path) -> tuple[str, ...]:
    return ("--save", str(folder), "--save-interval", str(SAVED_AT), "--exit-interval", str(SAVED_AT))


def plain_job(name: str, world: int, pipeline: int, *flags: str) -> dict[str, Any]:
    arguments = [*MODEL, *QUIET, "--pipeline-model-parallel-size", str(pipeline), "--train-iters", str(STEPS), *flags]
    return {"name": name, "world": world, "seconds": 200, "arguments": arguments}


def tail(values: dict[int, float]) -> dict[int, float]:
    return {step: loss for step, loss in values.items() if step > SAVED_AT + 2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_either_resumes_what_the_other_wrote(tmp_path: Path, kind: str) -> None:
    flags = FORMATS[kind]
    written = elastic_job(tmp_path / "events", 4, 1, 2, STEPS, *QUIET, *flags, *saving(tmp_path / "ours"))
    assert written.code == 0, written.output[-4000:]
    plain = [
        plain_job("straight", 2, 2, *flags),
        plain_job("writes", 2, 2, *flags, *saving(tmp_path / "theirs")),
        plain_job("resumes-ours", 2, 1, *flags, "--load", str(tmp_path / "ours")),
    ]
    codes = run_jobs(tmp_path, plain)
    assert all(set(ranks) == {0} for ranks in codes.values()), (codes, logs(tmp_path, "resumes-ours")[-3000:])
    straight = tail(losses(logs(tmp_path, "straight")))
    assert len(straight) == STEPS - SAVED_AT - 2
    resumed = elastic_job(tmp_path / "later", 4, 2, 1, STEPS, *QUIET, *flags, "--load", str(tmp_path / "theirs"))
    assert resumed.code == 0, resumed.output[-4000:]
    assert largest_deviation(straight, tail(losses(logs(tmp_path, "resumes-ours")))) < ROUNDING[kind]
    assert largest_deviation(straight, tail(resumed.losses)) < ROUNDING[kind]


OWN_RATES = {
    "decoupled": ("--decoupled-lr", "5e-3", "--decoupled-min-lr", "1e-5"),
    "by width": ("--use-mup", "--mup-base-hidden-size", "16", "--adam-eps", "1e-3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", OWN_RATES)
def test_learning_rates_of_some_parameters_are_those_before_the_load(tmp_path: Path, kind: str, sharded: bool) -> None:
    """Plain Megatron goes on with other ones, or reads no such checkpoint without its distributed optimizer."""
    form = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable") if sharded else ()
    flags = (*OWN_RATES[kind], *form, "--untie-embeddings-and-output-weights")
    plain = [plain_job("straight", 2, 2, *flags), plain_job("writes", 2, 2, *flags, *saving(tmp_path / "theirs"))]
    codes = run_jobs(tmp_path, plain)
    assert all(set(ranks) == {0} for ranks in codes.values()), codes
    written = elastic_job(tmp_path / "events", 2, 1, 2, STEPS, *QUIET, *flags, *saving(tmp_path / "ours"))
    assert written.code == 0, written.output[-4000:]
    straight = tail(losses(logs(tmp_path, "straight")))
    for folder in ("ours", "theirs"):
        load = ("--load", str(tmp_path / folder))
        resumed = elastic_job(tmp_path / f"{folder}-later", 2, 1, 2, STEPS, *QUIET, *flags, *load)
        assert resumed.code == 0, resumed.output[-4000:]
        assert largest_deviation(straight, tail(resumed.losses)) < ROUNDING["fp32"], folder


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--bf16",), ("--sgd-momentum", "0")], ids=["momentum", "bf16", "none"])
def test_sgd_goes_on_from_what_either_wrote(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Plain Megatron reads no checkpoint of SGD, and writes no momentum of 0."""
    flags = ("--optimizer", "sgd", *flags)
    written = elastic_job(tmp_path / "events", 2, 1, 1, STEPS, *QUIET, *flags, *saving(tmp_path / "ours"))
    assert written.code == 0, written.output[-4000:]
    plain = [plain_job("straight", 2, 1, *flags), plain_job("writes", 2, 1, *flags, *saving(tmp_path / "theirs"))]
    codes = run_jobs(tmp_path, plain)
    assert all(set(ranks) == {0} for ranks in codes.values()), codes
    straight = tail(losses(logs(tmp_path, "straight")))
    for folder in ("ours",) if "--sgd-momentum" in flags else ("ours", "theirs"):
        load = ("--load", str(tmp_path / folder))
        resumed = elastic_job(tmp_path / f"{folder}-later", 2, 1, 1, STEPS, *QUIET, *flags, *load)
        assert resumed.code == 0, resumed.output[-4000:]
        assert largest_deviation(straight, tail(resumed.losses)) < (2e-4 if "--bf16" in flags else 2e-6), folder


SHARED = ("--num-experts", "4", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear")


@pytest.mark.slow
def test_a_rank_that_returned_writes_its_experts(tmp_path: Path) -> None:
    """Each expert is cut over a tensor-parallel group. The rank is lost in the first step, back in the next two."""
    flags = (*SHARED, "--sequence-parallel", "--expert-model-parallel-size", "2", "--tensor-model-parallel-size", "2")
    faults = "kill:rank=3,step=1,point=mid_backward;delay:missing=1,count=0,point=between_steps,seconds=60"
    inject = ("--elastic-allow-inject", "--elastic-inject", faults)
    written = elastic_job(tmp_path / "events", 4, 2, 1, STEPS, *QUIET, *flags, *inject, *saving(tmp_path / "ours"))
    assert written.code == 0 and "joined by 3" in written.output, written.output[-4000:]
    even = ("--moe-token-dispatcher-type", "allgather")
    plain = [
        plain_job("straight", 4, 1, *flags, *even),
        plain_job("resumes", 4, 1, *flags, *even, "--load", str(tmp_path / "ours")),
    ]
    codes = run_jobs(tmp_path, plain)
    assert all(set(ranks) == {0} for ranks in codes.values()), (codes, logs(tmp_path, "resumes")[-3000:])
    straight = tail(losses(logs(tmp_path, "straight")))
    assert largest_deviation(straight, tail(losses(logs(tmp_path, "resumes")))) < ROUNDING["experts"]


@pytest.mark.slow
@pytest.mark.parametrize(("wrote", "reads"), [("2", "1"), ("1", "2")])
def test_state_of_another_number_of_optimizers_is_refused_in_one_line(tmp_path: Path, wrote: str, reads: str) -> None:
    flags = (*QUIET, *SHARED, "--expert-model-parallel-size")
    written = elastic_job(tmp_path / "writes", 2, 1, 1, STEPS, *flags, wrote, *saving(tmp_path / "saved"))
    assert written.code == 0, written.output[-4000:]
    read = elastic_job(tmp_path / "reads", 2, 1, 1, STEPS, *flags, reads, "--load", str(tmp_path / "saved"))
    assert read.code == 1 and "Traceback" not in read.output, read.output[-4000:]
    assert "error: --load: Megatron keeps optimizer state of experts that ranks share apart" in read.output


@pytest.mark.slow
def test_experts_that_ranks_share_are_resumed_by_either(tmp_path: Path) -> None:
    """Ours is written after the loss of one of the two ranks that share experts.

    Plain Megatron has an optimizer for these experts, and reads a checkpoint with as many optimizers as wrote it only.
    """
    two, ours, theirs = ("--expert-model-parallel-size", "2"), str(tmp_path / "ours"), str(tmp_path / "theirs")
    lost = (
        "--no-elastic-respawn",
        "--elastic-allow-inject",
        "--elastic-inject",
        "kill:rank=1,step=2,point=mid_backward",
    )
    flags = (*QUIET, *SHARED, *two)
    written = elastic_job(tmp_path / "events", 4, 1, 1, STEPS, *flags, *lost, *saving(tmp_path / "ours"))
    assert written.code == 0 and {r.fields["lost_rank"] for r in written.of("loss")} == {1}, written.output[-4000:]
    plain = [
        plain_job("straight", 4, 1, *SHARED, *two),
        plain_job("writes", 4, 1, *SHARED, *two, *saving(tmp_path / "theirs")),
        plain_job("two", 4, 1, *SHARED, *two, "--load", ours),
    ]
    codes = run_jobs(tmp_path, plain)
    assert all(set(ranks) == {0} for ranks in codes.values()), (codes, logs(tmp_path, "two")[-3000:])
    straight = tail(losses(logs(tmp_path, "straight")))
    resumed = elastic_job(tmp_path / "later", 4, 1, 1, STEPS, *flags, "--load", theirs)
    assert resumed.code == 0, resumed.output[-4000:]
    for found in (losses(logs(tmp_path, "two")), resumed.losses):
        assert largest_deviation(straight, tail(found)) < ROUNDING["experts"]


EXPERTS = (*SHARED, "--expert-model-parallel-size")
EVEN = ("--sequence-parallel", "--moe-token-dispatcher-type", "allgather", *EXPERTS)
ABSENT: dict[str, tuple[int, int, int, tuple[str, ...], str, str]] = {
    "one of two that share": (2, 1, 1, (*EXPERTS, "2"), "kill:rank=1,step=2,point=mid_backward", "1"),
    "one of each stage": (
        *(4, 1, 2, (*EXPERTS, "2")),
        *("kill:rank=1,step=2,point=mid_backward;kill:rank=2,step=3,point=after_vote", "1,2"),
    ),
    "in a distributed optimizer": (
        *(2, 1, 1, (*EXPERTS, "2", *FORMATS["bf16-distributed-optimizer"])),
        *("kill:rank=0,step=2,point=mid_backward", "0"),
    ),
    "a part of each of two experts, three axes": (
        *(8, 2, 2, (*EVEN, "2")),
        *("kill:rank=6,step=2,point=mid_backward", "6"),
    ),
    "whole experts in a tensor-parallel group": (
        *(4, 2, 1, (*EVEN, "4", "--expert-tensor-parallel-size", "1")),
        *("kill:rank=3,step=2,point=mid_backward", "3"),
    ),
    "a stage without experts": (
        *(4, 1, 2, (*EXPERTS, "2", "--moe-layer-freq", "[1]*2+[0]*2")),
        *("kill:rank=1,step=2,point=mid_backward;kill:rank=3,step=3,point=after_vote", "1,3"),
    ),
    "a shard": (2, 2, 1, (), "kill:rank=1,step=2,point=mid_backward", "1"),
}
"""Name → ranks, tensor-parallel size, stages, flags, faults before the save, and the ranks that are lost by them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ABSENT)
def test_parts_of_which_no_writer_is_left_are_resumed_by_plain_megatron(tmp_path: Path, name: str) -> None:
    """All ranks of the launch that had some experts or a shard are lost for good before the save."""
    world, tensor, stages, flags, faults, lost = ABSENT[name]
    flags = ("--tensor-model-parallel-size", str(tensor), *flags)
    fault = ("--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", faults)
    saved = saving(tmp_path / "ours")
    written = elastic_job(tmp_path / "events", world, tensor, stages, STEPS, *QUIET, *flags, *fault, *saved)
    assert written.code == 0, written.output[-4000:]
    assert {record.fields["lost_rank"] for record in written.of("loss")} == set(map(int, lost.split(",")))
    plain = [
        plain_job("straight", world, stages, *flags),
        plain_job("resumes", world, stages, *flags, "--load", str(tmp_path / "ours")),
    ]
    codes = run_jobs(tmp_path, plain)
    assert all(set(ranks) == {0} for ranks in codes.values()), (codes, logs(tmp_path, "resumes")[-3000:])
    straight = tail(losses(logs(tmp_path, "straight")))
    kind = "bf16-distributed-optimizer" if "--bf16" in flags else "experts"
    assert largest_deviation(straight, tail(losses(logs(tmp_path, "resumes")))) < ROUNDING[kind]


@pytest.mark.slow
def test_a_later_save_writes_the_experts_of_a_further_lost_rank_too(tmp_path: Path) -> None:
    """Each of four ranks has its own experts; one is lost before the first save, another before the second."""
    flags, steps = (*EXPERTS, "4"), 2 * SAVED_AT
    faults = "kill:rank=1,step=2,point=mid_backward;kill:rank=2,step=5,point=after_vote"
    fault = ("--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", faults)
    saved = ("--save", str(tmp_path / "ours"), "--save-interval", str(SAVED_AT), "--exit-interval", str(steps))
    written = elastic_job(tmp_path / "events", 4, 1, 1, steps + 4, *QUIET, *flags, *fault, *saved)
    assert written.code == 0, written.output[-4000:]
    assert {record.fields["lost_rank"] for record in written.of("loss")} == {1, 2}
    load = ("--load", str(tmp_path / "ours"), "--ckpt-step")
    until = ("--train-iters", str(steps + 4))
    plain = [plain_job("straight", 4, 1, *flags, *until)]
    plain += [plain_job(f"from-{at}", 4, 1, *flags, *until, *load, str(at)) for at in (SAVED_AT, steps)]
    codes = run_jobs(tmp_path, plain)
    assert all(set(ranks) == {0} for ranks in codes.values()), (codes, logs(tmp_path, f"from-{steps}")[-3000:])
    straight = losses(logs(tmp_path, "straight"))
    for at in (SAVED_AT, steps):
        expected = {step: loss for step, loss in straight.items() if step > at + 2}
        found = {step: loss for step, loss in losses(logs(tmp_path, f"from-{at}")).items() if step > at + 2}
        assert len(expected) == steps + 4 - at - 2
        assert largest_deviation(expected, found) < ROUNDING["experts"]
    read = elastic_job(tmp_path / "later", 4, 1, 1, steps + 4, *QUIET, *flags, *load, str(steps))
    assert read.code == 0, read.output[-4000:]
    expected = {step: loss for step, loss in straight.items() if step > steps + 2}
    assert largest_deviation(expected, {step: read.losses[step] for step in expected}) < ROUNDING["experts"]


WRITTEN_WITH = ("--lr-decay-iters", "40")
RESUMED_WITH = (
    "--lr",
    "5e-4",
    "--min-lr",
    "5e-5",
    "--lr-decay-style",
    "linear",
    "--lr-decay-iters",
    "100",
    "--lr-warmup-iters",
    "9",
    "--use-checkpoint-opt_param-scheduler",
)
"""Not another weight decay: plain Megatron takes that of the arguments for one step more, then the loaded one."""


def rates(output: str) -> dict[int, str]:
    """Iteration → learning rate as printed."""
    return {int(step): rate for step, rate in re.findall(r"iteration\s+(\d+)/.*?learning rate: (\S+)", output)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "victim"), zip(FORMATS, (0, 1, 0, 1), strict=True))
def test_a_rank_that_returns_after_a_load_has_the_schedule_of_the_checkpoint(
    tmp_path: Path, kind: str, victim: int
) -> None:
    """Other arguments than the checkpoint's, which the flag overrules: as plain Megatron goes on, a loss or none.

    Rank 0 tells the others the rates, rank 1 prints them.
    """
    flags, steps = (*QUIET, *FORMATS[kind]), 30
    written = elastic_job(tmp_path / "events", 2, 1, 1, steps, *flags, *WRITTEN_WITH, *saving(tmp_path / "saved"))
    assert written.code == 0, written.output[-4000:]
    later = (*flags, *RESUMED_WITH, "--load", str(tmp_path / "saved"))
    plain = {"name": "plain", "world": 1, "seconds": 200, "arguments": [*MODEL, *later, "--train-iters", str(steps)]}
    assert run_jobs(tmp_path, [plain]) == {"plain": [0]}, logs(tmp_path, "plain")[-3000:]
    kill = f"kill:rank={victim},step={SAVED_AT + 2},point=mid_forward"
    faults = f"{kill};delay:missing=1,rank={1 - victim},count=0,seconds=2"
    resumed = elastic_job(
        tmp_path / "later", 2, 1, 1, steps, *later, "--elastic-allow-inject", "--elastic-inject", faults
    )
    assert resumed.code == 0, resumed.output[-4000:]
    joins = [record for record in resumed.of("generation") if record.fields["reason"] == "join"]
    assert len(joins) == 1 and len(resumed.of("loss")) == 1
    straight = logs(tmp_path, "plain")
    back = int(re.findall(r"at step (\d+)", resumed.output.split("recovered at generation 3")[0])[-1])
    assert back < steps - 2, "it computed again"
    assert rates(resumed.output) == rates(straight)
    assert largest_deviation(tail(losses(straight)), tail(resumed.losses)) < ROUNDING[kind]
