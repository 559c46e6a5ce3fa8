"""Jobs on the stand-in accelerator (docs/standin.md) train as on the CPU, from the same checkpoint, and lose ranks.

Parameters, activations, gradients and owned state lie in device memory, which the host cannot touch; mirrors lie in
host memory. Losses agree within the rounding of fp32: the device composes some operators of others.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import (
    JobResult,
    RunningJob,
    elastic_command,
    elastic_job,
    environment_of,
    largest_deviation,
)
from tests.integration.kill_walk import DROPOUT
from tests.integration.test_rank_orders import BACK
from tests.integration.test_silent_corruption import findings
from tests.standin.library import build

ROUNDING = 1e-7
"""Of a loss printed in fp32; the layouts deviated by up to 3e-8 from the CPU's."""
ROUNDING_BF16 = 1e-4
SAVED, STEPS = 2, 4


def on_standin(**settings: str) -> dict[str, str]:
    """The environment of a job on the devices; Megatron demands the last of users of tensor parallelism on GPUs."""
    platform = {"ELASTIC_PLATFORM": "tests.standin.platform:StandinPlatform", "STANDIN_OWN": "local"}
    return {**platform, "CUDA_DEVICE_MAX_CONNECTIONS": "1", **settings}


def load(folder: Path) -> tuple[str, ...]:
    """Flags to go on from step ``SAVED``. A generator's state belongs to a kind of device; dropout does not use it."""
    return ("--load", str(folder), "--ckpt-step", str(SAVED), "--no-load-rng")


def finished(result: JobResult) -> dict[int, float]:
    """The losses of a job, which has ended as it should."""
    assert result.code == 0, result.output[-6000:]
    return result.committed


def deviation(reference: dict[int, float], other: dict[int, float]) -> float:
    """The largest relative difference after the checkpoint; all these steps must be there."""
    return largest_deviation({step: reference[step] for step in range(SAVED + 1, STEPS + 1)}, other)


def saved_by_cpu(tmp_path: Path, *flags: str) -> dict[int, float]:
    """Train on one CPU rank and save to ``tmp_path / "saved"``; the losses."""
    save = ("--save", str(tmp_path / "saved"), "--save-interval", str(SAVED))
    return finished(elastic_job(tmp_path / "cpu", 1, 1, 1, STEPS, *DROPOUT, *save, *flags))


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    build()


LOSING = (
    "--elastic-allow-inject",
    "--elastic-inject",
    "delay:missing=1,count=0,point=before_vote,seconds=60;kill:rank=3,step=3,point=after_reduce",
)
"""A rank is lost in the first step after the checkpoint; the others linger in it until it asks to be let in."""


def test_a_job_trains_on_the_devices_as_on_the_cpu_although_a_rank_is_lost(tmp_path: Path) -> None:
    expected = saved_by_cpu(tmp_path)
    flags = (*DROPOUT, *load(tmp_path / "saved"), *LOSING)
    result = elastic_job(tmp_path / "events", 4, 1, 2, STEPS, *flags, environment=on_standin())
    assert deviation(expected, finished(result)) <= ROUNDING
    assert {record.fields["lost_rank"] for record in result.of("loss")} == {3}
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))


EXACT = ("--elastic-exact", "--deterministic-mode", "--elastic-mirrors", "2")
FIXED_ORDER = {"NCCL_ALGO": "Ring"}
"""Megatron asks for it beside ``--deterministic-mode``."""


@pytest.mark.parametrize("where", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_exact_mode_has_the_bits_of_an_undisturbed_run_although_ranks_are_lost_and_come_back(
    tmp_path: Path, where: str
) -> None:
    flags = (*DROPOUT, *EXACT, "--elastic-state", where)
    quiet = elastic_job(tmp_path / "quiet", 4, 1, 2, 8, *flags, environment=on_standin(**FIXED_ORDER))
    script = (
        "delay:missing=1,count=0,point=before_vote,seconds=60;kill:rank=3,step=2,point=mid_backward;"
        "kill:rank=0,step=5,point=after_reduce"
    )
    losing = ("--elastic-allow-inject", "--elastic-inject", script)
    lost = elastic_job(tmp_path / "lost", 4, 1, 2, 8, *flags, *losing, environment=on_standin(**FIXED_ORDER))
    assert finished(quiet) == finished(lost) and quiet.norms == lost.norms
    assert {record.fields["lost_rank"] for record in lost.of("loss")} == {0, 3}
    assert all(record.fields["lost_steps"] == 0 for record in lost.of("recovery"))
    assert lives(lost) >= {(3, 1), (0, 1)}


def lives(result: JobResult) -> set[tuple[int, int]]:
    """(rank, incarnation) that took part in a step."""
    return {(record.rank, record.incarnation) for record in result.of("phases")}


SEQUENCE = ("--sequence-parallel",)
EXPERTS = (*SEQUENCE, "--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tensor", "pipeline", "devices", "more"),
    [
        (2, 1, 1, 4, ()),
        (2, 2, 1, 4, ()),
        (4, 2, 1, 4, ()),
        (4, 2, 1, 1, ()),
        (4, 1, 2, 1, ()),
        pytest.param(4, 2, 2, 4, SEQUENCE, id="cut sequence"),
        pytest.param(4, 2, 1, 4, (*EXPERTS, "--transformer-impl", "local"), id="cut sequence, experts"),
    ],
)
def test_every_layout_trains_as_on_the_cpu_and_the_cpu_goes_on_from_its_checkpoint(
    tmp_path: Path, ranks: int, tensor: int, pipeline: int, devices: int, more: tuple[str, ...]
) -> None:
    shared = (*DROPOUT, *more)
    expected = saved_by_cpu(tmp_path, *more)
    flags = (*shared, *load(tmp_path / "saved"), "--save", str(tmp_path / "back"), "--save-interval", "3")
    environment = on_standin(STANDIN_DEVICES=str(devices))
    result = elastic_job(tmp_path / "events", ranks, tensor, pipeline, STEPS, *flags, environment=environment)
    assert deviation(expected, finished(result)) <= ROUNDING
    flags = (*shared, "--load", str(tmp_path / "back"), "--ckpt-step", "3", "--no-load-rng")
    again = finished(elastic_job(tmp_path / "again", 1, 1, 1, STEPS, *flags))
    assert abs(again[STEPS] / expected[STEPS] - 1) <= ROUNDING


@pytest.mark.slow
def test_in_bf16_two_devices_train_as_one(tmp_path: Path) -> None:
    """Without a pipeline: the devices draw initial values, other ones in each stage, as on GPUs."""
    one, two = (
        finished(elastic_job(tmp_path / str(ranks), ranks, 1, 1, STEPS, *DROPOUT, "--bf16", environment=on_standin()))
        for ranks in (1, 2)
    )
    assert largest_deviation(one, two) <= ROUNDING_BF16


def on_device(*flags: str) -> tuple[str, ...]:
    """Flags of a job whose owners lie in device memory."""
    return (*DROPOUT, "--elastic-state", "device", *flags)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [(), ("--bf16",)])
def test_owners_in_device_memory_train_with_the_bits_of_owners_in_host_memory(
    tmp_path: Path, precision: tuple[str, ...]
) -> None:
    device, host = (
        elastic_job(
            tmp_path / where, 2, 1, 1, 3, *DROPOUT, "--elastic-state", where, *precision, environment=on_standin()
        )
        for where in ("device", "host")
    )
    assert finished(device) == finished(host) and device.norms == host.norms
    assert "owned state                               8.00        4.00" in device.output
    assert "owned state                               0.00        8.00" in host.output


@pytest.mark.slow
def test_a_second_loss_while_promoted_blocks_move_to_the_device(tmp_path: Path) -> None:
    expected = finished(elastic_job(tmp_path / "quiet", 4, 1, 1, 8, *on_device(), environment=on_standin()))
    kills = "kill:rank=2,step=4,point=after_reduce;kill:rank=1,step=5,point=mid_backward"
    flags = on_device("--elastic-mirrors", "2", "--no-elastic-respawn", "--elastic-allow-inject")
    flags += ("--elastic-verify-interval", "1", "--elastic-inject", kills)
    result = elastic_job(tmp_path / "events", 4, 1, 1, 8, *flags, environment=on_standin())
    assert largest_deviation(expected, finished(result)) <= ROUNDING
    assert result.output.count("0 steps lost") == 2


@pytest.mark.slow
@pytest.mark.parametrize("point", ["after_reduce", "after_vote", "mid_update", "mid_gather"])
def test_a_lost_rank_comes_back_to_owners_in_device_memory(tmp_path: Path, point: str) -> None:
    expected = finished(elastic_job(tmp_path / "quiet", 4, 1, 2, 12, *on_device(), environment=on_standin()))
    flags = on_device("--elastic-verify-interval", "1", "--elastic-allow-inject")
    flags += ("--elastic-inject", f"{BACK};kill:rank=3,step=3,point={point}")
    result = elastic_job(tmp_path / "events", 4, 1, 2, 12, *flags, environment=on_standin())
    assert largest_deviation(expected, finished(result)) <= ROUNDING
    assert "joined by 3" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("precision", [(), ("--bf16",)])
def test_checkpoints_of_owners_in_device_memory_are_whole_while_a_rank_is_missing_and_when_it_is_back(
    tmp_path: Path, precision: tuple[str, ...]
) -> None:
    """Training goes on from each of them: in fp32 on the CPU, in bf16, which the CPU rounds otherwise, on a device."""
    steps, rounding = 12, ROUNDING_BF16 if precision else ROUNDING
    quiet = elastic_job(tmp_path / "quiet", 4, 1, 1, steps, *on_device(*precision), environment=on_standin())
    expected = finished(quiet)
    flags = on_device(*precision, "--save", str(tmp_path / "saved"), "--save-interval", "2", "--no-elastic-respawn")
    flags += ("--elastic-verify-interval", "1", "--elastic-allow-inject", "--elastic-inject")
    faults = "delay:missing=1,count=0,step=8,point=before_step,seconds=60;kill:rank=3,step=3,point=mid_update"
    command = elastic_command(tmp_path / "events", 4, 1, 1, steps, *flags, faults)
    with RunningJob(tmp_path / "events", command, environ=environment_of(on_standin())) as job:
        job.wait_for("iteration +7/")
        assert job.ctl("admit", "--ranks", "3").returncode == 0
        result = job.finish()
    assert largest_deviation(expected, finished(result)) <= rounding
    assert (3, 1) in lives(result) and "could not be written" not in result.output
    took_part = {rank: {r.fields["step"] for r in result.of("phases") if r.rank == rank} for rank in (0, 3)}
    missed = took_part[0] - took_part[3]
    saved = {int(folder.name.removeprefix("iter_")) for folder in (tmp_path / "saved").glob("iter_*")}
    without, together = min(saved & missed), max(saved - missed - {steps})
    assert without < together
    for step in (without, together):
        load = ("--load", str(tmp_path / "saved"), "--ckpt-step", str(step), "--no-load-rng")
        environment = on_standin() if precision else None
        again = elastic_job(tmp_path / str(step), 1, 1, 1, steps, *DROPOUT, *precision, *load, environment=environment)
        rest = {number: loss for number, loss in expected.items() if number > step}
        assert largest_deviation(rest, finished(again)) <= rounding


@pytest.mark.slow
@pytest.mark.parametrize("copy", ["owner", "mirror"])
def test_a_bit_that_flips_in_a_copy_is_found_and_the_copy_made_anew(tmp_path: Path, copy: str) -> None:
    """With two mirrors; with one, a moment of an owner cannot be told from its mirror's."""
    flags = on_device("--elastic-mirrors", "2", "--global-batch-size", "12")
    fault = f"flip:rank=1,step=3,point=before_step,copy={copy},tensor=exp_avg"
    faults = ("--elastic-verify-interval", "1", "--elastic-allow-inject", "--elastic-inject", fault)
    result = elastic_job(tmp_path / "events", 3, 1, 1, 6, *flags, *faults, environment=on_standin())
    quiet = elastic_job(tmp_path / "quiet", 3, 1, 1, 6, *flags, environment=on_standin())
    assert largest_deviation(finished(quiet), finished(result)) <= ROUNDING
    (found,) = findings(result)
    assert "exp_avg corrupted at rank 1" in found
    assert any(record.fields["added"] for record in result.of("migration"))


@pytest.mark.slow
def test_state_mode_steps_on_the_device_and_survives_a_loss(tmp_path: Path) -> None:
    flags = on_device("--elastic-snapshot", "state", "--elastic-allow-inject")
    kill = ("--elastic-inject", "kill:rank=1,step=3,point=after_update")
    quiet = elastic_job(tmp_path / "quiet", 4, 1, 2, 8, *on_device(), environment=on_standin())
    result = elastic_job(tmp_path / "events", 4, 1, 2, 8, *flags, *kill, environment=on_standin())
    assert largest_deviation(finished(quiet), finished(result)) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, 1])
def test_on_devices_communication_behind_computation_changes_no_bit(tmp_path: Path, devices: int) -> None:
    """Each rank with a device of its own, and all on one, where what moves is staged through host memory."""
    environment = on_standin(STANDIN_DEVICES=str(devices))
    plain, behind = (
        elastic_job(tmp_path / how, 4, 1, 2, 3, *DROPOUT, "--elastic-overlap", how, *buckets, environment=environment)
        for how, buckets in (("none", ()), ("both", ("--elastic-bucket-elements", "1")))
    )
    assert finished(plain) == finished(behind) and plain.norms == behind.norms
