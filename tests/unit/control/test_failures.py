"""Losses that would come back end a job; those that would not, do not."""

from __future__ import annotations

from megatron.elastic.control.failures import Failures


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
