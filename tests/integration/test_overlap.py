"""Communication behind computation changes when sums are taken and parameters come, not one bit of them.

Real jobs: the same flags with and without ``--overlap-grad-reduce`` and ``--overlap-param-gather``, losses and gradient
norms compared with all their digits; and kills while both go on, after which no step is lost.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.elastic_job import JobResult, elastic_job, largest_deviation

STEPS = 4
LAYOUTS: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "pp2dp2": (4, 1, 2, ("--hidden-dropout", "0.1")),
    "dp3-tied": (3, 1, 1, ("--global-batch-size", "12")),
    "pp2dp2-interleaved": (4, 1, 2, ("--num-virtual-stages-per-pipeline-rank", "2")),
    "pp2dp2-zero-bubble-bf16": (4, 1, 2, ("--elastic-schedule", "zero-bubble", "--bf16")),
    "tp2dp2-sequence-parallel": (4, 2, 1, ("--sequence-parallel", "--elastic-verify-interval", "2")),
    "pp2dp2-recompute": (
        4,
        1,
        2,
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "pp2dp2-gloo": (4, 1, 2, ("--elastic-comm", "gloo")),
    "dp2-state": (2, 1, 1, ("--elastic-snapshot", "state")),
    "pp2dp2-exact": (4, 1, 2, ("--elastic-exact", "--calculate-per-token-loss")),
}
OVERLAP = (
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--ddp-bucket-size",
    "1",
)


def job(folder: Path, layout: str, steps: int, *flags: str) -> JobResult:
    world, tensor, pipeline, settings = LAYOUTS[layout]
    result = elastic_job(folder, world, tensor, pipeline, steps, *settings, *flags, "--lr-decay-iters", str(STEPS))
    assert result.code == 0, result.output[-6000:]
    return result


def steps(result: JobResult) -> dict[int, tuple[float, float]]:
    """Step → (loss, gradient norm), all digits."""
    return {
        record.fields["step"]: (record.fields["losses"]["lm loss"], record.fields["grad_norm"])
        for record in result.of("step")
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_and_without_overlap_training_is_alike_bit_by_bit(tmp_path: Path, layout: str) -> None:
    plain, behind = job(tmp_path / "plain", layout, STEPS), job(tmp_path / "behind", layout, STEPS, *OVERLAP)
    assert set(steps(plain)) == set(range(1, STEPS + 1))
    assert steps(behind) == steps(plain)
    assert not re.search(r"--(overlap|ddp-bucket)\S* +\S+ +(False|none)", behind.output), "they have an effect"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2dp2", "pp2dp2-interleaved", "tp2dp2-sequence-parallel"])
@pytest.mark.parametrize("point", ["mid_overlap_reduce,nth=2", "mid_reduce", "mid_overlap_gather,nth=2", "mid_gather"])
def test_a_rank_lost_while_communication_goes_on_costs_no_step(tmp_path: Path, layout: str, point: str) -> None:
    linger = "delay:missing=1,count=0,point=before_step,seconds=0.1"  # leaves the processors to the rank that starts
    script = ("--elastic-allow-inject", "--elastic-inject", f"{linger};kill:rank=1,step=2,point={point}")
    whole = job(tmp_path / "whole", layout, STEPS)
    killed = job(tmp_path / "killed", layout, 12, *OVERLAP, *script)
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {1}
    assert all(record.fields["lost_steps"] == 0 for record in killed.of("recovery"))
    assert set(killed.committed) == set(range(1, 13))
    assert largest_deviation(whole.committed, killed.committed) < 1e-5
    assert any(record.fields["transition"] == "join" for record in killed.of("certificate")), "the rank came back"
    assert all(record.fields["passed"] for record in killed.of("certificate"))
