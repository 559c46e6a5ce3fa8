"""A tensor-parallel group goes on with fewer ranks, whatever the precision, the schedule and the model.

Real jobs that lose two ranks, one in a step that is run again and one in a step that is committed: each of two groups
of two goes on as one rank, or a group of four as three ranks and as two. Three ranks share heads, query groups, MLP
columns and vocabulary unevenly. Losses are those of the undisturbed job.
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
GATED = ("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope")
ZERO_BUBBLE = ("--elastic-schedule", "zero-bubble")
UNEVEN = "fewer query groups than ranks, gated, tied, cut sequence, full recompute"
MODELS: dict[str, tuple[int, int, tuple[str, ...], float]] = {
    "zero bubble, grouped queries": (2, 2, (*ZERO_BUBBLE, *LLAMA, *GROUPED), ROUNDING),
    "interleaved, tied embeddings": (2, 2, CHUNKS, ROUNDING),
    "interleaved, cut sequence": (2, 2, (*CHUNKS, "--sequence-parallel"), ROUNDING),
    "full recompute, cut sequence": (2, 2, (*RECOMPUTE, "--sequence-parallel"), ROUNDING),
    "selective recompute": (2, 1, ("--recompute-granularity", "selective"), ROUNDING),
    "bf16": (2, 2, ("--bf16",), 1e-3),
    "fp16 with a loss scale": (2, 1, FP16, 1e-4),
    UNEVEN: (4, 1, (*GATED, *GROUPED, *RECOMPUTE, "--sequence-parallel"), ROUNDING),
    "groups of four: plain": (4, 1, (), ROUNDING),
    "groups of four: zero bubble, gated, untied": (4, 2, (*ZERO_BUBBLE, *LLAMA), ROUNDING),
    "groups of four: interleaved, cut sequence": (4, 2, (*CHUNKS, "--sequence-parallel"), ROUNDING),
    "groups of four: selective recompute": (4, 1, ("--recompute-granularity", "selective"), ROUNDING),
    "groups of four: bf16, gated": (4, 1, ("--bf16", *GATED), 1e-3),
    "groups of four: fp16 with a loss scale": (4, 1, FP16, 1e-4),
}
"""Name → ranks of a group, stages, flags, and the largest relative deviation: sums over fewer ranks are rounded in
another order. Of groups of two there are two, of groups of four one a stage."""
GOES_ON = {2: ("rank 0 goes on", "rank 3 goes on"), 4: ("ranks {0,2,3} go on", "ranks {0,3} go on")}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_whole_groups(tmp_path: Path, name: str) -> None:
    tensor, stages, flags, allowed = MODELS[name]
    world, settings = max(4, tensor * stages), (*DROPOUT, *flags)
    faults = ("--elastic-allow-inject", "--elastic-inject", FAULTS)
    whole = elastic_job(tmp_path / "whole", world, tensor, stages, STEPS, *settings)
    killed = elastic_job(tmp_path / "killed", world, tensor, stages, STEPS, *settings, *ALONE, *faults)
    deviation = deviation_without_loss(whole, killed)
    assert all(line in killed.output for line in GOES_ON[tensor])
    off = "sequence parallelism is off in tensor-parallel group {0,2,3}: 3 does not divide 32 positions"
    assert killed.output.count(off) == (tensor == 4 and "--sequence-parallel" in flags)
    assert "parked" not in killed.output
    assert set(killed.committed) == set(range(1, STEPS + 1))
    assert scales(whole.output) == scales(killed.output)
    print(f"{name}: losses deviate by {deviation:.1e}")
    assert deviation < allowed
