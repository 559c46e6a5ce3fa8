"""The agent that serves the store appends from its loop, ahead of its own follower: both see every entry once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from megatron.elastic.control import events as ev
from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.failures import Failures
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.journal import BEGIN, Journal, Signer
from megatron.elastic.control.keys import Keys, LocalStore
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.quarantine import Quarantine
from megatron.elastic.launch.agent import journal_trimming
from megatron.elastic.launch.agent.journal_io import JournalIO
from megatron.elastic.launch.agent.journal_trimming import JournalTrimming
from megatron.elastic.launch.agent.loop import Loop

SEAL = Signer(Credentials("5e" * 16, "run"))
EVERY = 8
PATIENCE = 30.0


class SlowToWait(LocalStore):
    """A store whose waiting thread gets no turn while ``held``, as the follower of an agent on busy cores."""

    def __init__(self, keys: Keys) -> None:
        super().__init__(keys)
        self.held = threading.Event()
        self.turn = threading.Event()

    def wait_many(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        if threading.current_thread().name == "journal-follower" and self.held.is_set():
            assert self.turn.wait(PATIENCE)
        return super().wait_many(keys, min(timeout, 0.5))


class Agent:
    """The journal's part of an agent that serves the store and is the coordinator."""

    def __init__(self, store: LocalStore) -> None:
        self.loop, self.state, self.failures = (
            Loop(),
            Generations({0: Node("h", (0, 1))}, quarantine=Quarantine(1)),
            Failures(),
        )
        self.delivered: list[tuple[int, ev.Event | None]] = []
        self.problems: list[str] = []
        self.io = JournalIO(
            self.loop, store, SEAL, self.deliver, self.problems.append, lambda: self.problems.append("left behind")
        )
        self.trimming = JournalTrimming(store, SEAL, 0, self.state, self.failures, JobHistory(), {})
        self.io.start(BEGIN)

    def deliver(self, position: int, event: ev.Event | None) -> None:
        assert event is not None
        self.delivered.append((position, event))
        self.state.apply(event)
        self.trimming.read(self.io.mark, self.io.needed)

    def run_until(self, entries: int) -> None:
        end = time.monotonic() + PATIENCE

        def look() -> None:
            assert time.monotonic() < end and not self.problems, (self.problems, len(self.delivered))
            if len(self.delivered) >= entries:
                self.loop.stop()
            else:
                self.loop.after(0.002, look)

        look()
        self.loop.run()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowToWait]:
    monkeypatch.setattr(journal_trimming, "TRIM_ENTRIES", EVERY)
    store = SlowToWait(Keys())
    yield store
    store.held.clear()
    store.turn.set()


def loss(number: int) -> ev.Event:
    return ev.Lost((Loss(0, number, "h", "signal SIGKILL"),), (number,), float(number))


def test_entries_that_the_agents_own_follower_has_not_read_are_not_dropped(store: SlowToWait) -> None:
    agent = Agent(store)
    store.held.set()
    for number in range(3 * EVERY):
        agent.io.append(loss(number))
    agent.run_until(3 * EVERY)
    while not agent.trimming._work.empty():
        agent.trimming.carry_out(store)
    store.held.clear()
    store.turn.set()
    other = Journal(store, SEAL, agent.io.mark)  # of another agent, which appends behind them
    for _ in other.append(loss(3 * EVERY)):
        pass
    agent.run_until(3 * EVERY + 1)
    assert agent.delivered == [(n, loss(n)) for n in range(3 * EVERY + 1)], "each entry once, in order"


def test_entries_that_loop_and_follower_have_read_are_dropped(store: SlowToWait) -> None:
    agent = Agent(store)
    for number in range(3 * EVERY):
        agent.io.append(loss(number))
        agent.run_until(number + 1)
        end = time.monotonic() + PATIENCE
        while agent.io.needed <= number and time.monotonic() < end:
            time.sleep(0.001)
        while not agent.trimming._work.empty():
            agent.trimming.carry_out(store)
    gone = [n for n in range(3 * EVERY) if store.get(f"journal/{n}") is None]
    assert gone == list(range(len(gone))) and len(gone) >= 2 * EVERY
