"""With ``--elastic-expert-balance replicas`` several ranks compute a hot expert, until their load is nearly even.

The router of a new model prefers some experts, and here no loss balances them: of eight experts, two a rank, one has
more tokens than a mean rank. Losses are those of a job without replicas, also when a rank is lost that has one, and
comes back. A checkpoint has each expert once, where the launch has it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.elastic.state.expert_load import SPAN
from tests.integration.elastic_job import JobResult, deviation_without_loss, elastic_job, largest_deviation
from tests.integration.kill_walk import ROUNDING
from tests.integration.test_even_homes import imbalances

STEPS, MADE = 2 * SPAN + 10, 2 * SPAN + 1
"""Replicas are made in the steps after the first span. Step ``MADE`` follows the next measured load."""
SKEWED = (
    *("--num-layers", "2", "--num-experts", "8", "--moe-router-topk", "1", "--moe-router-pre-softmax"),
    *("--moe-ffn-hidden-size", "32", "--disable-bias-linear", "--expert-model-parallel-size", "4"),
    *("--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", "0"),
)
WAITS = "delay:missing=1,count=0,point=before_step,seconds=0.5"


def job(folder: Path, *flags: str, steps: int = STEPS) -> JobResult:
    found = elastic_job(folder, 4, 1, 1, steps, *SKEWED, *flags)
    assert found.code == 0, found.output
    return found


def policy(name: str, more: int = 2) -> tuple[str, ...]:
    return "--elastic-expert-balance", name, "--elastic-expert-replicas", str(more)


def kill(rank: int, step: int, point: str = "mid_backward") -> tuple[str, ...]:
    """A rank dies, and its peers take their time until it is back, so that it is before the job ends."""
    faults = f"kill:rank={rank},step={step},point={point};{WAITS}"
    return "--elastic-allow-inject", "--elastic-inject", faults


def check_replicas(still: JobResult, found: JobResult, lost: set[int]) -> None:
    """Replicas were made, ``lost`` ranks came back, and losses are the same."""
    assert "replicas then" in found.output
    assert {record.fields["lost_rank"] for record in found.of("loss")} == lost
    joined = {record.fields["outcome"] for record in found.of("recovery")}
    assert all(any(re.match(rf"joined by (\d, )*{rank}\b", outcome) for outcome in joined) for rank in lost), joined
    (begin, skewed), (same, even) = imbalances(still), imbalances(found)
    print(f"busiest rank: {begin:.3f}, later {skewed:.3f} times the mean, with replicas {even:.3f}")
    assert begin == same and deviation_without_loss(still, found) <= ROUNDING


@pytest.mark.slow
def test_losses_do_not_depend_on_replicas_and_a_lost_one_comes_back(tmp_path: Path) -> None:
    still = job(tmp_path / "still")
    found = job(tmp_path / "replicas", *policy("replicas"), *kill(1, MADE))
    check_replicas(still, found, {1})
    before, made = (record.fields["replicas"] for record in found.of("experts"))
    assert not before and made and all(max(counts) > 1 for counts in made.values())
    assert imbalances(found)[1] - 1.0 < 0.7 * (imbalances(still)[1] - 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicas", "lazarus"])
def test_replicas_even_the_load_and_checkpoints_have_each_expert_once(tmp_path: Path, name: str) -> None:
    saved = MADE
    saves = ("--save", str(tmp_path / "saved"), "--save-interval", str(saved))
    still, found = job(tmp_path / "still"), job(tmp_path / "made", *policy(name), *saves)
    check_replicas(still, found, set())
    counts = found.of("experts")[-1].fields["replicas"]
    assert counts and all(max(of) > 1 and min(of) >= 1 for of in counts.values())
    if name == "replicas":
        skewed, even = imbalances(still)[-1], imbalances(found)[-1]
        assert even - 1.0 < 0.7 * (skewed - 1.0)
    loaded = job(tmp_path / "loaded", "--load", str(tmp_path / "saved"), "--ckpt-step", str(saved))
    assert min(loaded.committed) == saved + 1
    later = {step: loss for step, loss in still.committed.items() if step > saved}
    assert largest_deviation(later, loaded.committed) <= ROUNDING


@pytest.mark.slow
def test_two_losses_with_lazarus(tmp_path: Path) -> None:
    script = f"kill:rank=3,step={MADE + 1},point=mid_update;" + kill(0, MADE, "after_vote")[-1]
    still = job(tmp_path / "still")
    found = job(tmp_path / "lost", *policy("lazarus"), *kill(0, MADE)[:2], script, "--elastic-mirrors", "2")
    check_replicas(still, found, {0, 3})
