"""With ``--elastic-expert-balance homes`` experts move until the ranks of a crew receive about the same tokens.

The router of a new model prefers some experts, and here no loss balances them. Losses are those of a job in which
no expert moves: to the last bit, since a rank adds up the same rows in the same order wherever an expert is, and two
experts a token give the same sum in either order. A rank that is lost later, and a checkpoint of experts that have
moved, are like any other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.elastic.state.expert_load import SPAN
from tests.integration.elastic_job import JobResult, deviation_without_loss, elastic_job, largest_deviation
from tests.integration.kill_walk import DROPOUT, ROUNDING

STEPS, SAVED = 2 * SPAN + 4, SPAN + 10
SKEWED = (
    *("--num-experts", "16", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--disable-bias-linear"),
    *("--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", "0", "--expert-model-parallel-size", "4"),
)
HOMES = ("--elastic-expert-balance", "homes")
KILL = ("--elastic-allow-inject", "--elastic-inject", f"kill:rank=2,step={SAVED + 2},point=mid_backward")


def job(folder: Path, *flags: str) -> JobResult:
    found = elastic_job(folder, 4, 1, 1, STEPS, *SKEWED, *DROPOUT, *flags)
    assert found.code == 0, found.output
    return found


def imbalances(found: JobResult) -> list[float]:
    """As measured after each span of steps."""
    return [record.fields["imbalance"] for record in found.of("experts")]


@pytest.mark.slow
def test_losses_do_not_depend_on_where_experts_are(tmp_path: Path) -> None:
    still, saves = job(tmp_path / "still"), ("--save", str(tmp_path / "saved"), "--save-interval", str(SAVED))
    moved = job(tmp_path / "moved", *HOMES, *saves)
    assert deviation_without_loss(still, moved) == 0.0
    assert moved.output.count("experts move to other ranks") == 1
    (skewed, same), (begin, even) = imbalances(still), imbalances(moved)
    print(
        f"busiest rank: {skewed:.3f} and {same:.3f} times the mean, with homes of the load {begin:.3f} and {even:.3f}"
    )
    assert skewed == begin and even - 1.0 < 0.7 * (same - 1.0)

    killed = job(tmp_path / "killed", *HOMES, *KILL)
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {2}
    assert deviation_without_loss(still, killed) <= ROUNDING
    loaded = job(tmp_path / "loaded", "--load", str(tmp_path / "saved"), "--ckpt-step", str(SAVED))
    assert min(loaded.committed) == SAVED + 1
    later = {step: loss for step, loss in still.committed.items() if step > SAVED}
    assert largest_deviation(later, loaded.committed) == 0.0, "a checkpoint has each expert where the launch has it"
