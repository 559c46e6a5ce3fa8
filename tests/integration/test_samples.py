"""Every step is computed from the samples that belong to it: loaders keep their place, and a wrong batch is noticed.

Real jobs with loader workers. What a loader hands out wrongly never becomes part of a committed step.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.elastic_job import ROOT, JobResult, elastic_job, largest_deviation

SCRIPT = ROOT / "tests" / "integration" / "misread_training.py"
STEPS = 6
WORKERS = ("--num-workers", "1")


def misread(folder: Path, fault: str, rank: int, pipeline: int, *flags: str) -> JobResult:
    environment = {"MISREAD_FAULT": fault, "MISREAD_RANK": str(rank)}
    return elastic_job(folder, 2, 1, pipeline, STEPS, *flags, script=SCRIPT, environment=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "pipeline", "world"),
    [(2, 1, 4), (2, 2, 8), (4, 1, 8)],
)
def test_a_rank_that_is_back_within_the_step_of_its_loss_changes_no_sample(
    tmp_path: Path, tensor: int, pipeline: int, world: int
) -> None:
    """Its mates of the tensor-parallel group had read half the step, sat out the rest, and go on under the same plan.

    While the rank is missing each forward of its peers takes so long that it is back before the step's end.
    """
    lost = world - 1
    faults = f"kill:rank={lost},step=3,point=mid_backward;delay:rank=0,missing=1,point=mid_forward,seconds=1,count=0"
    calm = elastic_job(tmp_path / "calm", world, tensor, pipeline, STEPS, *WORKERS)
    killed = elastic_job(
        tmp_path / "killed",
        world,
        tensor,
        pipeline,
        STEPS,
        *WORKERS,
        "--elastic-allow-inject",
        "--elastic-inject",
        faults,
    )
    assert calm.code == 0 and killed.code == 0, killed.output[-4000:]
    assert re.search(rf"step 3 joined by .*\b{lost}\b", killed.output), f"back later than meant\n{killed.output}"
    assert largest_deviation(calm.committed, killed.committed) < 1e-5
    ledgers = [{r.fields["step"]: r.fields["ledger"] for r in result.of("step")} for result in (calm, killed)]
    assert ledgers[0] == ledgers[1], "the same samples with the same contents"


@pytest.mark.slow
def test_a_stale_batch_is_refused_and_the_step_computed_from_the_right_one(tmp_path: Path) -> None:
    calm = elastic_job(tmp_path / "calm", 2, 1, 1, STEPS, *WORKERS)
    result = misread(tmp_path / "stale", "stale_batch", 1, 1, *WORKERS)
    assert result.code == 0, result.output[-4000:]
    # Data-parallel rank 1 reads micro-batches of 2: batch 5 is its second of step 2.
    assert re.search(r"step 2, rank 1: piece \d+ was computed from samples 18-19 instead of 22-23", result.output)
    assert largest_deviation(calm.committed, result.committed) < 1e-5


def test_contents_that_differ_between_the_stages_stop_the_job_and_are_named(tmp_path: Path) -> None:
    result = misread(tmp_path, "other_labels", 1, 2)
    assert result.code == 5, result.output[-4000:]
    assert "step 1 is not committed" in result.output
    assert "ranks 0 and 1 read different contents of samples 5: compare their data files" in result.output
    assert not result.committed
