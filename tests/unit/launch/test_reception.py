"""Reports of a node's workers go into the journal together, also those handed in before the freeze they are for."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.comm.address import Address
from megatron.elastic.control.answers import JobStatus, ToleranceStatus
from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import Decided, Entry, Event, Lost, Reported, Requested, Waiting
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.messages import Hello, Moving, Promise, ToleranceText
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.requests import Request, Status
from megatron.elastic.launch.agent.admin import Admin as Answers
from megatron.elastic.launch.agent.admin import Sources
from megatron.elastic.launch.agent.worker_messages import WorkerMessages
from megatron.elastic.launch.workers.pool import Worker

RANKS = 3


def never(worker: Worker) -> None:
    pytest.fail(f"nobody said so of rank {worker.rank}")


class Admin:
    """One node's reception, whose journal is delivered at once."""

    def __init__(self) -> None:
        self.state = Generations({0: Node("h", tuple(range(RANKS)))})
        self.journal = list[Event]()
        self.worker_messages = WorkerMessages(self.state, range(RANKS), self.deliver, never, never, lambda: 7.0)
        self.deliver(Waiting(tuple(Entry(Address(rank, 0, "h"), "") for rank in range(RANKS))))
        self.deliver(Decided(1, 0))

    def deliver(self, event: Event) -> None:
        frozen = self.state.frozen
        self.journal.append(event)
        self.state.apply(event)
        if self.state.frozen != frozen:
            self.worker_messages.begin()
        self.worker_messages.report_if_complete()

    def hear(self, rank: int, report: str, generation: int) -> None:
        self.worker_messages.said(worker(rank), Promise(generation, Address(rank, 0, "h"), report))

    def ask(self, rank: int) -> None:
        self.deliver(Requested(Request.JOIN, (rank,), self.state.decided))

    def lose(self, rank: int) -> None:
        self.deliver(Lost((Loss(rank, 0, "h", "signal SIGKILL"),), (0,), 0.0))

    def reported(self) -> dict[int, dict[int, str]]:
        """Generation → what the journal has of each rank for it."""
        found = dict[int, dict[int, str]]()
        for event in self.journal:
            if isinstance(event, Reported):
                assert event.generation not in found, "one entry for a node"
                found[event.generation] = {entry.address.rank: entry.report for entry in event.entries}
        return found


def worker(rank: int) -> Worker:
    channel, _ = socket.socketpair()
    return Worker(rank, rank, rank, 0, channel, None)  # type: ignore[arg-type]  # nobody reads its slot


def test_who_asks_reports_in_the_same_breath_and_the_freeze_finds_it_all_there() -> None:
    admin = Admin()
    for rank in range(RANKS):
        admin.hear(rank, f"of {rank}", 2)
        assert admin.reported() == {}
        admin.ask(rank)
    assert admin.reported() == {2: {rank: f"of {rank}" for rank in range(RANKS)}}
    assert admin.state.ready()


def test_a_report_ahead_counts_for_a_loss_too_and_only_for_the_first() -> None:
    admin = Admin()
    admin.hear(0, "ahead", 2)
    admin.hear(2, "ahead", 2)
    admin.lose(1)
    assert admin.reported() == {2: {0: "ahead", 2: "ahead"}}
    admin.lose(2)
    assert 3 not in admin.reported() and not admin.state.ready()
    admin.hear(0, "ahead", 2)
    assert 3 not in admin.reported(), "said of a generation that is over"
    admin.hear(0, "anew", 3)
    assert admin.reported()[3] == {0: "anew"}


@given(st.permutations([*range(RANKS), *range(RANKS, 2 * RANKS)]))
def test_in_any_order_of_requests_and_reports_each_rank_is_heard_once(order: list[int]) -> None:
    """Numbers below ``RANKS`` are requests, the others reports for the next generation."""
    admin = Admin()
    for item in order:
        admin.ask(item) if item < RANKS else admin.hear(item - RANKS, f"of {item - RANKS}", 2)
    assert admin.reported() == {2: {rank: f"of {rank}" for rank in range(RANKS)}}
    admin.deliver(Decided(2, 0))
    assert admin.state.decided == 2


def tolerance(answers: Answers) -> ToleranceStatus:
    status = answers.handle(Status())
    assert isinstance(status, JobStatus)
    return status.tolerance


def test_the_moves_that_a_lost_process_told_of_are_not_those_of_its_successor() -> None:
    state, news = Generations({0: Node("h", (0,))}), list[Worker]()
    messages = WorkerMessages(state, (0,), lambda event: None, news.append, never, lambda: 7.0)
    for message, moves in ((Hello(), {}), (Moving("3 layers move"), {0: "3 layers move"}), (Hello(), {})):
        messages.said(worker(0), message)
        assert messages.moving == moves
    assert len(news) == 2


def test_every_agent_answers_what_a_member_said_last_can_be_lost() -> None:
    admin, appended = Admin(), list[Event]()
    answers = Answers(Sources("job", admin.state, JobHistory(), JobClock()), appended.append)
    assert tolerance(answers) == ToleranceStatus(0, "")
    for generation, text in ((1, "any 2 nodes"), (1, "any 1 node"), (0, "of a generation before")):
        admin.worker_messages.said(worker(0), ToleranceText(generation, text))
    assert tolerance(answers) == ToleranceStatus(1, "any 1 node")
    admin.worker_messages.said(worker(0), ToleranceText(1, "x" * 10_000))
    assert admin.state.announced == (1, "x" * 500) and not appended
