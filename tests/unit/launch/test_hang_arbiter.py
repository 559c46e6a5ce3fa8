"""The coordinator's rulings follow from accusations and idle times, after a grace in which a death becomes known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from megatron.elastic.comm.address import Address
from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import (
    Abandoned,
    Condemned,
    Decided,
    Entry,
    Event,
    Finished,
    JobEnded,
    Lost,
    Reformed,
    Reported,
    Requested,
    Suspected,
    Waiting,
)
from megatron.elastic.control.exits import Ending, ExitCode
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.requests import Request
from megatron.elastic.control.suspicion import Idle
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.hang_arbiter import HangArbiter

TIMING = Timing.derive(5.0)
RANKS = range(4)
LIMIT = 30.0


class Timers:
    """The loop's timers, which a test lets run out."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Callable[[], None]]] = []
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.calls.append((seconds, call))

    def run_out(self) -> None:
        for _, call in self.calls:
            call()
        self.calls.clear()


class Job:
    """Four members of generation 1 on two nodes, and the arbiter of the first."""

    def __init__(self) -> None:
        self.state = Generations({0: Node("a", (0, 1)), 1: Node("b", (2, 3))})
        self.said: list[Event] = []
        self.timers = Timers()
        self.arbiter = HangArbiter(self.state, TIMING, self.timers, JobClock(), self.said.append)
        self.apply(Waiting(tuple(Entry(Address(rank, 0, "h"), "") for rank in RANKS)), Decided(1, 0))
        assert self.state.quiet and self.state.decided == 1

    def apply(self, *events: Event) -> None:
        for event in events:
            self.state.apply(event)

    def accuse(self, by: int, rank: int, generation: int = 1, silent: tuple[int, ...] = ()) -> None:
        self.arbiter.hear(Suspected(by, rank, 0, generation, "link broke", silent))

    def decided_again(self) -> None:
        """The members meet again, as after a reform."""
        generation = self.state.frozen
        entries = tuple(Entry(Address(rank, 0, "h"), f"of {rank}") for rank in RANKS)
        self.apply(Reported(generation, entries), Decided(generation, 0))
        assert self.state.decided == generation

    def consider(self, seconds: float, waiting: Mapping[int, tuple[int, ...]], members: Iterable[int] = RANKS) -> None:
        self.arbiter.consider({rank: (0, Idle(7, "reduce", waiting.get(rank, ()), seconds, LIMIT)) for rank in members})


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_broken_link_is_given_one_reconnection_and_then_costs_a_rank(job: Job) -> None:
    job.accuse(0, 2)
    job.accuse(2, 0)
    assert job.said == [] and [seconds for seconds, _ in job.timers.calls] == [TIMING.grace], "one ruling for all"
    job.timers.run_out()
    (reformed,) = job.said
    assert isinstance(reformed, Reformed) and reformed.generation == 1
    job.apply(reformed)
    job.decided_again()
    job.accuse(2, 0, job.state.decided)
    job.timers.run_out()
    condemned = job.said[-1]
    assert isinstance(condemned, Condemned) and (condemned.rank, condemned.incarnation) == (2, 0)


def cut_off_twice(job: Job) -> None:
    """Both ranks of the second node find the first rank of the first one silent, and again in new groups."""
    for _ in range(2):
        job.accuse(2, 0, job.state.decided, silent=(0,))
        job.accuse(3, 0, job.state.decided, silent=(0, 1))
        assert [seconds for seconds, _ in job.timers.calls] == [TIMING.apart], "the others may find hosts silent too"
        job.timers.run_out()
        if isinstance(job.said[-1], Reformed):
            job.apply(job.said[-1])
            job.decided_again()


def test_a_node_that_the_others_do_not_reach_is_lost_and_not_started_again(job: Job) -> None:
    cut_off_twice(job)
    reformed, abandoned, *condemned = job.said
    assert isinstance(reformed, Reformed)
    assert isinstance(abandoned, Abandoned) and abandoned.ranks == (2, 3)
    assert "no data passes between nodes 0 and 1" in abandoned.why and "ctl admit" in abandoned.why
    assert [(event.rank, event.incarnation) for event in condemned if isinstance(event, Condemned)] == [(2, 0), (3, 0)]


def test_a_job_without_state_that_finds_a_node_cut_off_may_be_queued_again(job: Job) -> None:
    job.apply(Requested(Request.SETUP, tuple(RANKS), 1))
    cut_off_twice(job)
    ended = job.said[-1]
    assert isinstance(ended, JobEnded) and ended.code == ExitCode.STATE_LOST and "nodes 0 and 1" in ended.why


def test_a_broken_link_leaves_the_ruling_to_the_report_of_a_silent_host(job: Job) -> None:
    job.accuse(1, 3)
    job.accuse(2, 0, silent=(0,))
    assert [seconds for seconds, _ in job.timers.calls] == [TIMING.grace, TIMING.apart]
    job.timers.run_out()
    (reformed,) = job.said
    assert isinstance(reformed, Reformed) and "nodes 0 and 1" in reformed.why


def test_a_death_that_becomes_known_in_the_grace_is_ruling_enough(job: Job) -> None:
    job.accuse(0, 2)
    job.apply(Lost((Loss(2, 0, "b", "signal SIGKILL"),), (0,), 0.0))
    job.timers.run_out()
    assert job.said == []


def test_a_rank_that_left_without_a_word_is_lost_once_the_others_hang_for_it(job: Job) -> None:
    job.apply(Finished(2, 0, 0, announced=False))
    assert list(job.state.members) == [0, 1, 3]
    job.consider(1.1 * LIMIT, {0: (2,), 1: (0,), 3: (2,)}, members=(0, 1, 3))
    (lost,) = job.said
    assert isinstance(lost, Lost)
    (loss,) = lost.losses
    assert (loss.rank, loss.host, loss.ending) == (2, "b", Ending.LEFT)
    job.apply(lost)
    assert not job.state.quiet, "the others go on without it"


def test_a_rank_that_ended_as_announced_is_no_loss_and_the_job_ends_once_the_others_hang_for_it(job: Job) -> None:
    job.apply(Finished(2, 0, 0))
    job.consider(1.1 * LIMIT, {0: (2,), 1: (0,), 3: (2,)}, members=(0, 1, 3))
    (ended,) = job.said
    assert isinstance(ended, JobEnded) and ended.code == ExitCode.DETERMINISTIC
    assert "rank 2 ended as it had announced" in ended.why


def test_the_rank_that_all_others_wait_for_is_hung_once_none_makes_progress(job: Job) -> None:
    waiting = {0: (2,), 1: (0,), 3: (2,)}
    job.consider(0.9 * LIMIT, waiting)
    assert job.said == []
    job.consider(1.1 * LIMIT, waiting, members=range(3))
    assert job.said == [], "one rank's activity is not known"
    job.consider(1.1 * LIMIT, waiting)
    job.consider(1.2 * LIMIT, waiting)
    (condemned,) = job.said
    assert isinstance(condemned, Condemned) and condemned.rank == 2, "once in a generation"
    assert "hung in 'reduce' of step 7" in condemned.why


@pytest.mark.parametrize(
    ("circle", "code", "named"),
    [
        ({0: (1,), 1: (2,), 2: (3,), 3: (0,)}, ExitCode.STATE_LOST, "ranks of nodes 0, 1 wait for one another"),
        ({0: (1,), 1: (0,), 2: (3,), 3: (2,)}, ExitCode.DETERMINISTIC, "second time"),
    ],
)
def test_ranks_that_wait_for_one_another_meet_again_and_the_second_time_the_job_ends(
    job: Job, circle: Mapping[int, tuple[int, ...]], code: ExitCode, named: str
) -> None:
    """Between nodes the network may be the cause: the job may be queued again."""
    job.consider(1.5 * LIMIT, circle)
    assert job.said == []
    job.consider(2.1 * LIMIT, circle)
    (reformed,) = job.said
    assert isinstance(reformed, Reformed)
    job.apply(reformed)
    job.decided_again()
    job.consider(2.1 * LIMIT, circle)
    ended = job.said[-1]
    assert isinstance(ended, JobEnded) and ended.code == code and "step 7" in ended.why and named in ended.why


def test_a_member_that_neither_reports_nor_makes_progress_is_hung(job: Job) -> None:
    """The others have reported, and wait for it."""
    job.apply(Lost((Loss(3, 0, "b", "signal SIGKILL"),), (0,), 0.0))
    job.apply(Reported(2, tuple(Entry(Address(rank, 0, "a"), "report") for rank in (0, 1))))
    assert list(job.state.missing()) == [2]
    members = {rank: (0, Idle(7, "reduce", (), 2 * TIMING.hang, LIMIT)) for rank in (0, 1, 2)}
    job.arbiter.consider(members)
    job.timers.seconds += 0.9 * TIMING.hang
    job.arbiter.consider(members)
    assert job.said == [], "it has that long from the freeze on"
    job.timers.seconds += 0.2 * TIMING.hang
    job.arbiter.consider(members)
    job.arbiter.consider(members)
    (condemned,) = job.said
    assert isinstance(condemned, Condemned) and condemned.rank == 2
    assert "no report for generation 2" in condemned.why


def test_nothing_is_ruled_of_a_job_that_has_ended_or_not_begun(job: Job) -> None:
    job.apply(JobEnded(1, "over"))
    job.consider(5 * LIMIT, {0: (2,)})
    job.accuse(0, 2)
    job.timers.run_out()
    assert job.said == []
