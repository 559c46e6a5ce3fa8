"""Whole jobs on the stand-in accelerator whose bulk data goes through a vendor's library, and which lose ranks.

The library moves real bytes in the order of the devices' streams; what it lacks differs by version. A rank is killed
between the collectives of a reduce, where the others wait for it on their devices.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import ROOT, JobResult, deviation_without_loss, elastic_job
from tests.integration.kill_walk import DROPOUT, TWO
from tests.integration.test_rank_orders import BACK
from tests.standin.library import build
from tests.standin.vendor import VERSIONS, with_hccl, with_nccl

pytestmark = pytest.mark.slow

STEPS = 8


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    build()


def environment(folder: Path, version: str) -> dict[str, str]:
    return with_hccl(folder) if version == "hccl" else with_nccl(folder, version)


def job(
    folder: Path,
    version: str,
    *flags: str,
    layout: tuple[int, int, int] = (4, 1, 1),
    script: Path = ROOT / "pretrain_gpt.py",
) -> JobResult:
    more = (*DROPOUT, *TWO, *flags)
    place = environment(folder, version)
    return elastic_job(folder / "events", *layout, STEPS, *more, environment=place, seconds=200, script=script)


def losing(*faults: str) -> tuple[str, str, str]:
    return ("--elastic-allow-inject", "--elastic-inject", ";".join((BACK, *faults)))


def communicators(folder: Path, version: str) -> int:
    """The number of communicators that the job made."""
    return len(list((folder / ("basic" if version == "hccl" else version)).glob("id-*")))


@pytest.mark.parametrize("version", [*VERSIONS, "hccl"])
def test_a_rank_killed_during_a_collective_costs_no_step_and_comes_back(tmp_path: Path, version: str) -> None:
    whole = job(tmp_path / "whole", version)
    killed = job(tmp_path / "killed", version, *losing("kill:rank=1,step=3,point=mid_reduce"))
    assert deviation_without_loss(whole, killed) <= 1e-6
    assert {(record.rank, record.incarnation) for record in killed.of("phases")} >= {(1, 1)}
    assert communicators(tmp_path / "killed", version) > communicators(tmp_path / "whole", version) > 0


@pytest.mark.parametrize("version", ["full", "hccl"])
def test_a_rank_that_dies_while_others_connect_is_the_only_further_loss(tmp_path: Path, version: str) -> None:
    """After a loss three ranks connect, and the last of them dies in there: the library lets the others wait."""
    whole = job(tmp_path / "whole", version)
    environment(tmp_path / "killed", version)  # builds the library, beside which it looks for who is to die
    (tmp_path / "killed" / ("basic" if version == "hccl" else version) / "die-2of3").touch()
    killed = job(tmp_path / "killed", version, *losing("kill:rank=1,step=3,point=mid_reduce"))
    assert deviation_without_loss(whole, killed) <= 1e-6
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {1, 3}
    assert {(record.rank, record.incarnation) for record in killed.of("phases")} >= {(1, 1), (3, 1)}


@pytest.mark.parametrize("version", ["full", "basic", "hccl"])
def test_stages_and_tensor_parallel_groups_lose_a_rank(tmp_path: Path, version: str) -> None:
    """Within a stage two replicas of two ranks: activations are summed by the library too, in bf16."""
    flags = ("--bf16",)
    whole = job(tmp_path / "whole", version, *flags, layout=(4, 2, 1))
    faults = losing("kill:rank=3,step=2,point=mid_backward")
    killed = job(tmp_path / "killed", version, *flags, *faults, layout=(4, 2, 1))
    assert deviation_without_loss(whole, killed) <= 1e-3


SHARES_A_VALUE = """
import torch

import pretrain_gpt

read = pretrain_gpt.get_batch


def shared(*given):
    from megatron.core import mpu  # once Megatron is adapted to the device

    sends = mpu.get_tensor_model_parallel_rank() == 0
    kind = {"dtype": torch.DTYPE, "device": "cuda"}
    value = torch.ones(1, **kind) if sends else torch.empty(1, **kind)
    source, group = mpu.get_tensor_model_parallel_src_rank(), mpu.get_tensor_model_parallel_group()
    torch.distributed.broadcast(value, src=source, group=group)
    if value.item() != 1:
        with open("RECEIVED", "a") as received:
            print(value.item(), file=received)
        raise ValueError(f"received {value.item()}")
    return read(*given)


if __name__ == "__main__":
    pretrain_gpt.get_batch = shared
    pretrain_gpt.main()
"""
"""A user's script whose ranks share a value, and look at it at once."""


@pytest.mark.parametrize("shares", ["", "float32", "int64"], ids=["as launched", "shares a value", "shares a number"])
@pytest.mark.parametrize("version", ["full", "basic", "hccl"])
def test_who_sends_the_samples_dies_alone(tmp_path: Path, version: str, shares: str) -> None:
    """The others of its tensor-parallel group wait for its samples, and the library lets them go on without."""
    flags = ("--no-create-attention-mask-in-dataloader", "--eval-interval", "4", "--eval-iters", "2")
    script = ROOT / "pretrain_gpt.py"
    if shares:
        script = tmp_path / "shares.py"
        script.write_text(SHARES_A_VALUE.replace("DTYPE", shares).replace("RECEIVED", str(tmp_path / "received")))
    whole = job(tmp_path / "whole", version, *flags, layout=(4, 2, 1), script=script)
    for point, step in (("mid_forward", 3), ("in_evaluate", 4)):
        faults = losing(f"kill:rank=0,step={step},point={point}")
        killed = job(tmp_path / point, version, *flags, *faults, layout=(4, 2, 1), script=script)
        assert deviation_without_loss(whole, killed) <= 1e-6
        assert {record.fields["lost_rank"] for record in killed.of("loss")} == {0}
    if shares:  # the values that were never sent; of integers zeros, which break no table
        assert {*(tmp_path / "received").read_text().split()} == {"nan" if shares == "float32" else "0"}
