"""Copies of state change place while the job trains, and a loss at any instant of it costs no step.

Real jobs under the launcher, real SIGKILLs, dropout 0.1, compared step by step with
an undisturbed run. One mirror suffices from the moment the copies made anew are there, in the step
that the loss interrupted; a second rank lost before that takes two.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.elastic_job import JobResult, elastic_job, largest_deviation

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
STEPS = 24
"""So many that what moves after the second loss is there before the job ends, on a busy machine too."""
POINTS = ("in_migration_begin", "in_migration_finish", "in_migration_switch")
FIRST = "kill:rank=1,step=2,point=mid_forward"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    result = elastic_job(tmp_path_factory.mktemp("undisturbed"), 4, 1, 1, STEPS, *DROPOUT)
    assert result.code == 0, result.output[-6000:]
    return result


def disturbed(
    folder: Path, script: str, *flags: str, comm: str = "elastic", steps: int = STEPS, mirrors: int = 2
) -> JobResult:
    result = elastic_job(
        folder,
        4,
        1,
        1,
        steps,
        *DROPOUT,
        "--lr-decay-iters",
        str(STEPS),
        "--elastic-mirrors",
        str(mirrors),
        "--elastic-allow-inject",
        "--elastic-inject",
        script,
        *flags,
        comm=comm,
    )
    assert result.code == 0, result.output[-6000:]
    return result


def check_two_losses(
    folder: Path, undisturbed: JobResult, point: str, rank: int, comm: str = "elastic", mirrors: int = 2
) -> None:
    """Rank 1 is lost in step 2; ``rank`` at ``point`` of the migration that restores the lost copies."""
    script = f"{FIRST};kill:rank={rank},point={point}"
    result = disturbed(folder, script, "--no-elastic-respawn", comm=comm, mirrors=mirrors)
    assert {record.fields["lost_rank"] for record in result.of("loss")} == {1, rank}
    assert set(result.committed) == set(range(1, STEPS + 1)), "every step is committed"
    assert largest_deviation(undisturbed.committed, result.committed) < 1e-5
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    last = max(result.of("certificate"), key=lambda record: record.monotonic_ns)
    assert last.fields["passed"]
    assert last.fields["mirrors"] == last.fields["blocks"] > 0, "in the end either of the two that are left has it all"


@pytest.mark.slow
def test_state_moves_while_steps_go_on_and_again_when_a_rank_returns(tmp_path: Path, undisturbed: JobResult) -> None:
    steps = 40
    result = disturbed(tmp_path, FIRST, steps=steps)
    assert set(result.committed) == set(range(1, steps + 1))
    assert largest_deviation(undisturbed.committed, result.committed) < 1e-5
    moved = result.of("migration")
    assert {record.generation for record in moved} >= {2, 3}, "copies were made after the loss and after the return"
    urgent = [record for record in moved if record.fields["urgent"]]
    assert {record.fields["step"] for record in urgent} == {2}, "those that the loss left missing with the very step"
    assert {record.fields["steps"] for record in result.of("protection")} == {1}
    assert len(re.findall(r"^mirrors complete with step 2: \d+ state blocks", result.output, re.M)) == 1
    returned = [record for record in moved if record.rank == 1]
    assert sum(record.fields["bytes_received"] for record in returned) > 0
    for record in (record for record in moved if not record.fields["urgent"]):
        during = [
            step
            for step in result.of("step")
            if record.monotonic_ns - 1e9 * (record.fields["background_seconds"] + record.fields["stall_seconds"])
            < step.monotonic_ns
            < record.monotonic_ns
        ]
        assert during, "steps were committed between the first byte and the last"


@pytest.mark.slow
def test_a_loss_with_the_vote_that_names_the_new_copies_costs_no_step(tmp_path: Path, undisturbed: JobResult) -> None:
    """With one mirror, copies of which perhaps only rank 2 has learned that they are named.

    They are of all that rank 1 and rank 2 both held. Then the vote is taken again.
    """
    check_two_losses(tmp_path, undisturbed, "in_migration_switch", 2, mirrors=1)


@pytest.mark.parametrize(
    "second",
    [
        "kill:rank=2,step=2,point=after_ship",
        pytest.param("kill:rank=2,step=3,point=before_step", marks=pytest.mark.slow),
        pytest.param("kill:rank=2,step=3,point=mid_forward", marks=pytest.mark.slow),
        pytest.param("kill:rank=2,step=2,point=after_vote", marks=pytest.mark.slow),
    ],
)
def test_with_one_mirror_a_second_loss_in_the_step_after_the_first_costs_no_step(
    tmp_path: Path, undisturbed: JobResult, second: str
) -> None:
    """Ranks 1 and 2 mirror each other: what both held is on rank 0 or 3 as soon as the step is computed again."""
    script, steps = f"{FIRST};{second}", 6
    result = disturbed(tmp_path, script, "--no-elastic-respawn", steps=steps, mirrors=1)
    assert set(result.committed) == set(range(1, steps + 1))
    reference = {step: undisturbed.committed[step] for step in result.committed}
    assert largest_deviation(reference, result.committed) < 1e-5
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_nor_does_that_of_any_other_rank(tmp_path: Path, undisturbed: JobResult, rank: int) -> None:
    check_two_losses(tmp_path, undisturbed, "in_migration_switch", rank, mirrors=1)


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["elastic", "gloo"])
@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_loss_of_any_rank_at_any_point_of_a_migration(
    tmp_path: Path, undisturbed: JobResult, point: str, rank: int, comm: str
) -> None:
    check_two_losses(tmp_path, undisturbed, point, rank, comm)
