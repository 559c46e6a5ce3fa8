"""A worker's membership against an agent played by the test over the real socket."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

import pytest

from megatron.elastic.comm.address import Address
from megatron.elastic.comm.errors import CommTimeout, GenerationChanged
from megatron.elastic.control.client import NotUnderLauncher, WorkerMembership
from megatron.elastic.control.membership import Activity, Decision, Loss, RunFigures
from megatron.elastic.control.messages import (
    FROM_WORKER,
    Ask,
    Begun,
    Decide,
    Finish,
    Freeze,
    FromWorker,
    PendingChanged,
    Promise,
    Suspicion,
    ToWorker,
)
from megatron.elastic.control.requests import Pending, Request
from megatron.elastic.control.slot import Slot
from megatron.elastic.control.wire import FrameReader, frame

T = TypeVar("T", bound=FromWorker)

HERE = Address(1, 0, "h")


class Agent:
    """The other end: sends what a test says, and reads what the worker says."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        fd, self.slot = Slot.create("test")
        self.worker = WorkerMembership(1, 0, 2, theirs, Slot(fd), "node/1", domain="rack7/node")
        os.close(fd)
        self.socket.settimeout(20)
        self._reader = FrameReader(FROM_WORKER)
        self._read: list[FromWorker] = []
        self.reports: list[Promise] = []

    def tell(self, *messages: ToWorker) -> None:
        self.socket.sendall(b"".join(map(frame, messages)))

    def decide(self, generation: int, *ranks: int, lost: tuple[Loss, ...] = ()) -> None:
        members = {rank: Address(rank, 0, "h") for rank in ranks}
        self.tell(Decide(Decision(generation, members, "loss", lost)))

    def answer(self, generation: int, *ranks: int) -> None:
        """Decide once the worker has reported, as an agent does; returns at once."""
        later(lambda: (self.reports.append(self.hear(Promise)), self.decide(generation, *ranks)))

    def hear(self, kind: type[T]) -> T:
        while True:
            while self._read:
                message = self._read.pop(0)
                if isinstance(message, kind):
                    return message
            self._read += list(self._reader.feed(self.socket.recv(1 << 16)))


def test_a_worker_reads_the_newest_figures_of_the_run_and_none_of_half_a_write(agent: Agent) -> None:
    assert agent.worker.figures() is None
    for losses in (1, 2):
        figures = RunFigures(losses, 1, 0, 1, 1, 0, 0.25, 1.5, 0.0, 0.99, (0.25, 0.0, 0.0, 0.0, 1.25, 0.0))
        agent.slot.tell(figures)
        assert agent.worker.figures() == figures
    agent.slot._map[2304] |= 1  # the agent is writing
    assert agent.worker.figures() is None


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    # The end of its agent would end this process.
    made.worker.close()


def later(call: object) -> threading.Thread:
    assert callable(call)
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_the_first_report_joins_and_the_decision_comes_back(agent: Agent) -> None:
    agent.worker.start(lambda generation: None)
    agent.answer(1, 0, 1)
    decision = agent.worker.decide(HERE, "mine", 20)
    assert decision.generation == 1 and agent.worker.frozen() == 1
    assert agent.reports[0].address.host == "node/1", "the node's name, whatever the transport calls its host"
    assert agent.reports[0].address.domain == "rack7/node"


def test_freeze_is_called_back_and_the_report_is_for_that_generation(agent: Agent) -> None:
    frozen: list[int] = []
    agent.worker.start(frozen.append)
    agent.answer(1, 0, 1)
    agent.worker.decide(HERE, "", 20)
    agent.tell(Freeze(2))
    while agent.worker.frozen() < 2:
        time.sleep(0.001)
    assert frozen == [2]
    agent.answer(2, 1)
    assert agent.worker.decide(HERE, "held", 20).generation == 2
    assert [(report.generation, report.report) for report in agent.reports] == [(0, ""), (2, "held")]


def test_a_newer_freeze_while_reporting_asks_to_report_anew(agent: Agent) -> None:
    agent.worker.start(lambda generation: None)
    agent.answer(1, 0, 1)
    agent.worker.decide(HERE, "", 20)
    agent.tell(Freeze(2))
    while agent.worker.frozen() < 2:
        time.sleep(0.001)
    later(lambda: (agent.hear(Promise), agent.tell(Freeze(3))))
    with pytest.raises(GenerationChanged) as changed:
        agent.worker.decide(HERE, "", 20)
    assert changed.value.generation == 3


def test_a_decision_already_overtaken_is_never_returned(agent: Agent) -> None:
    agent.worker.start(lambda generation: None)

    def overtake() -> None:
        agent.hear(Promise)
        agent.tell(Decide(Decision(1, {1: HERE}, "start")), Freeze(2))

    later(overtake)
    try:
        assert agent.worker.decide(HERE, "", 20).generation == 1
        while agent.worker.frozen() < 2:
            time.sleep(0.001)
    except GenerationChanged as changed:
        assert changed.generation == 2
    agent.answer(2, 1)
    assert agent.worker.decide(HERE, "again", 20).generation == 2


def test_losses_of_a_decision_already_overtaken_are_not_forgotten(agent: Agent) -> None:
    """Or nobody would tell of them: each decision names what was lost since the one before."""
    agent.worker.start(lambda generation: None)
    agent.answer(1, 0, 1, 2, 3)
    agent.worker.decide(HERE, "", 20)
    agent.tell(Freeze(2))
    agent.decide(2, 0, 1, 3, lost=(Loss(2, 0, "h", "signal SIGKILL"),))
    agent.tell(Freeze(3))
    while agent.worker.frozen() < 3:
        time.sleep(0.001)
    later(lambda: (agent.hear(Promise), agent.decide(3, 1, 3, lost=(Loss(0, 0, "h", "signal SIGKILL"),))))
    assert [loss.rank for loss in agent.worker.decide(HERE, "", 20).lost] == [0]
    assert [loss.rank for loss in agent.worker.overlooked()] == [2]
    agent.tell(Freeze(4))
    while agent.worker.frozen() < 4:
        time.sleep(0.001)
    agent.answer(4, 1, 3)
    agent.worker.decide(HERE, "", 20)
    assert agent.worker.overlooked() == (), "each is told once"


def test_in_quiet_times_a_report_is_for_the_next_generation_and_its_decision_needs_no_other(agent: Agent) -> None:
    agent.worker.start(lambda generation: None)
    agent.answer(1, 0, 1)
    agent.worker.decide(HERE, "", 20)
    later(lambda: (agent.reports.append(agent.hear(Promise)), agent.tell(Freeze(2)), agent.decide(2, 0, 1)))
    assert agent.worker.decide(HERE, "held before the freeze", 20).generation == 2
    assert (agent.reports[-1].generation, agent.reports[-1].report) == (2, "held before the freeze")


def test_a_report_ahead_is_worth_nothing_after_a_second_freeze(agent: Agent) -> None:
    agent.worker.start(lambda generation: None)
    agent.answer(1, 0, 1)
    agent.worker.decide(HERE, "", 20)
    later(lambda: (agent.hear(Promise), agent.tell(Freeze(2)), agent.tell(Freeze(3))))
    with pytest.raises(GenerationChanged) as changed:
        agent.worker.decide(HERE, "held before the freeze", 20)
    assert changed.value.generation == 3


def test_a_decision_that_came_after_the_time_allowed_is_not_missed(agent: Agent) -> None:
    agent.worker.start(lambda generation: None)
    with pytest.raises(CommTimeout):
        agent.worker.decide(HERE, "", 0.05)
    agent.decide(1, 0, 1)
    while agent.worker.frozen() < 1:
        time.sleep(0.001)
    assert agent.worker.decide(HERE, "", 20).generation == 1


def test_waiting_ends_with_the_time_allowed(agent: Agent) -> None:
    agent.worker.start(lambda generation: None)
    with pytest.raises(CommTimeout):
        agent.worker.decide(HERE, "", 0.05)


def test_pending_and_requests_and_suspicions_travel(agent: Agent) -> None:
    agent.worker.start(lambda generation: None)
    agent.tell(PendingChanged(Pending(join=True)))
    while agent.worker.pending() != Pending(join=True):
        time.sleep(0.001)
    agent.worker.request(Request.JOIN)
    assert agent.hear(Ask) == Ask(Request.JOIN, 0)
    agent.worker.suspect(0, "link")
    assert agent.hear(Suspicion) == Suspicion(0, 0, "link")
    agent.worker.finish(3)
    assert agent.hear(Finish) == Finish(3) and agent.slot.finished() == 3


def test_the_first_vote_waits_until_the_agent_says_that_all_have_begun(agent: Agent) -> None:
    agent.worker.start(lambda generation: None)
    with pytest.raises(CommTimeout):
        agent.worker.await_begin(0.05)
    later(lambda: agent.tell(Freeze(1)))
    with pytest.raises(GenerationChanged):
        agent.worker.await_begin(20)
    agent.decide(1, 0, 1)
    later(lambda: agent.tell(Begun()))
    while agent.worker._decided < 1:
        time.sleep(0.001)
    agent.worker.await_begin(20)
    agent.tell(Freeze(2))
    agent.worker.await_begin(0.0)


def test_a_sampled_wait_keeps_the_step_and_gives_way_to_what_was_published(agent: Agent) -> None:
    waits: list[Activity | None] = [Activity(-1, "communication", (0,))]
    agent.worker.sample(lambda: waits[-1])
    agent.worker.start(lambda generation: None)
    agent.worker.publish(Activity(7, "compute"))
    while agent.slot.look().activity != Activity(7, "communication", (0,)):
        time.sleep(0.005)
    first = agent.slot.look().watched_ns
    while agent.slot.look().watched_ns <= first:  # it says so again and again
        time.sleep(0.005)
    waits.append(None)
    while agent.slot.look().activity != Activity(7, "compute"):
        time.sleep(0.005)
    assert agent.slot.look().watched_ns == 0


def test_outside_the_launcher_the_error_names_the_launcher() -> None:
    with pytest.raises(NotUnderLauncher, match=r"python -m megatron\.elastic\.launch"):
        WorkerMembership.from_env({"RANK": "0"})
