"""A tensor-parallel group goes on with fewer ranks, whatever the precision, the schedule and the model.

Real jobs of two groups of two. Each group loses a rank, in a step that is run again and in one that is committed, and
goes on as one rank. Losses are those of the undisturbed job.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import deviation_without_loss, elastic_job
from tests.integration.kill_walk import DROPOUT, ROUNDING
from tests.integration.test_precision import FP16, scales

STEPS = 6
FAULTS = "kill:rank=1,step=3,point=mid_backward;kill:rank=2,step=4,point=after_vote"
ALONE = ("--no-elastic-respawn", "--elastic-mirrors", "2")
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
LLAMA = (
    "--swiglu",
    "--normalization",
    "RMSNorm",
    "--position-embedding-type",
    "rope",
    "--disable-bias-linear",
    "--untie-embeddings-and-output-weights",
)
GROUPED = ("--group-query-attention", "--num-query-groups", "2", "--qk-layernorm")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
MODELS: dict[str, tuple[int, tuple[str, ...], float]] = {
    "zero bubble, grouped queries": (2, ("--elastic-schedule", "zero-bubble", *LLAMA, *GROUPED), ROUNDING),
    "interleaved, tied embeddings": (2, CHUNKS, ROUNDING),
    "interleaved, cut sequence": (2, (*CHUNKS, "--sequence-parallel"), ROUNDING),
    "full recompute, cut sequence": (2, (*RECOMPUTE, "--sequence-parallel"), ROUNDING),
    "selective recompute": (1, ("--recompute-granularity", "selective"), ROUNDING),
    "bf16": (2, ("--bf16",), 1e-3),
    "fp16 with a loss scale": (1, FP16, 1e-4),
}
"""Name → stages, flags, and the largest relative deviation: sums over two ranks are rounded in another order."""


@pytest.mark.parametrize(
    "name", [name if name.startswith("zero") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_losses_are_those_of_whole_groups(tmp_path: Path, name: str) -> None:
    stages, flags, allowed = MODELS[name]
    settings = (*DROPOUT, *flags)
    faults = ("--elastic-allow-inject", "--elastic-inject", FAULTS)
    whole = elastic_job(tmp_path / "whole", 4, 2, stages, STEPS, *settings)
    killed = elastic_job(tmp_path / "killed", 4, 2, stages, STEPS, *settings, *ALONE, *faults)
    deviation = deviation_without_loss(whole, killed)
    for rank in (0, 3):
        assert f"rank {rank} goes on" in killed.output
    assert "parked" not in killed.output
    assert set(killed.committed) == set(range(1, STEPS + 1))
    assert scales(whole.output) == scales(killed.output)
    print(f"{name}: losses deviate by {deviation:.1e}")
    assert deviation < allowed
