"""Batches that grow, and iterations that are left out: the losses are plain Megatron's, also with losses and rejoins.

The number of samples of a step is a function of the samples consumed before it. Ranks are lost in a step of one size
and rejoin at a boundary where the size changes, in a step that is left out, and in an evaluation of another size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from megatron.elastic.mcore.patching.releases import in_range
from tests.integration.elastic_job import MODEL, JobResult, deviation_without_loss, elastic_job, largest_deviation
from tests.integration.kill_walk import DROPOUT, ROUNDING
from tests.integration.test_cpu_layouts import logs, losses, run_jobs
from tests.integration.test_engine_parity import NO_DROPOUT

RAMPS_UP = pytest.mark.skipif(not in_range(version("megatron-core"), "<0.18"), reason="this megatron-core ramps not up")
PLAIN_ROUNDING = 2e-6
WARMED = MODEL.index("--lr-warmup-iters")
BY_SAMPLES = [*MODEL[:WARMED], *MODEL[WARMED + 2 :]]
"""Without a warm-up by iterations: the length of a job whose batch grows is a number of samples."""
GROWS = ("--train-samples", "136", "--rampup-batch-size", "4", "4", "24", "--global-batch-size", "16")
LEFT_OUT = ("--iterations-to-skip", "3", "4", "7")
LOOKS = ("--eval-interval", "2", "--eval-iters", "2")
SIZES = [4, 4, 8, 12, *[16] * 6]
BACK = "delay:missing=1,count=0,point=between_steps,seconds=60"
"""Members wait at the next boundary until a lost rank asks to be admitted."""


def job(folder: Path, *flags: str, faults: Sequence[str] = (), layout: tuple[int, int, int] = (4, 1, 2)) -> JobResult:
    ranks, tensor, stages = layout
    injected = ("--elastic-allow-inject", "--elastic-inject", ";".join(faults)) if faults else ()
    result = elastic_job(folder, ranks, tensor, stages, 0, *flags, *injected, model=BY_SAMPLES)
    assert result.code == 0, result.output[-6000:]
    return result


def plain_losses(folder: Path, *flags: str) -> dict[int, float]:
    """Of Megatron at PP 2 × DP 2."""
    arguments = [*BY_SAMPLES, *flags, "--pipeline-model-parallel-size", "2"]
    codes = run_jobs(folder, [{"name": "plain", "world": 4, "seconds": 240, "arguments": arguments}])
    assert codes == {"plain": [0] * 4}, logs(folder, "plain")[-4000:]
    return losses(logs(folder, "plain"))


def consumed(job: JobResult) -> list[int]:
    """Samples of each step, those of steps that are left out too."""
    return [int(end) - int(begin) for begin, end in (record.fields["samples"] for record in job.of("step"))]


@pytest.mark.slow
@RAMPS_UP
def test_losses_are_megatrons_and_ranks_may_be_lost_where_the_batch_grows(tmp_path: Path) -> None:
    flags = (*GROWS, *LEFT_OUT, *LOOKS, *NO_DROPOUT, "--save", str(tmp_path / "saved"), "--save-interval", "100")
    reference = plain_losses(tmp_path, *flags[: flags.index("--save")])
    assert sorted(reference) == [1, 2, 5, 6, 8, 9, 10]
    faults = (
        "kill:rank=1,step=2,point=mid_backward",
        "kill:rank=3,step=4,point=before_vote",
        "kill:rank=2,step=6,point=in_evaluate",
        BACK,
    )
    killed = job(tmp_path / "killed", *flags, faults=faults)
    assert consumed(killed) == SIZES
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {1, 2, 3}
    assert all(record.fields["lost_steps"] == 0 for record in killed.of("recovery"))
    assert {int(rank) for rank in re.findall(r"joined by (\d+)", killed.output)} == {1, 2, 3}
    assert largest_deviation(reference, killed.losses) < PLAIN_ROUNDING
    saved = {int(path.name.removeprefix("iter_")) for path in (tmp_path / "saved").glob("iter_*")}
    # A loss may cut a save short, which then begins again at the next boundary.
    assert {2, 10} < saved, "Megatron saves where the batch grows, and at the end"


@pytest.mark.slow
@RAMPS_UP
@pytest.mark.parametrize(
    ("layout", "flags", "faults"),
    [
        (
            (4, 1, 1),
            ("--rampup-batch-size", "8", "8", "24"),
            ("kill:rank=0,step=3,point=after_reduce", "kill:rank=3,step=4,point=mid_update", BACK),
        ),
        (
            (4, 2, 1),
            ("--sequence-parallel", "--calculate-per-token-loss"),
            ("kill:rank=1,step=2,point=after_ship", "kill:rank=2,step=5,point=mid_gather"),
        ),
        ((4, 1, 2), ("--bf16", *LEFT_OUT), ("kill:rank=0,step=7,point=after_vote", BACK)),
        ((4, 1, 4), (), ("kill:rank=2,step=2,point=mid_forward", BACK)),
        (
            (4, 1, 2),
            ("--elastic-exact", "--micro-batch-size", "1", *LEFT_OUT),
            ("kill:rank=1,step=3,point=after_prepare", "kill:rank=2,step=5,point=mid_backward", BACK),
        ),
    ],
    ids=["dp4", "tp2dp2", "bf16", "pp4", "exact"],
)
def test_losses_are_those_of_the_undisturbed_job(
    tmp_path: Path, layout: tuple[int, int, int], flags: tuple[str, ...], faults: tuple[str, ...]
) -> None:
    whole = job(tmp_path / "whole", *GROWS, *DROPOUT, *flags, layout=layout)
    killed = job(tmp_path / "killed", *GROWS, *DROPOUT, *flags, faults=faults, layout=layout)
    assert killed.of("loss")
    assert deviation_without_loss(whole, killed) <= (0.0 if "--elastic-exact" in flags else ROUNDING)


@pytest.mark.slow
@pytest.mark.skipif(not in_range(version("megatron-core"), ">=0.18"), reason="this megatron-core has no such schedule")
def test_losses_are_megatrons_where_the_batch_grows_by_a_schedule(tmp_path: Path) -> None:
    """Thresholds are tokens, of which a sample has 32. Ranks are lost in a step of each size."""
    at = MODEL.index("--global-batch-size")
    model = [*MODEL[:at], *MODEL[at + 2 : WARMED], *MODEL[WARMED + 2 :]]
    flags = ("--train-samples", "112", "--step-batch-size-schedule", "0:4 256:8 1.024K:16", *NO_DROPOUT)
    arguments = [*model, *flags, "--pipeline-model-parallel-size", "2"]
    codes = run_jobs(tmp_path, [{"name": "plain", "world": 4, "seconds": 240, "arguments": arguments}])
    assert codes == {"plain": [0] * 4}, logs(tmp_path, "plain")[-4000:]
    reference = losses(logs(tmp_path, "plain"))
    faults = (
        "kill:rank=1,step=2,point=mid_backward",
        "kill:rank=3,step=4,point=before_vote",
        "kill:rank=2,step=7,point=after_update",
        BACK,
    )
    injected = ("--elastic-allow-inject", "--elastic-inject", ";".join(faults))
    killed = elastic_job(tmp_path / "killed", 4, 1, 2, 0, *flags, *injected, model=model)
    assert killed.code == 0, killed.output[-6000:]
    assert consumed(killed) == [4, 4, 8, 8, 8, *[16] * 5]
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {1, 2, 3}
    assert all(record.fields["lost_steps"] == 0 for record in killed.of("recovery"))
    assert {int(rank) for rank in re.findall(r"joined by (\d+)", killed.output)} == {1, 2, 3}
    assert largest_deviation(reference, killed.losses) < PLAIN_ROUNDING


@pytest.mark.slow
@RAMPS_UP
def test_a_checkpoint_of_a_growing_batch_goes_on_with_it(tmp_path: Path) -> None:
    """The size follows from the samples in the checkpoint; an iteration before it is not left out again."""
    flags, saved = (*GROWS, *LEFT_OUT, *NO_DROPOUT), tmp_path / "saved"
    saves = ("--save", str(saved), "--save-interval", "100")
    whole = job(tmp_path / "whole", *flags)
    first = job(tmp_path / "first", *flags, *saves, "--exit-interval", "5")
    later = job(tmp_path / "later", *flags, "--load", str(saved), faults=("kill:rank=1,step=6,point=after_vote", BACK))
    assert [*consumed(first), *consumed(later)] == SIZES
    assert largest_deviation(whole.committed, {**first.committed, **later.committed}) <= ROUNDING
