"""The time without a full set of copies is told once, by a rank that was there all along."""

from __future__ import annotations

from megatron.elastic.engine.transaction.protection import Exposure, Protected


class Clock:
    """Monotonic seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_loss_that_leaves_every_block_its_mirrors_is_nothing_to_tell():
    exposure = Exposure(0, Clock())
    assert exposure.settled(0, (0, 1, 2), 7, since=99.0) is None
    assert not exposure.open and exposure.voted(0, 8) is None


def test_the_time_ends_with_the_first_vote_that_names_all_mirrors():
    clock = Clock()
    exposure = Exposure(0, clock)
    assert exposure.settled(5, (0, 1, 2), 7, since=99.5) is None
    assert exposure.voted(5, 8) is None, "the link needed longer than a step"
    clock.now = 103.5
    assert exposure.voted(0, 9) == Protected(4.0, 2, 5, speaks=True)
    assert not exposure.open and exposure.voted(0, 10) is None, "it is told once"


def test_a_further_loss_lengthens_it_and_the_lowest_rank_that_saw_all_of_it_speaks():
    """Rank 0 is lost in the middle and comes back, as a newcomer that knows nothing of it."""
    clock = Clock()
    exposures = {rank: Exposure(rank, clock) for rank in (1, 2)}
    for exposure in exposures.values():
        exposure.settled(3, (0, 1, 2), 7, since=100.0)
        exposure.settled(8, (1, 2), 7, since=100.5)
        exposure.settled(2, (0, 1, 2), 7, since=101.0, newcomers=(0,))
    clock.now = 102.0
    told = {rank: exposure.voted(0, 8) for rank, exposure in exposures.items()}
    assert told == {1: Protected(2.0, 1, 8, speaks=True), 2: Protected(2.0, 1, 8, speaks=False)}


def test_copies_that_came_whole_before_a_generation_ended_may_end_it_without_a_vote():
    clock = Clock()
    exposure = Exposure(1, clock)
    exposure.settled(3, (0, 1, 2), 7, since=100.0)
    clock.now = 101.0
    assert exposure.settled(0, (0, 1, 2), 7, since=100.9) == Protected(1.0, 0, 3, speaks=False)
