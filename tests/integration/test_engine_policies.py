"""Every policy in a real job: one rank is killed, training goes on, with the samples the policy says.

PP 2 x DP 2, 16 samples a step in micro-batches of 2, rank 3 (stage 1, replica 1)
killed in step 3. Policies that keep the batch have the losses of an undisturbed
run; the one that lets it shrink has the ledger of replica 0's samples alone, and
the gradient of a job that is given no others.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.elastic.engine.compute.ledger import sample_digest
from tests.integration.elastic_job import JobResult, elastic_job, largest_deviation

STEPS = 5
KEPT_BATCH = ["recycle", "torchft-batch", pytest.param("elaswave", marks=pytest.mark.slow), "mindspeed"]


def job(folder: Path, policy: str, *flags: str, step: int = 3, ranks: str = "3") -> JobResult:
    fault = f"kill:rank={ranks},step={step},point=mid_forward"
    return elastic_job(
        folder,
        4,
        1,
        2,
        STEPS,
        "--elastic-policy",
        policy,
        "--no-elastic-respawn",
        "--elastic-allow-inject",
        "--elastic-inject",
        fault,
        *flags,
    )


def ledger(step: int, rows: list[int]) -> str:
    return f"{sum(sample_digest(16 * (step - 1) + row) for row in rows):x}"


def numbers(result: JobResult) -> dict[int, str]:
    """The part of each step's ledger that says which samples were computed, whatever they contain."""
    return {step: ledger.partition(".")[0] for step, ledger in ledgers(result).items()}


def ledgers(result: JobResult) -> dict[int, str]:
    return {record.fields["step"]: record.fields["ledger"] for record in result.of("step")}


def computed(result: JobResult) -> dict[int, int]:
    return {record.fields["step"]: record.fields["computed"] for record in result.of("step")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    result = elastic_job(tmp_path_factory.mktemp("whole"), 4, 1, 2, STEPS)
    assert result.code == 0, result.output[-4000:]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("policy", KEPT_BATCH)
def test_policies_that_keep_the_batch_keep_the_losses(tmp_path: Path, undisturbed: JobResult, policy: str) -> None:
    result = job(tmp_path, policy, "--elastic-migrate-after", "-1")  # the answer at once, not a cut made later
    assert result.code == 0, result.output[-4000:]
    assert largest_deviation(undisturbed.committed, result.committed) < 1e-5
    assert ledgers(result) == ledgers(undisturbed)
    assert set(computed(result).values()) == {16}
    (plan,) = {tuple(sorted(record.fields["rows"].items())) for record in result.of("plan")}
    dropped = policy in ("torchft-batch", "mindspeed")
    # Replica 1's other cell (2) either serves its own samples on, or rests with its replica.
    assert dict(plan) == ({"0": 16, "1": 16} if dropped else {"0": 8, "1": 16, "2": 8})


@pytest.mark.slow
def test_a_dropped_replica_takes_its_samples_with_it(tmp_path: Path) -> None:
    result = job(tmp_path, "torchft")
    assert result.code == 0, result.output[-4000:]
    assert computed(result) == {1: 16, 2: 16, 3: 8, 4: 8, 5: 8}
    first = [row for row in range(16) if row // 2 % 2 == 0]
    expected = {step: ledger(step, list(range(16)) if step < 3 else first) for step in range(1, STEPS + 1)}
    assert numbers(result) == expected, "replica 0's samples, once each"
    samples = {record.fields["step"]: tuple(record.fields["samples"]) for record in result.of("step")}
    assert samples == {step: (16 * (step - 1), 16 * step) for step in range(1, STEPS + 1)}, "all are consumed"
    assert "the batch shrinks to 8 of 16 samples" in result.output


@pytest.mark.slow
def test_a_shrunk_batch_has_the_gradient_of_its_own_samples(tmp_path: Path) -> None:
    """One micro-batch of 8 a replica: what is left in step 1 is the first step of a job with a batch of 8."""
    shrunk = job(tmp_path / "shrunk", "torchft", "--micro-batch-size", "8", step=1)
    alone = elastic_job(
        tmp_path / "alone", 2, 1, 2, 1, "--micro-batch-size", "8", "--global-batch-size", "8", "--lr-decay-iters", "5"
    )
    assert (shrunk.code, alone.code) == (0, 0), shrunk.output[-3000:] + alone.output[-3000:]

    def first(result: JobResult) -> tuple[float, float]:
        steps = [record.fields for record in result.of("step") if record.fields["step"] == 1]
        (told,) = {(step["losses"]["lm loss"], step["grad_norm"]) for step in steps}  # by every rank, the same
        return told

    assert first(shrunk) == pytest.approx(first(alone), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mindspeed", "torchft", "torchft-batch"])
def test_what_a_policy_cannot_go_on_without_ends_the_job(tmp_path: Path, policy: str) -> None:
    """Ranks of both replicas, of different stages: peers could serve them, these policies do not."""
    result = job(tmp_path, policy, ranks="0|3")
    assert result.code == 4, result.output[-4000:]
    assert f"policy {policy}" in result.output and "Traceback" not in result.output


@pytest.mark.slow
def test_ntp_leaves_out_what_a_smaller_group_does_not_finish(tmp_path: Path) -> None:
    """TP 2 × DP 2: one rank of two computes two of its replica's four micro-batches."""
    flags = ("--elastic-policy", "ntp", "--elastic-tensor", "live-on", "--no-elastic-respawn", "--elastic-allow-inject")
    fault = ("--elastic-inject", "kill:rank=3,step=3,point=mid_forward")
    result = elastic_job(tmp_path, 4, 2, 1, STEPS, *flags, *fault)
    assert result.code == 0, result.output[-4000:]
    assert computed(result) == {1: 16, 2: 16, 3: 12, 4: 12, 5: 12}
    assert numbers(result)[4] == ledger(4, [*range(10), 12, 13])
