"""Events that agents tell of their own ranks are taken in once and in order, whichever way they came."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.control.events import Event, Finished, JobEnded, Lost, NodeBack, NodeLost, Part, Together
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.wire import ProtocolError
from megatron.elastic.launch.agent.own_events import JointEntries, OwnEvents, hold_seconds, told

HOLD = 0.04


class Clock:
    """Timers that go off when a test lets time pass."""

    def __init__(self) -> None:
        self.time = 100.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.time + seconds, len(self._due), call))

    def passes(self, seconds: float) -> None:
        self.time += seconds
        while self._due and self._due[0][0] <= self.time:
            heapq.heappop(self._due)[2]()


class Agents:
    """Agents of two ranks each, a journal, and what was said to the first one and is not heard yet."""

    def __init__(self, count: int = 3, hold: float = HOLD) -> None:
        self.clock, self.journal = Clock(), list[Event]()
        self.states = [Generations(nodes(count)) for _ in range(count)]
        self.said: list[deque[bytes]] = [deque() for _ in range(count)]
        self.connected = [True] * count
        self.unlearned = [False] * count
        """The connection broke, and its agent does not know yet."""
        self.hangs = False
        self.first = JointEntries(nodes(count), self.clock, self.journal.append, hold)
        self.agents = [
            OwnEvents(node, state, self.journal.append, self.first, partial(self.say, node))
            for node, state in enumerate(self.states)
        ]
        self.read = [0] * count
        self.taken: list[list[Event]] = [[] for _ in range(count)]
        self.meant: list[list[Event]] = [[] for _ in range(count)]

    def say(self, node: int, body: bytes) -> bool:
        if self.connected[node]:
            self.said[node].append(body)
        return self.connected[node]

    def says(self, node: int) -> None:
        number = len(self.meant[node])
        event = Finished(2 * node, number, 0)
        self.meant[node].append(event)
        self.agents[node].append(event)

    def hears(self, node: int) -> None:
        if self.said[node] and not self.hangs:
            epoch = self.states[0].nodes[node].epoch
            self.first.hear(node, epoch, self.said[node].popleft())

    def breaks(self, node: int) -> None:
        if node and self.connected[node]:
            self.said[node].clear()
            self.connected[node], self.unlearned[node] = False, True

    def learns(self, node: int) -> None:
        if self.unlearned[node]:
            self.unlearned[node] = False
            self.agents[node].way_lost()

    def connects(self, node: int) -> None:
        """There is a connection again, perhaps before the agent knows that the one before it broke."""
        self.connected[node] = True

    def reads(self, node: int) -> None:
        if self.read[node] < len(self.journal):
            entry = self.journal[self.read[node]]
            self.read[node] += 1
            self.taken[node] += self.states[node].events_of(entry)
            self.agents[node].seen()

    def settle(self) -> None:
        """Everything that is under way arrives."""
        for _ in range(2):
            for node in range(len(self.agents)):
                self.learns(node)
                while self.said[node] and not self.hangs:
                    self.hears(node)
                self.agents[node].look()
            self.clock.passes(10 * HOLD)
            for node in range(len(self.agents)):
                while self.read[node] < len(self.journal):
                    self.reads(node)


def nodes(count: int) -> dict[int, Node]:
    return {node: Node(f"host{node}", (2 * node, 2 * node + 1)) for node in range(count)}


ACTIONS = st.tuples(
    st.sampled_from(["says", "says", "hears", "hears", "reads", "reads", "breaks", "learns", "connects", "passes"]),
    st.integers(0, 2),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(ACTIONS, max_size=80), st.sampled_from([0.0, HOLD]))
def test_every_agent_takes_in_each_part_once_and_in_its_order(actions: list[tuple[str, int]], hold: float) -> None:
    agents = Agents(hold=hold)
    for action, node in actions:
        if action == "passes":
            agents.clock.passes(HOLD / 2)
        else:
            getattr(agents, action)(node)
    agents.settle()
    for node, meant in enumerate(agents.meant):
        for taken in agents.taken:
            assert [event for event in taken if event.rank == 2 * node] == meant  # type: ignore[union-attr]
    assert agents.taken[0] == agents.taken[1] == agents.taken[2]


def test_what_comes_alone_is_appended_at_once_and_what_follows_together() -> None:
    agents = Agents()
    agents.says(0)
    assert len(agents.journal) == 1
    for node in (0, 1, 2):
        agents.says(node)
        agents.hears(node)
    assert len(agents.journal) == 1
    agents.clock.passes(HOLD)
    (_, entry) = agents.journal
    assert isinstance(entry, Together) and [part.node for part in entry.parts] == [0, 1, 2]
    agents.clock.passes(HOLD)
    agents.says(2)
    agents.hears(2)
    assert len(agents.journal) == 3, "alone again"


def test_entries_are_of_limited_size() -> None:
    agents = Agents(1)
    for _ in range(600):
        agents.says(0)
    agents.clock.passes(HOLD)
    assert [len(entry.parts) for entry in agents.journal if isinstance(entry, Together)] == [1, 256, 256, 87]


def test_a_small_job_waits_for_nothing() -> None:
    assert hold_seconds(2) == 0.0 and hold_seconds(1000) > 0.0
    agents = Agents(hold=0.0)
    for _ in range(3):
        agents.says(1)
        agents.hears(1)
    assert len(agents.journal) == 3


def test_what_a_first_agent_that_hangs_was_told_is_appended_after_a_while() -> None:
    agents = Agents()
    agents.hangs = True
    agents.says(1)
    agents.agents[1].look()
    assert not agents.journal, "it may have been said just now"
    agents.settle()
    assert agents.taken[2] == agents.meant[1]
    agents.hangs = False
    agents.settle()
    assert agents.taken[2] == agents.meant[1], "and what comes late is known"


def test_a_new_way_carries_all_that_was_not_seen_before() -> None:
    """An event that was appended before may still be on its way to the journal."""
    appended, said, connected = list[Event](), list[bytes](), False

    def say(body: bytes) -> bool:
        if connected:
            said.append(body)
        return connected

    agent = OwnEvents(1, Generations(nodes(2)), appended.append, Agents().first, say)
    events = [Finished(2, number, 0) for number in range(4)]
    parts = tuple(Part(1, 0, number + 1, event) for number, event in enumerate(events))
    agent.append(events[0])
    assert appended == [Together(parts[:1])]
    connected = True
    agent.append(events[1])
    agent.append(events[2])
    assert said == [told(parts[:2]), told(parts[2:3])]
    connected = False
    agent.append(events[3])
    assert appended[1:] == [Together(parts)]


def test_other_events_are_appended_by_their_own_agent() -> None:
    agents = Agents()
    ended = JobEnded(1, "why")
    agents.agents[1].append(ended)
    assert agents.journal == [ended]


@pytest.mark.parametrize(
    "part",
    [
        Part(2, 0, 1, Finished(4, 0, 0)),
        Part(1, 1, 1, Finished(2, 0, 0)),
        Part(1, 0, 1, Finished(4, 0, 0)),
        Part(1, 0, 1, Lost((Loss(0, 0, "h", "killed"),))),
    ],
    ids=["as another node", "in another life", "of another's rank", "of another's loss"],
)
def test_an_agent_speaks_for_its_own_ranks_alone(part: Part) -> None:
    agents = Agents()
    with pytest.raises(ProtocolError, match="node 1 speaks for another one"):
        agents.first.hear(1, 0, told((part,)))
    with pytest.raises(ProtocolError):
        agents.first.hear(1, 0, b"nonsense")
    assert not agents.journal


def test_what_was_said_in_a_life_that_is_over_does_not_count() -> None:
    agents = Agents()
    for _ in range(3):
        agents.says(1)
    agents.hears(1)
    for node in range(3):
        agents.reads(node)
        assert agents.taken[node] == agents.meant[1][:1]
        agents.taken[node].clear()
    for state in agents.states:
        state.apply(NodeLost(1, 0, "gone"))
        state.apply(NodeBack(1, 1, "host1"))
    agents.said[1].clear()
    agents.meant[1].clear()
    agents.says(1)
    agents.settle()
    assert agents.taken[0] == agents.meant[1]
    for state in agents.states:
        old = Together((Part(1, 0, 3, Finished(2, 1, 0)),))
        assert not list(state.events_of(old))


def test_a_part_counts_behind_the_one_before_it() -> None:
    state = Generations(nodes(2))
    first, second = (Part(1, 0, number, Finished(2, number, 0)) for number in (1, 2))
    assert list(state.events_of(Together((second,)))) == []
    assert list(state.events_of(Together((first, second, first)))) == [first.event, second.event]
    assert list(state.events_of(Together((second, Part(7, 0, 1, second.event))))) == []
