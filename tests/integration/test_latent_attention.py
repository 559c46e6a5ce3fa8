"""Multi-latent attention trains as under plain Megatron, and loses ranks and nothing else.

Keys and values have different widths, so a core attention that takes one for the other fails here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import deviation_without_loss, elastic_job, largest_deviation
from tests.integration.kill_walk import DROPOUT, ROUNDING, TWO
from tests.integration.test_cpu_layouts import logs, losses
from tests.integration.test_engine_parity import Case, run_plain

LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "16", "--kv-lora-rank", "12", "--qk-head-dim", "8"),
    *("--qk-pos-emb-head-dim", "4", "--v-head-dim", "6", "--position-embedding-type", "rope"),
    *("--normalization", "RMSNorm", "--qk-layernorm", "--disable-bias-linear", "--swiglu"),
)
STEPS = 6
FAULTS = "kill:rank=1,step=2,point=mid_backward;kill:rank=2,step=4,point=after_vote"
JOBS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "two stages": (1, 2, ()),
    "cut heads, cut sequence": (2, 1, ("--sequence-parallel",)),
    "cut heads": (2, 1, ()),
    "interleaved, bf16": (1, 2, ("--num-virtual-stages-per-pipeline-rank", "2", "--bf16")),
    "zero bubble": (1, 2, ("--elastic-schedule", "zero-bubble")),
    "full recompute": (
        1,
        2,
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "recompute of projections": (1, 2, ("--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj")),
    "experts": (1, 2, ("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-aux-loss-coeff", "0.01")),
    "exact": (1, 2, ("--elastic-exact",)),
}
"""Name → tensor-parallel size, stages, and flags; four ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_losses_are_those_of_the_undisturbed_job(tmp_path: Path, name: str) -> None:
    tensor, stages, more = JOBS[name]
    flags = (*LATENT, *DROPOUT, *TWO, *more)
    whole = elastic_job(tmp_path / "whole", 4, tensor, stages, STEPS, *flags)
    faults = ("--elastic-allow-inject", "--elastic-inject", FAULTS)
    killed = elastic_job(tmp_path / "killed", 4, tensor, stages, STEPS, *flags, *faults)
    deviation = deviation_without_loss(whole, killed)
    print(f"{name}: losses deviate by {deviation:.1e}")
    assert deviation <= (0.0 if name == "exact" else ROUNDING)
    assert len({record.fields["lost_rank"] for record in killed.of("loss")}) == 2


@pytest.mark.slow
def test_losses_are_megatrons(tmp_path: Path) -> None:
    cases = (
        Case("pp2dp2", (1, 2, 2), LATENT),
        Case("tp2pp2", (2, 2, 1), (*LATENT, "--sequence-parallel")),
        Case("dp2", (1, 1, 2), tuple(flag for flag in LATENT if flag not in ("--q-lora-rank", "16"))),
    )
    run_plain(tmp_path, cases)
    for case in cases:
        reference = losses(logs(tmp_path, case.name))
        assert largest_deviation(reference, case.elastic(tmp_path / case.name).losses) < 2e-6, case.name
