"""Losses that would come back end a job; those that would not, do not."""

from __future__ import annotations

import pytest

from megatron.elastic.control.failures import Failures, exit_status


def test_an_error_at_a_step_where_there_was_one_is_deterministic() -> None:
    failures = Failures()
    assert failures.record(0, 0, 7, True, 0.0) is None
    assert failures.record(1, 0, 8, True, 1.0) is None, "another step"
    verdict = failures.record(1, 1, 7, True, 2.0)
    assert verdict is not None and "step 7 fails deterministically" in verdict


def test_deaths_by_signal_at_one_step_are_not() -> None:
    failures = Failures()
    assert all(failures.record(rank, 0, 7, False, 0.0) is None for rank in range(4))


def test_all_ranks_may_fall_back_once_from_a_step() -> None:
    failures = Failures()
    assert [failures.fell_back(rank, incarnation, 5) for rank, incarnation in ((0, 0), (1, 2))] == [None, None]
    assert failures.fell_back(0, 1, 9) is None, "further on it is another fault"
    verdict = failures.fell_back(1, 3, 5)
    assert verdict is not None and "also after the job went back to its last checkpoint" in verdict


def test_a_limit_of_losses_counts_those_of_the_last_hour() -> None:
    failures = Failures(max_per_hour=2)
    assert failures.record(0, 0, 1, False, 0.0) is None
    assert failures.record(0, 1, 2, False, 10.0) is None
    assert failures.record(0, 2, 3, False, 3605.0) is None, "the first is forgotten"
    assert failures.record(0, 3, 4, False, 3606.0) is not None


def after(*raising: int, step: int = 7) -> Failures:
    """The losses known once these ranks have ended with an error at one step."""
    failures = Failures()
    for rank in raising:
        failures.record(rank, 0, step, True, 0.0)
    return failures


LOST = (4, "state of step 6 is lost")


@pytest.mark.parametrize("ended", [None, LOST], ids=["nobody left", "state lost"])
@pytest.mark.parametrize("codes", [(), (4,), (4, 4)])
def test_ranks_that_fail_alike_end_the_job_as_deterministic_not_as_lost_state(
    ended: tuple[int, str] | None, codes: tuple[int, ...]
) -> None:
    """The error took the last copy of the state with it: the job would end so again."""
    code, why = exit_status(ended, codes, after(1, 2, 3).verdict)
    assert code == 5 and "step 7 fails deterministically: rank 1 (incarnation 0), rank 2" in why


def test_an_error_of_one_rank_alone_may_be_its_machines() -> None:
    assert exit_status(LOST, (), after(1).verdict) == LOST
    assert exit_status(None, (), after(1).verdict) == (
        4,
        "no rank is left that could go on: resume from the last checkpoint (--load)",
    )


@pytest.mark.parametrize("ended", [(3, "drained"), (1, "error: a flag"), (0, ""), (143, "SIGTERM again")])
def test_other_ends_stay_what_they_are(ended: tuple[int, str]) -> None:
    assert exit_status(ended, (), after(1, 2).verdict) == ended


@pytest.mark.parametrize(
    ("codes", "status"), [((0, 0), 0), ((3, 0), 3), ((1, 3), 1), ((4, 1), 4), ((5, 4), 5), ((9, 0), 9)]
)
def test_the_worst_exit_code_of_the_ranks_is_the_jobs(codes: tuple[int, ...], status: int) -> None:
    assert exit_status(None, codes, "") == (status, "")


@pytest.mark.parametrize(
    ("ended", "codes", "status"),
    [
        (None, (3, 3), 0),
        ((3, "before the first step"), (), 0),
        (None, (4,), 5),
        ((4, "state is lost"), (), 5),
        (None, (0, 0), 0),
        ((1, "error: a flag"), (), 1),
        ((143, "SIGTERM again"), (), 143),
    ],
)
def test_a_job_that_a_user_stopped_is_never_queued_again(
    ended: tuple[int, str] | None, codes: tuple[int, ...], status: int
) -> None:
    code, why = exit_status(ended, codes, "", stopping=True)
    assert code == status and code not in (3, 4)
    assert why or codes == (0, 0)
