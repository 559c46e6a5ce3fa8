"""The history of a job: what its journal says of losses, recoveries and lost time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.comm.address import Address
from megatron.elastic.control import events as ev
from megatron.elastic.control.exits import Ending
from megatron.elastic.control.failures import Failures
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.observations import COMPUTED_AGAIN, RESTART, Protection, Recovered, Reprotected, Stepping
from megatron.elastic.control.snapshot import dump, restore

PHASES = {"decide": 0.1, "edit": 0.2, "plan": 0.3, "settle": 0.4}


class Job:
    """A job of four ranks on two nodes whose journal is applied at once."""

    def __init__(self) -> None:
        self.state = Generations({0: Node("a", (0, 1)), 1: Node("b", (2, 3))})
        self.history = JobHistory()
        self.decide(0, 1, 2, 3)

    def take(self, *events: ev.Event) -> None:
        for event in events:
            self.state.apply(event)
            self.history.follow(event, self.state)

    def decide(self, *ranks: int) -> None:
        """The ranks report, lost ones in their next life, and the newest generation is decided."""
        lives = {
            rank: self.state.ranks[rank].incarnation + (self.state.ranks[rank].standing == "lost") for rank in ranks
        }
        entries = tuple(ev.Entry(Address(rank, life, "h"), "") for rank, life in lives.items())
        report = ev.Waiting(entries) if self.state.fresh else ev.Reported(self.state.frozen, entries)
        self.take(report, ev.Decided(self.state.frozen, 0))
        assert self.state.quiet

    def lose(self, rank: int, step: int, at: float) -> None:
        loss = Loss(rank, self.state.ranks[rank].incarnation, "a", "signal SIGKILL")
        self.take(ev.Lost((loss,), (step,), at))


def lost_at_once(job: Job, *steps: int, ending: Ending = Ending.KILLED) -> None:
    """All ranks end in one entry of the journal, each in its step."""
    losses = tuple(Loss(rank, job.state.ranks[rank].incarnation, "a", "", ending=ending) for rank in range(len(steps)))
    job.take(ev.Lost(losses, steps, 20.0))


def test_the_step_in_which_all_ranks_ended_is_known_until_the_next_one_is_committed() -> None:
    job = Job()
    lost_at_once(job, -1, -1, -1, -1)
    assert job.history.ended_in == -1, "no step was committed"
    job.decide(0, 1, 2, 3)
    job.take(Stepping(4, at=10.0))
    job.lose(3, 5, at=15.0)
    assert job.history.ended_in == -1, "ranks are left"
    job.decide(0, 1, 2)
    lost_at_once(job, 7, 8, 7)
    assert job.history.ended_in == 8
    job.take(Stepping(4, at=30.0))
    assert job.history.ended_in == -1


def test_of_ranks_that_ended_with_their_nodes_no_step_is_known_but_the_first() -> None:
    job = Job()
    job.take(Stepping(4, at=10.0), *(ev.NodeLost(node, 0, "gone", at=20.0) for node in (0, 1)))
    assert job.history.ended_in == 4


@pytest.mark.parametrize("ending", [Ending.FALL_BACK, Ending.BEGIN_ANEW])
def test_ranks_that_told_of_the_way_back_leave_nothing_to_tell(ending: Ending) -> None:
    job = Job()
    job.take(Stepping(1, at=10.0))
    lost_at_once(job, 5, 5, 5, 5, ending=ending)
    assert job.history.ended_in == -1
    job.decide(0, 1, 2, 3)
    job.take(Stepping(2, at=30.0))
    lost_at_once(job, 6, 6, 6, 6)
    assert job.history.ended_in == 6


def test_newcomers_that_were_never_admitted_have_told_nothing() -> None:
    job = Job()
    job.take(Stepping(1, at=10.0))
    job.lose(3, 5, at=15.0)
    job.decide(0, 1, 2)
    lost_at_once(job, 6, 6, 6)
    newcomer = Loss(3, 1, "b", "exit code 7", ending=Ending.BEGIN_ANEW)
    job.take(ev.Lost((newcomer,), (-1,), 21.0))
    assert job.history.ended_in == 6


def test_a_loss_is_noted_at_once_and_its_recovery_with_its_phases() -> None:
    job = Job()
    job.take(Stepping(1, at=10.0))
    job.lose(3, 5, at=20.0)
    assert (job.history.losses, job.history.recoveries) == (1, 0)
    assert [(note.rank, note.step, note.at, note.cause) for note in job.history.last_losses] == [
        (3, 5, 20.0, "signal SIGKILL")
    ]
    job.decide(0, 1, 2)
    job.take(Recovered(2, 5, "re-run", PHASES, repeated_s=0.5, lost=(3,), at=21.0))
    assert job.history.lost_s == {**PHASES, COMPUTED_AGAIN: 0.5}
    assert job.history.recovery_mean_s() == pytest.approx(1.0) and job.history.recoveries == 1
    assert job.history.goodput(110.0, 50) == pytest.approx(1 - 1.5 / 100)


def test_a_loss_that_several_tell_of_and_one_during_the_agreement_are_each_noted_once() -> None:
    job = Job()
    job.lose(3, 5, at=20.0)
    job.take(ev.Lost((Loss(3, 0, "a", "signal SIGKILL"),), (5,), 20.1), ev.NodeLost(1, 0, "node unreachable", 20.2))
    assert sorted(note.rank for note in job.history.last_losses) == [2, 3] and job.history.losses == 2
    job.decide(0, 1)
    job.lose(1, 6, at=30.0)
    assert [note.rank for note in job.history.last_losses] == [3, 2, 1]


def test_after_the_loss_of_all_ranks_the_way_back_counts_until_the_next_committed_step() -> None:
    job = Job()
    job.take(Stepping(1, at=10.0))
    for rank in range(4):
        job.lose(rank, 8, at=50.0 + rank)
    for rank in range(4):
        job.take(ev.Waiting((ev.Entry(Address(rank, 1, "h"), ""),)))
    job.take(ev.Decided(job.state.frozen, 0), Stepping(5, at=73.0))
    assert job.history.lost_s == {RESTART: 20.0}, "since the last of them"
    assert job.history.lost_steps == 3, "steps 5, 6 and 7 had been committed"
    assert job.history.goodput(110.0, 16) == pytest.approx((100 - 20) / 100 * 16 / (16 + 3))
    job.take(Stepping(6, at=80.0))
    assert job.history.lost_s == {RESTART: 20.0}, "a rank that joined later says so too"


def test_time_since_a_loss_that_others_outlived_is_no_restart() -> None:
    job = Job()
    job.take(Stepping(1, at=10.0))
    job.lose(3, 5, at=20.0)
    job.decide(0, 1, 2)
    job.take(Stepping(9, at=40.0))
    assert job.history.lost_s == {} and job.history.lost_steps == 0, "told by the rank that came for the lost one"


def test_a_process_lost_on_the_way_back_makes_the_restart_no_shorter() -> None:
    job = Job()
    job.take(Stepping(1, at=10.0))
    for rank in range(4):
        job.lose(rank, 8, at=50.0)
    job.take(ev.Waiting((ev.Entry(Address(0, 1, "h"), ""),)))
    job.lose(0, -1, at=60.0)
    for rank in range(4):
        job.take(ev.Waiting((ev.Entry(Address(rank, 2, "h"), ""),)))
    job.take(ev.Decided(job.state.frozen, 0), Stepping(5, at=75.0))
    assert job.history.lost_s == {RESTART: 25.0} and job.history.lost_steps == 3


def test_ranks_that_join_are_no_recovery_but_their_time_is_lost() -> None:
    job = Job()
    job.take(Recovered(2, 5, "joined by 3", PHASES, joined=(3,), at=21.0), Reprotected(6, 2.5, 12))
    assert (job.history.recoveries, job.history.changes, job.history.recovery_mean_s()) == (0, 1, None)
    assert job.history.lost_s == PHASES and job.history.unprotected_s == 2.5


def test_there_is_no_goodput_before_the_first_step_and_none_above_one() -> None:
    job = Job()
    assert job.history.goodput(100.0, 3) is None
    job.take(Stepping(1, at=10.0), ev.Announced(1, "any 1 rank", Protection(1, 0, 0, 12)))
    assert job.history.goodput(10.0, 1) is None and job.history.goodput(11.0, 1) == 1.0
    assert job.history.protection == Protection(1, 0, 0, 12)


@given(st.lists(st.floats(0, 50), max_size=60), st.integers(1, 100), st.floats(1, 1000))
def test_goodput_is_a_share_whatever_was_lost(lost: list[float], steps: int, elapsed: float) -> None:
    job = Job()
    job.take(Stepping(1, at=0.0))
    for seconds in lost:
        job.take(Recovered(2, 5, "re-run", {"decide": seconds}, lost=(3,), lost_steps=1))
    share = job.history.goodput(elapsed, steps)
    assert share is not None and 0.0 <= share <= 1.0
    assert len(job.history.last_recoveries) == min(32, len(lost)), "a job of weeks keeps no more"
    again = JobHistory()
    restore(Generations({0: Node("a", (0, 1)), 1: Node("b", (2, 3))}), Failures(), again,
            dump(job.state, Failures(), job.history))  # fmt: skip
    assert again == job.history
