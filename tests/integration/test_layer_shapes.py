"""Layers of different shapes train as under plain Megatron, lose ranks and nothing else, and move to other ranks.

Four layers: with fewer query groups, without attention, without an MLP, and with a linear layer instead of attention.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.elastic_job import deviation_without_loss, elastic_job, largest_deviation
from tests.integration.kill_walk import DROPOUT, ROUNDING, TWO
from tests.integration.test_cpu_layouts import logs, losses
from tests.integration.test_engine_parity import NO_DROPOUT, Case, run_plain
from tests.integration.test_rank_orders import BACK

FLAGS = (
    *("--swiglu", "--normalization", "RMSNorm", "--group-query-attention", "--num-query-groups", "2"),
    *("--position-embedding-type", "rope", "--use-rotary-position-embeddings", "--use-rope-scaling"),
    "--disable-bias-linear",
)
FULL = {"n_heads_in_group": 2}
NONE = {"n_heads_in_group": None}
LAYERS: list[dict[str, Any]] = [
    {"attention": FULL, "ffn": {"ffn_hidden_size": 64}},
    {"attention": NONE | {"no_op": True}, "ffn": {"ffn_hidden_size": 96}},
    {"attention": FULL, "ffn": {"ffn_hidden_size": None, "no_op": True}},
    {"attention": NONE | {"replace_with_linear": True}, "ffn": {"ffn_hidden_size": 128}},
]
FAULTS = f"kill:rank=1,step=1,point=mid_backward;kill:rank=2,step=2,point=after_vote;{BACK}"


def shapes(folder: Path, layers: list[dict[str, Any]]) -> tuple[str, ...]:
    """Flags of a model of these layers."""
    model = {
        "hidden_act": "silu",
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 10000,
        "rope_scaling": {"factor": 8.0},
        "block_configs": layers,
    }
    path = folder / "layers.json"
    path.write_text(json.dumps(model))
    return (*FLAGS, "--heterogeneous-layers-config-path", str(path))


@pytest.mark.slow
def test_losses_are_megatrons_and_lost_ranks_return(tmp_path: Path) -> None:
    flags = shapes(tmp_path, LAYERS)
    run_plain(tmp_path, [Case("pp2dp2", (1, 2, 2), flags)])
    injected = ("--elastic-allow-inject", "--elastic-inject", FAULTS)
    killed = elastic_job(tmp_path / "killed", 4, 1, 2, 5, *flags, *NO_DROPOUT, *injected)
    assert killed.code == 0, killed.output[-6000:]
    assert largest_deviation(losses(logs(tmp_path, "pp2dp2")), killed.losses) < 2e-6
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {1, 2}
    assert all(record.fields["lost_steps"] == 0 for record in killed.of("recovery"))
    assert set(re.findall(r"joined by (\d+)", killed.output)) == {"1", "2"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "stages", "more"),
    [
        (1, 4, ("--no-elastic-respawn",)),
        (2, 1, ("--sequence-parallel",)),
        (1, 2, ("--num-virtual-stages-per-pipeline-rank", "2", "--bf16")),
        (1, 2, ("--elastic-schedule", "zero-bubble")),
        (1, 2, ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")),
        (1, 2, ("--elastic-exact", "--micro-batch-size", "1")),
    ],
    ids=["pp4 moves layers", "tp2dp2", "interleaved bf16", "zero bubble", "recompute", "exact"],
)
def test_losses_are_those_of_the_undisturbed_job(
    tmp_path: Path, tensor: int, stages: int, more: tuple[str, ...]
) -> None:
    layers = LAYERS if tensor == 1 else [*LAYERS[:3], LAYERS[0]]
    flags = (*shapes(tmp_path, layers), *DROPOUT, *TWO, *more)
    ranks = 8 if stages == 4 else 4
    whole = elastic_job(tmp_path / "whole", ranks, tensor, stages, 6, *flags)
    faults = FAULTS if "--no-elastic-respawn" not in more else FAULTS.removesuffix(f";{BACK}")
    killed = elastic_job(
        tmp_path / "killed", ranks, tensor, stages, 6, *flags, "--elastic-allow-inject", "--elastic-inject", faults
    )
    assert deviation_without_loss(whole, killed) <= (0.0 if "--elastic-exact" in more else ROUNDING)
    assert len({record.fields["lost_rank"] for record in killed.of("loss")}) == 2


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_plain_megatron(tmp_path: Path) -> None:
    flags = (*shapes(tmp_path, LAYERS), *NO_DROPOUT)
    saves = ("--save", str(tmp_path / "saved"), "--save-interval", "3")
    whole = elastic_job(tmp_path / "whole", 4, 1, 2, 5, *flags, *saves)
    assert whole.code == 0, whole.output[-6000:]
    run_plain(tmp_path, [Case("later", (1, 1, 2), (*flags, "--load", str(tmp_path / "saved"), "--ckpt-step", "3"))])
    later = losses(logs(tmp_path, "later"))
    assert sorted(later) == [4, 5]  # a process's second line averages two steps
    expected = {4: whole.losses[4], 5: (whole.losses[4] + whole.losses[5]) / 2}
    assert largest_deviation(expected, later) < 2e-6


@pytest.mark.slow
def test_linear_layers_that_would_be_cut_are_refused_in_one_line(tmp_path: Path) -> None:
    job = elastic_job(tmp_path, 2, 2, 1, 5, *shapes(tmp_path, LAYERS))
    assert job.code == 1 and "replace_with_linear" in job.output and "Traceback" not in job.output
