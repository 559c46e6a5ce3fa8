"""A worker is told each thing once, and only what is for it."""

from __future__ import annotations

from typing import Any

from megatron.elastic.comm.address import Address
from megatron.elastic.control.events import Decided, Entry, Lost, Requested, Waiting
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.messages import Begun, Decide, Freeze, Members, ToWorker
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.requests import Request
from megatron.elastic.launch.agent.notify_workers import notify_worker
from megatron.elastic.launch.workers.pool import Worker

SPARE = 2


class Job:
    """Two ranks of the launch and a spare on one node; what each of their processes is told."""

    def __init__(self) -> None:
        self.state = Generations({0: Node("h", (0, 1, SPARE))}, nominal=2)
        self.workers = [self.start(rank, 0) for rank in (0, 1, SPARE)]

    def start(self, rank: int, incarnation: int) -> Worker:
        nothing: Any = None  # messages are not sent
        return Worker(rank, rank, rank, incarnation, nothing, nothing, elastic=True)

    def wait(self, *ranks: int) -> None:
        for rank in ranks:
            incarnation = self.workers[rank].incarnation
            self.state.apply(Waiting((Entry(Address(rank, incarnation, "h"), ""),)))

    def told(self, rank: int) -> list[type[ToWorker]]:
        messages: list[ToWorker] = []
        notify_worker(self.state, self.workers[rank], lambda worker, message: messages.append(message))
        return [type(message) for message in messages]


def prepared() -> Job:
    """All members are decided and prepare."""
    job = Job()
    job.state.apply(Requested(Request.SETUP, (0, 1), 0))
    job.wait(0, 1)
    job.state.apply(Decided(1, 0))
    return job


def test_a_newcomer_hears_of_the_begin_when_all_members_have_begun_and_not_before() -> None:
    job = prepared()
    assert job.told(0) == [Decide] and job.told(SPARE) == []
    job.state.apply(Requested(Request.BEGIN, (0,), 1))
    assert job.told(SPARE) == []
    job.state.apply(Requested(Request.BEGIN, (1,), 1))
    for rank in (0, SPARE):
        assert job.told(rank) == [Begun] and job.told(rank) == []
    job.wait(SPARE)
    assert job.told(SPARE) == [Members]


def test_a_rank_that_is_started_again_hears_of_the_begin_before_it_asks_to_join() -> None:
    job = prepared()
    job.state.apply(Requested(Request.BEGIN, (0, 1), 1))
    job.state.apply(Lost((Loss(1, 0, "h", "signal SIGKILL"),), (1,)))
    job.workers[1] = job.start(1, 1)
    assert job.told(1) == [Begun], "nothing of the generation, of which it is no member"
    assert Freeze in job.told(0)
