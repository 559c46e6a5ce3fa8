"""``--elastic-snapshot state``: mirrors receive stepped blocks instead of replaying; a loss may cost the last step.

"Cost" means computed again: the job's losses stay those of an undisturbed run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import ROOT, JobResult, elastic_job, largest_deviation

STEPS = 6
STATE = ("--elastic-snapshot", "state")
BATCH = ("--global-batch-size", "12", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")


@pytest.fixture(scope="module")
def replaying(tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    """The same job in the default mode, undisturbed."""
    result = elastic_job(tmp_path_factory.mktemp("replaying"), 2, 1, 1, STEPS, *BATCH)
    assert result.code == 0, result.output[-4000:]
    return result


def killed(folder: Path, world: int, point: str, steps: int, *flags: str) -> JobResult:
    script = ("--elastic-allow-inject", "--elastic-inject", f"kill:rank=1,step=3,point={point}")
    result = elastic_job(folder, world, 1, 1, steps, *BATCH, *STATE, *script, *flags, "--lr-decay-iters", str(STEPS))
    assert result.code == 0, result.output[-4000:]
    assert {record.fields["lost_rank"] for record in result.of("loss")} == {1}
    assert set(result.committed) == set(range(1, steps + 1))
    return result


@pytest.mark.slow
def test_without_a_loss_both_modes_are_the_same_to_the_bit(tmp_path: Path, replaying: JobResult) -> None:
    result = elastic_job(tmp_path, 2, 1, 1, STEPS, *BATCH, *STATE)
    assert result.code == 0, result.output[-4000:]
    assert result.committed == replaying.committed


@pytest.mark.slow
def test_an_owner_lost_before_its_mirror_followed_costs_one_step_computed_again(
    tmp_path: Path, replaying: JobResult
) -> None:
    """Killed between update and following: the survivor goes back one version; then the rank returns."""
    result = killed(tmp_path, 2, "after_update", 25)
    recoveries = [record for record in result.of("recovery") if record.generation == 2]
    assert [record.fields["lost_steps"] for record in recoveries] == [1]
    assert largest_deviation(replaying.committed, result.committed) < 1e-5
    assert any(record.fields["transition"] == "join" for record in result.of("certificate")), "the rank came back"
    assert all(record.fields["passed"] for record in result.of("certificate"))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["mid_forward", "after_vote", "mid_update", "mid_gather", "after_step"])
def test_a_loss_at_any_phase(tmp_path: Path, replaying: JobResult, point: str) -> None:
    result = killed(tmp_path, 3, point, STEPS, "--no-elastic-respawn")
    assert largest_deviation(replaying.committed, result.committed) < 1e-5
    assert all(record.fields["lost_steps"] <= 1 for record in result.of("recovery"))


@pytest.mark.slow
def test_a_rank_that_has_not_rehearsed_returns_over_gloo(tmp_path: Path, replaying: JobResult) -> None:
    """Members exchange blocks before the newcomer does anything, over groups that gloo connects with it."""
    waits = "delay:missing=1,count=0,point=between_steps,seconds=120"
    faults = f"kill:rank=1,step=3,point=between_steps;{waits}"
    script = ("--elastic-allow-inject", "--elastic-inject", faults)
    unrehearsed = ROOT / "tests" / "integration" / "unrehearsed_training.py"
    result = elastic_job(
        tmp_path, 3, 1, 1, STEPS, *BATCH, *STATE, *script, comm="gloo", seconds=100.0, script=unrehearsed
    )
    assert result.code == 0, result.output[-4000:]
    assert [record.fields["rehearsed_seconds"] for record in result.of("ready")] == [None], "the rank came back"
    assert largest_deviation(replaying.committed, result.committed) < 1e-5
