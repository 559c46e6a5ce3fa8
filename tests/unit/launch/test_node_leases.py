"""A node is lost by what the store proves, whatever the pace of the agent that looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.agent_place import WATCHERS, AgentPlace
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.node_leases import NodeLeases, Silence

SEAL = Signer(Credentials("ab" * 16, "run"))
FAST = Timing.derive(0.05)
HOLDER = (0, "agent")
PAUSES = st.floats(0.0, 40.0)


class Shelf(Store):
    """A store in this process, with the requests that were made and how long every second read takes."""

    def __init__(self, shared: Shelf | None = None) -> None:
        self.values: dict[str, bytes] = {} if shared is None else shared.values
        self.root: Shelf = shared.root if shared is not None else self
        self.requests: list[str] = []
        self.read_seconds = 0.0
        self.closed = threading.Event()

    keeper = "a shelf"

    def put(self, key: str, value: bytes) -> None:
        self._ask("put")
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        self._ask("get")
        return self.values.get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes | None]:
        found = {key: self.values.get(key) for key in keys}
        self._ask("get_many")
        if self.root.requests.count("get_many") % 2 == 0:
            self.root.closed.wait(self.root.read_seconds)
        return found

    def _ask(self, what: str) -> None:
        self.root.requests.append(what)
        if self.root.closed.is_set():
            raise StoreLost("closed")

    def create(self, key: str, value: bytes) -> bytes:
        return self.values.setdefault(key, value)

    def replace(self, key: str, old: bytes | None, new: bytes) -> bool:
        raise NotImplementedError

    def wait(self, key: str, timeout: float) -> bytes | None:
        raise NotImplementedError

    def delete(self, key: str) -> None:
        raise NotImplementedError

    def clone(self) -> Shelf:
        return Shelf(self)


class Agents:
    """Agents over one store, each with a loop of its own that beats."""

    def __init__(self, count: int) -> None:
        self.shelf = Shelf()
        self.lost: list[tuple[int, int, int]] = []
        """(observer, node, epoch)"""
        self.extended: list[tuple[int, float]] = []
        self.heard: list[tuple[int, float]] = []
        self.nodes = {n: Node(f"h{n}", (n,), agent=f"agent{n}") for n in range(count)}
        self.leases: dict[int, NodeLeases] = {}
        self._loops: list[tuple[Loop, threading.Thread]] = []

    def start(self, node: int, token: str | None = None, store: Shelf | None = None, timing: Timing = FAST) -> None:
        loop = Loop()
        leases = NodeLeases(
            AgentPlace(node, token or f"agent{node}", self.nodes, store or self.shelf, SEAL, timing, loop),
            extend=lambda until: self.extended.append((node, time.monotonic())),
            lost=lambda other, epoch, why: self.lost.append((node, other, epoch)),
            heard=lambda now: self.heard.append((node, now)),
        )
        self.leases[node] = leases
        loop.every(timing.beat, lambda: leases.beat({}, 7, 1000.0 * node))
        leases.start()
        thread = threading.Thread(target=loop.run, daemon=True)
        self._loops.append((loop, thread))
        thread.start()

    def close(self) -> None:
        self.shelf.closed.set()
        for loop, thread in self._loops:
            loop.post(loop.stop)
            thread.join(20)  # not closed: a thread of the leases may have one more thing to tell it


@contextmanager
def agents(count: int) -> Iterator[Agents]:
    made = Agents(count)
    try:
        yield made
    finally:
        made.close()


def until(claim: object) -> None:
    assert callable(claim)
    end = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.005)


@given(st.lists(PAUSES, min_size=1, max_size=20), st.lists(st.tuples(PAUSES, PAUSES), min_size=1, max_size=40))
def test_no_pace_of_reading_proves_more_silence_than_there_was(
    renewals: list[float], reads: list[tuple[float, float]]
) -> None:
    """``renewals``: seconds between two; ``reads``: the pause before each, and how long it takes."""
    written = [sum(renewals[: i + 1]) for i in range(len(renewals))]
    gaps = [b - a for a, b in zip([0.0, *written], [*written, float("inf")], strict=True)]
    silence, now = Silence(cap=1000.0), 0.0
    for pause, takes in reads:
        began, now = now + pause, now + pause + takes
        for moment in (began, now):  # the value may be that of any moment within the read
            number = sum(at <= moment for at in written)
            silent = silence.note(1, HOLDER, number, began, now)
            assert silent <= gaps[number] + 1e-6


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=30))
def test_an_observer_that_did_not_run_counts_little_of_the_time(gaps: list[float]) -> None:
    silence, now = Silence(cap=1.5), 0.0
    silence.note(1, HOLDER, 4, now, now)
    for count, gap in enumerate(gaps, 1):
        now += gap
        assert silence.note(1, HOLDER, 4, now, now) <= 1.5 * count + 1e-9
    assert silence.note(1, HOLDER, 5, now, now) == 0.0


@pytest.mark.parametrize("number", [None, 3, 2])
def test_a_repeated_old_lease_or_none_is_no_sign_of_life_and_a_new_agent_begins_anew(number: int | None) -> None:
    silence = Silence(cap=1.5)
    silence.note(1, HOLDER, 3, 0.0, 0.0)
    assert silence.note(1, HOLDER, number, 1.0, 1.0) == 1.0
    assert silence.note(1, (1, "next"), 1, 2.0, 2.0) == 0.0


def test_a_node_whose_agent_stops_renewing_is_lost_and_one_that_renews_is_not() -> None:
    with agents(3) as job:
        for node in (0, 1):
            job.start(node)
        until(lambda: {(by, node) for by, node, _ in job.lost} == {(0, 2), (1, 2)})
        assert {node for _, node, _ in job.lost} == {2}


def test_a_slow_reader_loses_no_node_that_renews_and_its_own_workers_go_on() -> None:
    """Every second read takes longer than a lease; renewals do not wait for it."""
    with agents(2) as job:
        job.start(0)
        slow = Shelf(job.shelf)
        slow.root, slow.read_seconds = slow, 1.3 * FAST.lease
        job.start(1, store=slow)
        until(lambda: slow.requests.count("get_many") >= 12)
        slow.closed.set()
        assert job.lost == []
        mine = [at for node, at in job.extended if node == 1]
        assert len(mine) >= slow.requests.count("get_many") * 2, "each renewal extends, whatever is being read"


def test_a_round_is_one_read_however_many_nodes_there_are() -> None:
    with agents(400) as job:
        job.start(0, timing=Timing.derive(1.0))
        until(lambda: job.shelf.requests.count("get_many") >= 3)
        assert set(job.shelf.requests) == {"put", "get_many"}


def test_the_lease_of_an_agent_that_does_not_hold_the_place_keeps_no_node_alive() -> None:
    with agents(2) as job:
        job.start(0)
        job.start(1, token="another")
        until(lambda: (0, 1, 0) in job.lost)
        assert job.leases[0].tables == {} and job.leases[0].seen == {}


def test_a_broken_connection_is_no_loss_while_the_lease_is_renewed_and_makes_one_sooner_when_it_is_not() -> None:
    timing = Timing.derive(0.2)
    with agents(3) as job:
        job.start(0, timing=timing)
        job.start(1, timing=timing)
        until(lambda: 1 in job.leases[0].seen)
        job.leases[0].doubt(1)
        job.leases[0].doubt(2)
        began = time.monotonic()
        until(lambda: (0, 2, 0) in job.lost)
        assert (1, 2, 0) not in job.lost, f"node 1 waits for the whole lease ({time.monotonic() - began:.1f} s so far)"
        until(lambda: (1, 2, 0) in job.lost)
        assert {node for _, node, _ in job.lost} == {2}


def test_the_first_nodes_read_all_leases_and_the_others_read_theirs() -> None:
    """So the store serves a number of leases that grows with the number of nodes, not with its square."""
    nodes = {n: Node(f"h{n}", (n,), agent=f"agent{n}") for n in range(WATCHERS + 40)}
    watched = {n: set(AgentPlace(n, "", nodes, Shelf(), SEAL, FAST, Loop()).watched()) for n in nodes}
    assert all(watched[n] == nodes.keys() - {n} for n in range(WATCHERS))
    assert all(watched[n] == set(range(WATCHERS)) for n in range(WATCHERS, len(nodes)))
    nodes[0].alive = False
    watched = {n: set(AgentPlace(n, "", nodes, Shelf(), SEAL, FAST, Loop()).watched()) for n in nodes}
    assert watched[WATCHERS] == nodes.keys() - {0, WATCHERS}, "it takes the place of the lost one"
    assert watched[0] == watched[WATCHERS + 1] == set(range(1, WATCHERS + 1))


def test_if_all_that_read_every_lease_are_lost_at_once_the_others_find_that_and_the_further_losses() -> None:
    count = WATCHERS + 3
    with agents(count) as job:
        for node in (WATCHERS, WATCHERS + 1):
            job.start(node)
        until(lambda: {node for _, node, _ in job.lost} == set(range(WATCHERS)))
        for node in range(WATCHERS):  # as the journal has it then
            job.nodes[node].alive = False
        until(lambda: WATCHERS + 2 in {node for _, node, _ in job.lost})
        assert not {node for _, node, _ in job.lost} & {WATCHERS, WATCHERS + 1}
        assert set(job.leases[WATCHERS].tables) == {WATCHERS + 1}
