"""Ranks that end or leave on purpose: the decisions that follow."""

from __future__ import annotations

from megatron.elastic.control.events import (
    Abandoned,
    Decided,
    Finished,
    Readmitted,
    Reformed,
    Requested,
    Waiting,
    Wanted,
)
from megatron.elastic.control.requests import Drain, Pending, Request
from tests.unit.control.generation_machines import entry, loss, report_all, started


def test_purposeful_ends_are_no_losses_and_end_the_job() -> None:
    state = started(2)
    state.apply(Finished(0, 0, 0))
    assert state.quiet and not state.over()
    state.apply(Finished(1, 0, 3))
    assert state.over() and state.codes() == (0, 3)


def test_leaving_without_a_word_is_a_loss_once_a_rank_misses_it() -> None:
    state = started(2)
    state.apply(Finished(0, 0, 0, announced=False))
    assert state.quiet
    state.apply(loss(0))
    assert state.frozen == 2
    announced = started(2)
    announced.apply(Finished(0, 0, 0, announced=True))
    announced.apply(loss(0))
    assert announced.quiet


def test_leaving_without_a_word_while_a_generation_is_agreed_is_told_in_the_decision() -> None:
    state = started(3)
    state.apply(Reformed(1, "link"))
    state.apply(Finished(1, 0, 0, announced=False))
    report_all(state)
    state.apply(Decided(2, 0))
    assert state.decision is not None and list(state.decision.members) == [0, 2]
    assert [(lost.rank, lost.cause) for lost in state.decision.lost] == [(1, "exit code 0")]


def test_one_rank_may_leave_at_a_boundary() -> None:
    state = started(3)
    state.apply(Wanted(Drain((1,))))
    state.apply(Requested(Request.LEAVE, (0, 1), 1))
    assert state.quiet, "it happens when every member stands at the boundary"
    state.apply(Requested(Request.LEAVE, (2,), 1))
    assert state.frozen == 2
    report_all(state)
    state.apply(Decided(2, 0))
    assert state.members == (0, 2), "before its process ends, too"
    state.apply(loss(1))
    assert state.quiet and not state.ranks[1].may_return, "its end is no loss, in whatever way it ends"
    state.apply(Finished(1, 0, 0))
    assert state.decision is not None and list(state.decision.members) == [0, 2] and state.decision.reason == "drain"
    assert state.pending() == Pending() and not state.over()


def test_asking_some_ranks_to_leave_is_no_drain_of_the_job() -> None:
    state = started(3)
    state.apply(Wanted(Drain((1,))))
    assert state.pending() == Pending(leave=(1,))
    state.apply(Wanted(Drain((2,))))
    assert state.pending() == Pending(leave=(1, 2))
    state.apply(Wanted(Drain((0,))))
    assert state.pending() == Pending(drain=True), "all of them: the job"


def test_a_wish_to_leave_that_cannot_be_granted_is_taken_back_by_all() -> None:
    state = started(2)
    state.apply(Wanted(Drain((1,))))
    state.apply(Requested(Request.STAY, (0,), 1))
    assert state.pending() == Pending(leave=(1,))
    state.apply(Requested(Request.STAY, (1,), 1))
    assert state.pending() == Pending() and state.quiet


def test_a_loss_before_the_decision_lets_no_rank_leave_yet() -> None:
    state = started(3)
    state.apply(Wanted(Drain((1,))))
    state.apply(Requested(Request.LEAVE, (0, 1, 2), 1))
    state.apply(loss(2))
    report_all(state)
    state.apply(Decided(3, 0))
    assert state.decision is not None and list(state.decision.members) == [0, 1]
    assert state.pending() == Pending(leave=(1,))


def test_a_rank_that_left_may_be_admitted_again() -> None:
    state = started(2)
    state.apply(Wanted(Drain((1,))))
    state.apply(Requested(Request.LEAVE, (0, 1), 1))
    report_all(state)
    state.apply(Decided(2, 0))
    state.apply(Finished(1, 0, 0))
    assert not state.ranks[1].may_return
    state.apply(Readmitted((1,)))
    assert state.ranks[1].standing == "lost" and state.ranks[1].may_return
    state.apply(Waiting((entry(1, 1),)))
    assert state.pending() == Pending(join=True)


def test_only_the_ranks_that_are_named_are_admitted_again() -> None:
    state = started(3)
    for rank in (1, 2):
        state.apply(Abandoned((rank,), "it ended several times before it took part"))
        state.apply(loss(rank))
    state.apply(Readmitted((1,)))
    assert state.ranks[1].may_return and not state.ranks[2].may_return
    state.apply(Readmitted(()))
    assert state.ranks[2].may_return, "none named: all"
