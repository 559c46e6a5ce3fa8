"""The zero-bubble table changes when weight gradients are formed, not one bit of them.

Real jobs: the same flags under ``--elastic-schedule 1f1b`` and ``zero-bubble``,
losses and gradient norms compared with all their digits, also on the rerouted
tables after a loss.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import JobResult, elastic_job, largest_deviation

STEPS = 4
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "pp4-tied": (1, 4, ()),
    "tp2pp2-sequence-parallel": (2, 2, ("--sequence-parallel", "--untie-embeddings-and-output-weights")),
    "pp2dp2-bf16": (1, 2, ("--bf16",)),
    "pp2dp2-interleaved": (1, 2, ("--num-virtual-stages-per-pipeline-rank", "2")),
    "pp2dp2-recompute": (
        1,
        2,
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
}
KILL = ("--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject")


def job(folder: Path, layout: str, schedule: str, *flags: str) -> JobResult:
    tensor, pipeline, settings = LAYOUTS[layout]
    result = elastic_job(folder, 4, tensor, pipeline, STEPS, *settings, "--elastic-schedule", schedule, *flags)
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
def test_split_and_whole_backward_train_alike_bit_by_bit(tmp_path: Path, layout: str) -> None:
    whole, split = (job(tmp_path / name, layout, name) for name in ("1f1b", "zero-bubble"))
    assert set(steps(whole)) == set(range(1, STEPS + 1))
    assert steps(split) == steps(whole)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["mid_backward,nth=3", "after_reduce"])
def test_rerouted_tables_split_the_backward_too(tmp_path: Path, point: str) -> None:
    layout = "pp2dp2-recompute"
    whole = job(tmp_path / "whole", layout, "1f1b")
    killed = job(tmp_path / "killed", layout, "zero-bubble", *KILL, f"kill:rank=2,step=2,point={point}")
    lost = [record.fields["lost_rank"] for record in killed.of("loss")]
    assert set(lost) == {2}
    assert largest_deviation(whole.committed, killed.committed) < 1e-5
