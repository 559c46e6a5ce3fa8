"""The journal is trimmed while agents read, lag, are given up and come late: all end in the state of the whole journal.

The model: three agents over one real store, each with its own view, and the record of every
event that was ever in the journal, which nothing trims. Steps in any order; an agent that is
not given up may lag as far as it likes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.comm.address import Address
from megatron.elastic.control import events as ev
from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.failures import Failures
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.journal import Journal, Mark, Snapshot, Trimmed, keep, newest, trim
from megatron.elastic.control.keys import Keys, LocalStore
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.observations import RESTART
from megatron.elastic.control.quarantine import Quarantine
from megatron.elastic.control.requests import Drain, Request, SaveCheckpoint
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.snapshot import dump, restore
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.control.wire import ProtocolError
from megatron.elastic.launch.agent import journal_trimming
from megatron.elastic.launch.agent.journal_trimming import JournalTrimming

NODES, RANKS = 3, 2
EVERY = 8
SEAL = Signer(Credentials("5e" * 16, "run"))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_trimming, "TRIM_ENTRIES", EVERY)


def job() -> Generations:
    nodes = {n: Node(f"h{n}", tuple(range(n * RANKS, (n + 1) * RANKS))) for n in range(NODES)}
    return Generations(nodes, quarantine=Quarantine(1))


@dataclass
class Agent:
    """The part of the launcher's agent that keeps the journal, without workers."""

    node: int
    store: Store
    seen: dict[int, int]
    everything: dict[int, ev.Event] = field(default_factory=dict)
    """Position → event, of all agents together."""
    state: Generations = field(default_factory=job)
    failures: Failures = field(default_factory=Failures)

    def __post_init__(self) -> None:
        self.journal = Journal(self.store, SEAL)
        self.trimming = JournalTrimming(self.store, SEAL, self.node, self.state, self.failures, JobHistory(), self.seen)
        self.journal.mark = self.trimming.resume()
        self.restarts = 0

    def take(self, entries: Iterator[tuple[int, ev.Event | None]]) -> None:
        for position, event in entries:
            assert event is not None and self.everything.setdefault(position, event) == event
            apply(self.state, self.failures, event)
            self.trimming.read(self.journal.mark, self.journal.position)

    def read(self, entries: int = 1) -> None:
        try:
            for _ in range(entries):
                if self.journal.position < len(self.everything):  # there is something, or it is trimmed
                    self.take(self.journal.follow(0.001))
        except Trimmed:
            self.restarts += 1
            self.journal.mark = self.trimming.resume()

    def append(self, event: ev.Event) -> bool:
        with suppress(Trimmed):
            self.take(self.journal.append(event))
            return True
        return False


def apply(state: Generations, failures: Failures, event: ev.Event) -> None:
    state.apply(event)
    if isinstance(event, ev.Lost):
        loss = event.losses[0]
        failures.record(loss.rank, loss.incarnation, event.steps[0], loss.ending == "error", event.at)


def some_event(state: Generations, draw: random.Random) -> ev.Event:
    """One that means something in ``state``, mostly."""
    rank = draw.randrange(NODES * RANKS)
    incarnation = state.ranks[rank].incarnation
    node = draw.randrange(NODES)
    missing = state.missing()
    choices: list[ev.Event] = [
        ev.Lost((Loss(rank, incarnation, "h", "signal SIGKILL", ("last",)),), (4,), 1e4 * draw.random()),
        ev.Waiting((ev.Entry(Address(rank, incarnation + 1, "h", {"ports": [1, 2]}), ""),)),
        ev.NodeLost(node, state.nodes[node].epoch, "gone", 1e4 * draw.random()),
        ev.NodeBack(node, state.nodes[node].epoch + 1, "new"),
        ev.Wanted(SaveCheckpoint()),
        *[ev.Lifted(n, state.quarantine.nodes[n].level, "over") for n in state.quarantine.out()],
        *[ev.Waiting((ev.Entry(Address(r, state.ranks[r].incarnation, "h"), "held"),)) for r in missing] * 3,
        *[ev.Reported(state.frozen, (ev.Entry(Address(r, state.ranks[r].incarnation, "h"), "held"),)) for r in missing],
        *[ev.Requested(what, state.members, state.decided) for what in (Request.JOIN, Request.BEGIN)],
        *([ev.Decided(state.frozen, 0)] * 4 if state.ready() else []),
    ]
    return draw.choice(choices)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(20, 120))
def test_a_late_reader_or_newcomer_ends_where_the_whole_journal_ends(seed: int, steps: int) -> None:
    print(f"seed {seed}")
    draw, seen = random.Random(seed), dict[int, int]()
    store = LocalStore(Keys())
    everything: dict[int, ev.Event] = {}
    agents = {node: Agent(node, store, seen, everything) for node in range(NODES)}
    for _ in range(steps):
        agent = agents[draw.randrange(NODES)]
        what = draw.random()
        if what < 0.5:
            agent.append(some_event(agent.state, draw))
        elif what < 0.9:
            agent.read(draw.randrange(6))
            seen[agent.node] = agent.journal.position
        else:
            while not agent.trimming._work.empty():
                agent.trimming.carry_out(store)
    whole, counted = job(), Failures()
    assert sorted(everything) == list(range(len(everything)))
    for position in sorted(everything):
        apply(whole, counted, everything[position])
    newcomer = Agent(0, store, {}, everything)
    for agent in (*agents.values(), newcomer):
        while agent.journal.position < len(everything):
            agent.read(len(everything))
        assert agent.state == whole and agent.failures == counted


def test_what_all_have_read_is_gone_and_a_reader_that_slept_starts_from_the_snapshot() -> None:
    seen: dict[int, int] = {}
    store = LocalStore(Keys())
    everything: dict[int, ev.Event] = {}
    awake, asleep = Agent(0, store, seen, everything), Agent(1, store, {}, everything)
    awake.append(ev.NodeLost(1, 0, "stopped"))
    awake.append(ev.NodeLost(2, 0, "stopped"))
    for number in range(3 * EVERY):
        awake.append(ev.Lost((Loss(0, number, "h", "signal SIGKILL"),), (number,), float(number)))
        while not awake.trimming._work.empty():
            awake.trimming.carry_out(store)
    kept = newest(store, SEAL)
    assert kept is not None and kept.mark.position == 3 * EVERY
    assert [store.get(f"journal/{n}") is None for n in range(3 * EVERY + 2)] == [True] * 3 * EVERY + [False] * 2
    assert not asleep.append(ev.Wanted(Drain())), "it does not write into the past"
    asleep.read()
    asleep.read(5)
    assert asleep.restarts == 1 and asleep.state == awake.state
    assert not asleep.state.nodes[1].alive, "and learns that it was given up"


def test_a_trim_cut_short_is_finished_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(Keys())
    journal = Journal(store, SEAL)
    marks = []
    for _ in range(10):
        marks.append(journal.mark)
        list(journal.append(ev.Wanted(SaveCheckpoint())))
    delete, left = store.delete, [3]

    def dies(key: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StoreLost("killed here")
        delete(key)

    monkeypatch.setattr(store, "delete", dies)
    with pytest.raises(StoreLost):
        trim(store, SEAL, 6)
    with pytest.raises(Trimmed):
        list(Journal(store, SEAL, marks[5]).follow(0.001)) and list(Journal(store, SEAL).follow(0.001))
        list(Journal(store, SEAL).follow(0.001))
    monkeypatch.setattr(store, "delete", delete)
    assert trim(store, SEAL, 8) == 8
    assert [store.get(f"journal/{n}") is None for n in range(10)] == [True] * 8 + [False] * 2


@dataclass
class Stopped:
    """A coordinator's connection whose owner is stopped once, between reading ``key`` and what it does about it."""

    store: Store
    key: str
    meanwhile: Callable[[], None] | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def get(self, key: str) -> bytes | None:
        found = self.store.get(key)
        if key == self.key and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return found


@pytest.mark.parametrize("first", [False, True], ids=["an older one is there", "none is there"])
def test_a_coordinator_stopped_before_it_writes_puts_no_old_snapshot_back(first: bool) -> None:
    store = LocalStore(Keys())
    if not first:
        assert keep(store, SEAL, Snapshot(Mark(10, "c"), b"{}"))
    newer = Snapshot(Mark(30, "c"), b'{"by": "successor"}')
    late = Stopped(store, "journal/snapshot", lambda: assert_kept(store, newer))
    assert not keep(cast(Store, late), SEAL, Snapshot(Mark(20, "c"), b'{"by": "late"}'))
    assert newest(store, SEAL) == newer
    earlier = Stopped(store, "journal/snapshot", lambda: assert_kept(store, Snapshot(Mark(40, "c"), b"{}")))
    assert keep(cast(Store, earlier), SEAL, Snapshot(Mark(50, "c"), b'{"by": "late, but newer"}'))
    assert newest(store, SEAL) == Snapshot(Mark(50, "c"), b'{"by": "late, but newer"}')


def assert_kept(store: Store, snapshot: Snapshot) -> None:
    assert keep(store, SEAL, snapshot)


def test_a_coordinator_stopped_before_it_trims_does_not_lower_the_floor() -> None:
    store = LocalStore(Keys())
    journal = Journal(store, SEAL)
    marks = []
    for _ in range(12):
        marks.append(journal.mark)
        list(journal.append(ev.Wanted(SaveCheckpoint())))
    late = Stopped(store, "journal/floor", lambda: None if trim(store, SEAL, 9) == 9 else pytest.fail("not trimmed"))
    assert trim(cast(Store, late), SEAL, 5) == 0
    with pytest.raises(Trimmed):
        list(Journal(store, SEAL, marks[7]).follow(0.001))
    assert [store.get(f"journal/{n}") is None for n in range(12)] == [True] * 9 + [False] * 3


def test_a_snapshot_of_something_else_is_refused_and_changes_nothing() -> None:
    state, failures = job(), Failures()
    plain = json.loads(dump(state, failures, JobHistory()))
    inner = plain["generations"]
    other_nodes = dump(Generations({0: Node("h0", (0,))}), failures, JobHistory())
    broken: list[object] = [{}, None, [], {**plain, "more": 1}]
    wrong: list[dict[str, object]] = [
        {"frozen": "1"},
        {"ranks": {"x": {}}},
        {"ranks": {"0": inner["ranks"]["0"]}},
        {"more": 1},
        {"reason": "whim"},
    ]
    broken += [{**plain, "generations": {**inner, **fields}} for fields in wrong]
    for text in (*(json.dumps(each).encode() for each in broken), other_nodes, b"", b"\xff"):
        with pytest.raises(ProtocolError):
            restore(state, failures, JobHistory(), text)
    assert state == job() and failures == Failures()
    store = LocalStore(Keys())
    store.put("journal/snapshot", b"garbage")
    with pytest.raises(StoreLost, match="cannot be used"):
        Agent(0, store, {})


def test_what_others_hold_a_reference_to_is_the_same_after_a_restore() -> None:
    state, failures = job(), Failures()
    nodes, node = state.nodes, state.nodes[1]
    later = job()
    later.apply(ev.NodeLost(1, 0, "gone"))
    history, told = JobHistory(), JobHistory(losses=3, lost_s={RESTART: 2.0})
    restore(state, failures, history, dump(later, failures, told))
    assert history == told and state == later and state.nodes is nodes and state.nodes[1] is node and not node.alive
