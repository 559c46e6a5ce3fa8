"""Multi-token prediction trains as under plain Megatron, and loses ranks and nothing else.

Both ends of the model look tokens up, so a rank that takes over an end needs the weight of the embedding. The losses of
further tokens are those of the undisturbed job too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.elastic_job import JobResult, deviation_without_loss, elastic_job, largest_deviation
from tests.integration.kill_walk import DROPOUT, ROUNDING, TWO
from tests.integration.test_cpu_layouts import logs, losses
from tests.integration.test_engine_parity import (
    EXPERTS,
    NO_DROPOUT,
    PER_TOKEN,
    RECOMPUTE,
    SHARED,
    UNTIED,
    Case,
    run_plain,
)
from tests.integration.test_experts import BIAS
from tests.integration.test_rank_orders import BACK

FURTHER = ("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.3", "--position-embedding-type", "rope")
FAULTS = f"kill:rank=1,step=1,point=mid_backward;kill:rank=2,step=2,point=after_vote;{BACK}"
PLAIN_ROUNDING = 2e-6


def further_losses(text: str) -> dict[int, list[float]]:
    """Iteration → losses of the second and the third token, as printed."""
    found = re.findall(r"iteration\s+(\d+)/.*?mtp_1 loss: (\S+).*?mtp_2 loss: (\S+)", text)
    return {int(step): [float(loss) for loss in both] for step, *both in found}


ROUTED = (*EXPERTS[:2], "--moe-router-topk", "2", "--disable-bias-linear", *BIAS)
BESIDE_PLAIN: Mapping[str, tuple[str, ...]] = {
    "dense": (),
    "a bias, the head alone in its chunk": (*ROUTED, "--pipeline-model-parallel-layout", "Et|tt|t|mmL"),
    "a bias, two share": (*ROUTED, *SHARED),
    "a bias, one layer for all": (*ROUTED, "--mtp-use-repeated-layer"),
    "a bias, a dense layer last": (*ROUTED, "--moe-layer-freq", "[1]*3+[0]"),
    "a layout of two stages": ("--pipeline-model-parallel-layout", "Ett|ttmmL"),
}
"""Name → flags. The rate of the bias changes choices of experts within a few steps."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE_PLAIN)
def test_losses_are_megatrons_and_lost_ranks_return(tmp_path: Path, name: str) -> None:
    flags = (*FURTHER, *UNTIED, *BESIDE_PLAIN[name])
    run_plain(tmp_path, [Case("pp2dp2", (1, 2, 2), flags)])
    injected = ("--elastic-allow-inject", "--elastic-inject", FAULTS)
    killed = elastic_job(tmp_path / "killed", 4, 1, 2, 5, *flags, *NO_DROPOUT, *injected)
    assert killed.code == 0, killed.output[-6000:]
    assert_as_plain(logs(tmp_path, "pp2dp2"), killed)
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {1, 2}
    assert set(re.findall(r"joined by (\d+)", killed.output)) == {"1", "2"}


def assert_as_plain(plain: str, killed: JobResult) -> None:
    """Every loss of the job is that in the log of plain Megatron, those of further tokens too."""
    assert largest_deviation(losses(plain), killed.losses) < PLAIN_ROUNDING
    expected, found = further_losses(plain), further_losses(killed.output)
    assert sorted(expected) == [1, 2, 3, 4, 5]
    for step, both in expected.items():
        assert found[step] == pytest.approx(both, rel=PLAIN_ROUNDING)


ALONE = "--no-elastic-respawn"
JOBS: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "four stages, none returns": (4, 1, 4, (*UNTIED, ALONE)),
    "tied, cut sequence": (4, 2, 1, ("--sequence-parallel",)),
    "tied, per token": (4, 1, 1, ("--calculate-per-token-loss",)),
    "three axes": (8, 2, 2, (*UNTIED, "--sequence-parallel")),
    "interleaved, bf16": (4, 1, 2, (*UNTIED, "--num-virtual-stages-per-pipeline-rank", "2", "--bf16")),
    "zero bubble": (4, 1, 2, (*UNTIED, "--elastic-schedule", "zero-bubble", *PER_TOKEN, "--eod-mask-loss")),
    "recompute": (4, 1, 2, (*UNTIED, *RECOMPUTE)),
    "one layer for all": (4, 1, 2, (*UNTIED, "--mtp-use-repeated-layer")),
    "experts": (4, 1, 2, (*UNTIED, *EXPERTS)),
    "two share": (4, 1, 2, (*UNTIED, *EXPERTS, *SHARED)),
    "two share, none returns": (4, 1, 1, (*EXPERTS, *SHARED, ALONE)),
    "two share, three axes": (8, 2, 2, (*UNTIED, *EXPERTS, *SHARED, "--sequence-parallel")),
    "a bias, two share, three axes": (8, 2, 2, (*UNTIED, *ROUTED, *SHARED, "--sequence-parallel")),
    "a bias, recompute, none returns": (4, 1, 2, (*UNTIED, *ROUTED, *RECOMPUTE, ALONE)),
    "four share, recompute": (4, 1, 1, (*EXPERTS, "--expert-model-parallel-size", "4", *RECOMPUTE)),
}
"""Name → ranks, tensor-parallel size, stages, and flags."""


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_losses_are_those_of_the_undisturbed_job(tmp_path: Path, name: str) -> None:
    ranks, tensor, stages, more = JOBS[name]
    flags = (*FURTHER, *DROPOUT, *TWO, *more)
    whole = elastic_job(tmp_path / "whole", ranks, tensor, stages, 6, *flags)
    faults = "kill:rank=3,step=2,point=mid_backward" if ALONE in more else FAULTS
    killed = elastic_job(
        tmp_path / "killed", ranks, tensor, stages, 6, *flags, "--elastic-allow-inject", "--elastic-inject", faults
    )
    assert deviation_without_loss(whole, killed) <= ROUNDING
    expected, found = further_losses(whole.output), further_losses(killed.output)
    assert len(expected) == 6
    for step, both in expected.items():
        assert found[step] == pytest.approx(both, rel=ROUNDING)


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_plain_megatron(tmp_path: Path) -> None:
    flags = (*FURTHER, *UNTIED)
    saves = ("--save", str(tmp_path / "saved"), "--save-interval", "3")
    faults = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=2,step=2,point=before_vote")
    first = elastic_job(tmp_path / "first", 4, 1, 2, 5, *flags, *NO_DROPOUT, *saves, *faults)
    assert first.code == 0, first.output[-6000:]
    later_flags = (*flags, "--load", str(tmp_path / "saved"), "--ckpt-step", "3")
    run_plain(tmp_path, [Case("later", (1, 2, 1), later_flags)])
    later = losses(logs(tmp_path, "later"))
    assert sorted(later) == [4, 5]  # a process's second line averages two steps
    expected = {4: first.losses[4], 5: (first.losses[4] + first.losses[5]) / 2}
    assert largest_deviation(expected, later) < PLAIN_ROUNDING


@pytest.mark.slow
def test_a_lost_last_stage_is_taken_over_and_saved(tmp_path: Path) -> None:
    """By a rank that had the embedding; it writes the checkpoint's part of the lost stage too."""
    flags = (*FURTHER, *UNTIED)
    saves = ("--save", str(tmp_path / "saved"), "--save-interval", "4", ALONE, *TWO)
    faults = "kill:rank=2,step=2,point=mid_backward;kill:rank=3,step=3,point=before_vote"
    injected = ("--elastic-allow-inject", "--elastic-inject", faults)
    whole = elastic_job(tmp_path / "whole", 4, 1, 2, 5, *flags, *NO_DROPOUT)
    killed = elastic_job(tmp_path / "killed", 4, 1, 2, 5, *flags, *NO_DROPOUT, *saves, *injected)
    assert deviation_without_loss(whole, killed) <= ROUNDING
    run_plain(tmp_path, [Case("later", (1, 2, 1), (*flags, "--load", str(tmp_path / "saved"), "--ckpt-step", "4"))])
    assert largest_deviation({5: killed.losses[5]}, losses(logs(tmp_path, "later"))) < PLAIN_ROUNDING


@pytest.mark.slow
def test_a_bias_is_saved_for_plain_megatron_and_read_from_it(tmp_path: Path) -> None:
    """The layers behind the model's own count tokens too, and their bias is in the checkpoint of either."""
    flags = (*FURTHER, *UNTIED, *ROUTED)
    saves = ("--save", str(tmp_path / "saved"), "--save-interval", "3")
    faults = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=2,step=2,point=before_vote")
    first = elastic_job(tmp_path / "first", 4, 1, 2, 5, *flags, *NO_DROPOUT, *saves, *faults)
    assert first.code == 0, first.output[-6000:]
    load = ("--load", str(tmp_path / "saved"), "--ckpt-step", "3")
    run_plain(tmp_path, [Case("later", (1, 2, 1), (*flags, *load))])
    # Megatron's second line after a start has the mean of two steps.
    expected = {4: first.losses[4], 5: (first.losses[4] + first.losses[5]) / 2}
    assert largest_deviation(expected, losses(logs(tmp_path, "later"))) < PLAIN_ROUNDING
    again = elastic_job(tmp_path / "again", 4, 1, 2, 5, *flags, *NO_DROPOUT, *load)
    assert again.code == 0, again.output[-6000:]
    assert largest_deviation(expected, again.losses) < PLAIN_ROUNDING
