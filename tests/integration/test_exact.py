"""``--elastic-exact``: losses of ranks, another layout at the start, a rank that comes back: the same bits.

What is compared is what a user could: the hash of every tensor of the last
checkpoint (weights and moments), and of every committed step's loss and norm.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.elastic_job import JobResult, elastic_job
from tools.fingerprint import checkpoint_fingerprint, differences, events_fingerprint

STEPS = 6
LONG = 250
"""Steps enough for three lost ranks to come back one after the other."""
EXACT = ("--elastic-exact", "--calculate-per-token-loss", "--lr-decay-iters", "12")


def trained(
    folder: Path, start: Path, ranks: int, tensor: int, pipeline: int, *flags: str, steps: int = STEPS
) -> JobResult:
    """Train to ``steps`` from the checkpoint at ``start`` and save at the end."""
    keep = ("--load", str(start), "--save", str(folder / "checkpoint"), "--save-interval", "1000")
    done = elastic_job(folder / "events", ranks, tensor, pipeline, steps, *EXACT, *keep, *flags)
    assert done.code == 0, done.output[-4000:]
    return done


def same_bits(one: Path, other: Path) -> None:
    """Both ended with the same weights, moments, losses and norms."""
    for kind, read in (("checkpoint", checkpoint_fingerprint), ("events", events_fingerprint)):
        assert not list(differences(read(one / kind), read(other / kind))), (one.name, other.name, kind)


def start(tmp_path: Path, tensor: int = 1, *flags: str, steps: int = STEPS) -> Path:
    """A checkpoint of step 1 of ``steps``: Megatron draws initial weights by pipeline stage, so runs start from one."""
    folder = tmp_path / "start"
    save = ("--save", str(folder), "--save-interval", "1", "--exit-interval", "1")
    begun = elastic_job(tmp_path / "begun", tensor, tensor, 1, steps, *EXACT, *save, *flags)
    assert begun.code == 0, begun.output[-4000:]
    return folder


def kill(*where: str) -> tuple[str, ...]:
    return "--elastic-allow-inject", "--elastic-inject", ";".join(f"kill:{each}" for each in where)


def loses_a_rank_as_if_alone(tmp_path: Path, *flags: str) -> None:
    """A pipeline run with ``flags`` loses a rank in the middle of a step, and ends with the bits of one rank alone."""
    common = start(tmp_path)
    trained(tmp_path / "alone", common, 1, 1, 1)
    faults = kill("rank=3,step=4,point=mid_backward")
    disturbed = trained(tmp_path / "disturbed", common, 4, 1, 2, *faults, "--no-elastic-respawn", *flags)
    assert re.search(r"recovered at generation 2 without rank 3 .*: step 4 re-run", disturbed.output)
    same_bits(tmp_path / "alone", tmp_path / "disturbed")


def test_a_pipeline_that_loses_a_rank_ends_with_the_bits_of_one_rank_alone(tmp_path: Path) -> None:
    loses_a_rank_as_if_alone(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--elastic-schedule", "zero-bubble"),
        ("--elastic-policy", "recycle"),
        ("--elastic-policy", "torchft-batch"),
        ("--elastic-policy", "mindspeed"),
    ],
    ids=lambda flags: flags[1],
)
def test_so_does_every_schedule_and_policy_that_keeps_the_batch(tmp_path: Path, flags: tuple[str, str]) -> None:
    loses_a_rank_as_if_alone(tmp_path, *flags)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_losses_at_many_points_and_returns_leave_no_trace(tmp_path: Path, tensor: int) -> None:
    flags = ("--sequence-parallel",) if tensor == 2 else ("--bf16",)
    common = start(tmp_path, tensor, *flags, steps=LONG)
    trained(tmp_path / "calm", common, 2 * tensor, tensor, 1, *flags, steps=LONG)
    faults = kill(
        "rank=1,step=2,point=after_reduce", "rank=2,losses=1,point=after_vote", "rank=0,losses=2,point=mid_gather"
    )
    pipeline = 1 if tensor == 2 else 2
    torn = trained(tmp_path / "torn", common, 4, tensor, pipeline, *flags, *faults, steps=LONG)
    lost = {(record.fields["lost_rank"], record.fields["lost_incarnation"]) for record in torn.of("loss")}
    assert lost == {(0, 0), (1, 0), (2, 0)} and torn.output.count("joined by") >= 2
    same_bits(tmp_path / "calm", tmp_path / "torn")
