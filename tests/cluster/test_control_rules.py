"""Rules of docs/design.md §4.6 that hold in the control plane alone: without each, some order of events breaks a claim.

Agents and workers are processes of the cluster's scheduler and live in its time. The code that a rule is about is the
product's: restarts (:class:`Respawn`), leases (:class:`NodeLeases`, :class:`Slot`) and the journal. Only starts, stops
and ends of processes are made here.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest

from megatron.elastic.comm.address import Address
from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.events import Condemned, Decided, Entry, Event, Lost, NodeLost, Waiting
from megatron.elastic.control.failures import Failures
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.journal import Journal, JournalForged, Mark
from megatron.elastic.control.keys import Keys, LocalStore
from megatron.elastic.control.membership import Activity, Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.slot import Slot
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.agent_place import AgentPlace
from megatron.elastic.launch.agent.node_leases import Holder, NodeLeases, Silence
from megatron.elastic.launch.agent.respawn import Respawn
from tests.cluster.scheduler import ClusterThreads, Process, Scheduler, Task

SEEDS = range(12)
TURNS = 30_000
"""Many times those of a run that ends."""
TIMING = Timing.derive(0.05)
SIGNER = Signer(Credentials("ab" * 16, "run"))
LOOK = 0.0125
"""Seconds between two looks of a worker's control thread at its lease."""


class ClusterLoop:
    """The timers and calls of an agent's loop, on one task of its process."""

    def __init__(self, threads: ClusterThreads) -> None:
        self._threads = threads
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()

    def now(self) -> float:
        return self._threads.monotonic()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now() + seconds, next(self._order), call))

    def every(self, seconds: float, call: Callable[[], None]) -> None:
        call()
        self.after(seconds, lambda: self.every(seconds, call))

    def post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def run(self) -> None:
        """For ever."""
        while True:
            left = max(0.0, self._timers[0][0] - self.now()) if self._timers else None
            self._threads.scheduler.wait(lambda: bool(self._calls), left)
            while self._calls:
                self._calls.popleft()()
            while self._timers and self._timers[0][0] <= self.now():
                heapq.heappop(self._timers)[2]()


# -- rule 13: restarts ------------------------------------------------------------------------


class OneNode:
    """Node 0 of two with rank 0, which is killed some times. Implements the restarts' ``Processes``."""

    def __init__(self, scheduler: Scheduler, kills: int) -> None:
        self.scheduler, self.kills = scheduler, kills
        nodes = {number: Node(f"host{number}", (number,)) for number in range(2)}
        self.state = Generations(nodes)
        self._wait(0)
        self._wait(1)
        self.state.apply(Decided(1, 0))
        self.agent = ClusterThreads(scheduler, Process("agent 0"))
        self.loop = ClusterLoop(self.agent)
        self.respawn = Respawn(0, self.state, Failures(), self, self.loop, TIMING, self.state.apply)
        self.newest = Process("none", dead=True)
        self.incarnation = -1
        self._tasks: list[Task] = []

    def go(self) -> None:
        """Run until rank 0 was started again after its last kill."""
        self.scheduler.spawn(self.agent.process, "serves", self.loop.run)
        self.start(0, 0, False)
        self.scheduler.spawn(Process("outside"), "kills", self._kill)
        self.scheduler.over = lambda: self.incarnation == self.kills
        self.scheduler.run()

    def _wait(self, rank: int) -> None:
        self.state.apply(Waiting((Entry(Address(rank, 0, f"host{rank}"), ""),)))

    def _kill(self) -> None:
        while True:
            self.agent.sleep(self.scheduler.random.random())
            self.scheduler.wait(lambda: not self.newest.dead)
            loss = Loss(0, self.incarnation, "host0", "signal SIGKILL")
            self.scheduler.end(self.newest)
            self.loop.post(lambda loss=loss: self._deliver(Lost((loss,), (1,))))  # type: ignore[misc]

    def _deliver(self, event: Lost) -> None:
        self.state.apply(event)
        self.respawn.record_losses(event)

    def running(self) -> Collection[int]:
        return () if self.newest.dead else (0,)

    def remains(self, rank: int) -> bool:
        return any(not task.over for task in self._tasks)

    def lease_left(self) -> float:
        return TIMING.fence

    def start(self, rank: int, incarnation: int, newcomer: bool) -> None:
        assert not self.remains(rank), f"rank {rank} is started beside its former process"
        self.newest, self.incarnation = Process(f"rank {rank}.{incarnation}"), incarnation
        self.respawn.failures.admitted(rank, incarnation)  # else there would be a pause before the next start
        threads = ClusterThreads(self.scheduler, self.newest)
        for name in ("trains", "loads data", "moves copies"):
            self._tasks.append(self.scheduler.spawn(self.newest, name, lambda: self._live(threads)))

    def _live(self, threads: ClusterThreads) -> None:
        while True:
            threads.sleep(self.scheduler.random.random() * TIMING.look)

    def kill(self, rank: int, why: str) -> bool:
        raise AssertionError(f"rank {rank} is killed: {why}")

    def activity(self, rank: int) -> Activity:
        raise AssertionError("rank 0 is no member any more, and no other rank is here")


def a_rank_is_killed_and_returns(scheduler: Scheduler) -> None:
    OneNode(scheduler, kills=2).go()


def successors_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """Rule 13 off: a successor starts as soon as the end of its rank is known."""
    patch.setattr(Respawn, "_may_start", lambda respawn, rank: True)


class SuspectedRank(OneNode):
    """Rank 0 stops, is suspected and condemned, and continues before its agent has come to kill it."""

    def go(self) -> None:
        """Run until rank 0 was started again."""
        self.scheduler.spawn(self.agent.process, "serves", self.loop.run)
        self.start(0, 0, False)
        self.scheduler.spawn(Process("outside"), "suspects", self._suspect)
        self.scheduler.over = lambda: self.incarnation == 1
        self.scheduler.run()

    def _suspect(self) -> None:
        draw = self.scheduler.random.random
        self.agent.sleep(draw())
        self.newest.stopped = True
        self.agent.sleep(draw())
        self.state.apply(Condemned(0, 0, "stopped"))
        self.newest.stopped = draw() < 0.5
        self.agent.sleep(draw())
        self.scheduler.end(self.newest)
        self.loop.post(lambda: self._deliver(Lost((Loss(0, 0, "host0", "signal SIGKILL: stopped"),), (1,))))
        self.scheduler.wait(lambda: False)

    def _live(self, threads: ClusterThreads) -> None:
        mine = self.incarnation
        while True:
            threads.sleep(self.scheduler.random.random() * TIMING.look)
            rank = self.state.ranks[0]
            assert mine or rank.standing == "member", "rank 0 acts though it counts as lost"


def a_suspected_rank_is_replaced(scheduler: Scheduler) -> None:
    SuspectedRank(scheduler, kills=1).go()


def suspicion_is_enough(patch: pytest.MonkeyPatch) -> None:
    """Rule 13 off: an incarnation counts as lost once it is condemned, not once it was killed."""
    apply = Generations.apply

    def apply_as_lost(state: Generations, event: Event) -> None:
        if isinstance(event, Condemned):
            event = Lost((Loss(event.rank, event.incarnation, "host0", event.why),), (1,))
        apply(state, event)

    patch.setattr(Generations, "apply", apply_as_lost)


# -- rule 17: the journal ---------------------------------------------------------------------


class Readers:
    """Three agents that append to one journal and follow it. One that finds another past than its own ends."""

    ENTRIES = 12
    """The length at which no further entry is appended."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.keys = scheduler, Keys()
        self.read: dict[int, list[Event]] = {number: [] for number in range(3)}
        self.ended: set[int] = set()
        for number in self.read:
            threads = ClusterThreads(scheduler, Process(f"agent {number}"))
            scheduler.spawn(threads.process, "reads and writes", functools.partial(self._run, threads, number))
        scheduler.over = lambda: all(n in self.ended or len(read) >= self.ENTRIES for n, read in self.read.items())

    def _run(self, threads: ClusterThreads, number: int) -> None:
        draw, journal, read = self.scheduler.random.random, Journal(LocalStore(self.keys), SIGNER), self.read[number]
        try:
            while True:
                threads.sleep(draw())
                if draw() < 0.3 and len(read) < self.ENTRIES:
                    read += [event for _, event in journal.append(NodeLost(number, len(read), "gone")) if event]
                else:
                    read += [event for _, event in journal.follow(0.0) if event]
        except JournalForged:
            self.ended.add(number)


def the_store_is_put_back(scheduler: Scheduler) -> None:
    """The store loses its newest entries, as when it is restored. Agents that go on have one past."""
    job, lost = Readers(scheduler), 2

    def put_back() -> None:
        scheduler.wait(lambda: max(map(len, job.read.values())) >= Readers.ENTRIES // 2)
        end = next(n for n in itertools.count() if LocalStore(job.keys).get(f"journal/{n}") is None)
        for position in range(end - lost, end):
            LocalStore(job.keys).delete(f"journal/{position}")
        scheduler.wait(lambda: False)

    scheduler.spawn(Process("outside"), "puts the store back", put_back)
    scheduler.run()
    pasts = {tuple(map(repr, read[: Readers.ENTRIES])) for number, read in job.read.items() if number not in job.ended}
    assert len(pasts) <= 1, f"agents go on with different pasts: {pasts}"


def any_past_is_continued(patch: pytest.MonkeyPatch) -> None:
    """Rule 17 off: an entry is taken whatever entries came before it."""
    advance = Journal._advance

    def take(journal: Journal, value: bytes) -> tuple[int, Event | None]:
        content = SIGNER.open(f"journal/{journal.position}", value)
        assert content is not None
        journal.mark = Mark(journal.position, msgspec.json.decode(content)["after"])
        return advance(journal, value)

    patch.setattr(Journal, "_advance", take)


# -- rules 14 and 17: leases ------------------------------------------------------------------


class Agents:
    """Agents of three nodes over one store, and a worker of node 1."""

    def __init__(self, scheduler: Scheduler, slot: Slot) -> None:
        self.scheduler, self.slot = scheduler, slot
        self.store = LocalStore(Keys())
        self.nodes = {number: Node(f"host{number}", (number,), agent=f"agent{number}") for number in range(3)}
        self.lost: list[tuple[int, int]] = []
        """(the agent that says so, the node)."""
        self.agents = [self._start(number) for number in self.nodes]
        self.worker = ClusterThreads(scheduler, Process("rank 1"))
        scheduler.spawn(self.worker.process, "watches its lease", self._fence)
        scheduler.spawn(self.worker.process, "acts", self._act)

    def clock(self) -> int:
        return int(self.scheduler.now * 1e9)

    def _start(self, number: int) -> Process:
        threads = ClusterThreads(self.scheduler, Process(f"agent {number}"))
        loop = ClusterLoop(threads)
        place = AgentPlace(number, f"agent{number}", self.nodes, self.store, SIGNER, TIMING, cast(Any, loop))

        def extend(until: int) -> None:
            if number == 1:
                self.slot.extend_lease(until)

        def lost(node: int, epoch: int, why: str) -> None:
            self.lost.append((number, node))

        leases = NodeLeases(place, extend, lost, lambda now: None, threads, self.clock)

        def serve() -> None:
            leases.start()
            loop.every(TIMING.beat, lambda: leases.beat({}, 0, loop.now()))
            loop.run()

        self.scheduler.spawn(threads.process, "serves", serve)
        return threads.process

    def _fence(self) -> None:
        while not self.slot.lease_over():
            self.worker.sleep(LOOK)
        self.scheduler.end(self.worker.process)

    def _act(self) -> None:
        """Name a checkpoint now and then, behind a look at the lease (``Membership.fence``)."""
        while True:
            self.worker.sleep(self.scheduler.random.random() * TIMING.lease / 4)
            if self.slot.lease_over():
                self.scheduler.end(self.worker.process)
                return
            assert not self.lost, f"rank 1 acts though its node counts as lost: {self.lost}"


@contextmanager
def three_nodes(scheduler: Scheduler) -> Iterator[Agents]:
    fd, slot = Slot.create("rank 1", lambda: int(scheduler.now * 1e9))
    try:
        yield Agents(scheduler, slot)
    finally:
        slot.close()
        os.close(fd)


def an_agent_is_stopped(scheduler: Scheduler) -> None:
    """Its node is lost for the others, and its worker has ended by itself before."""
    with three_nodes(scheduler) as job:

        def stop() -> None:
            scheduler.wait(lambda: False, scheduler.random.random())
            job.agents[1].stopped = True
            scheduler.wait(lambda: False)

        scheduler.spawn(Process("outside"), "stops agent 1", stop)
        scheduler.over = lambda: len(job.lost) >= 2 and job.worker.process.dead
        scheduler.run()
        assert {node for _, node in job.lost} == {1}


def workers_act_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Rule 14 off: the time for which workers may act is longer than the one after which their node is lost."""
    patch.setattr(NodeLeases, "_until", lambda leases, began: began + 10**15)


def a_dead_node_has_its_leases_put_back(scheduler: Scheduler) -> None:
    """Older leases of a node that died are written again and again: it is lost all the same."""
    with three_nodes(scheduler) as job:

        def put_back() -> None:
            values = set[bytes]()
            until = scheduler.now + 0.2 + scheduler.random.random()
            while scheduler.now < until:
                scheduler.wait(lambda: False, TIMING.beat / 2)
                values |= {value for value in (job.store.get("lease/1"),) if value is not None}
            scheduler.end(job.agents[1])
            scheduler.end(job.worker.process)
            for value in itertools.cycle(sorted(values)):
                job.store.put("lease/1", value)
                scheduler.wait(lambda: False, TIMING.beat)

        scheduler.spawn(Process("outside"), "puts leases back", put_back)
        scheduler.over = lambda: {(0, 1), (2, 1)} <= set(job.lost)
        scheduler.run()


def any_other_lease_counts(patch: pytest.MonkeyPatch) -> None:
    """Rule 17 off: a lease with another number than the one before is a sign of life, also with a lower one."""
    note = Silence.note

    def note_any(silence: Silence, node: int, holder: Holder, number: int | None, began: float, ended: float) -> float:
        seen = silence._seen.get(node)
        if seen is not None and number is not None and number != seen.number:
            seen.number = number - 1
        return note(silence, node, holder, number, began, ended)

    patch.setattr(Silence, "note", note_any)


@dataclass(frozen=True)
class Rule:
    """``off`` switches it off; ``happens`` then ends with ``finding`` for some seed."""

    number: int
    happens: Callable[[Scheduler], None]
    off: Callable[[pytest.MonkeyPatch], None]
    finding: str

    def __str__(self) -> str:
        return f"rule {self.number}, {self.happens.__name__}"


RULES = (
    Rule(13, a_rank_is_killed_and_returns, successors_do_not_wait, "is started beside its former process"),
    Rule(13, a_suspected_rank_is_replaced, suspicion_is_enough, "acts though it counts as lost"),
    Rule(14, an_agent_is_stopped, workers_act_for_ever, "acts though its node counts as lost"),
    Rule(17, a_dead_node_has_its_leases_put_back, any_other_lease_counts, "no end after"),
    Rule(17, the_store_is_put_back, any_past_is_continued, "go on with different pasts"),
)


def findings(rule: Rule) -> str:
    """The first error that a seed ends with; empty if all end well."""
    for seed in SEEDS:
        try:
            rule.happens(Scheduler(seed, TURNS))
        except AssertionError as error:
            return f"seed {seed}: {error}"
    return ""


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_with_the_rule_every_order_of_events_ends_well(rule: Rule) -> None:
    assert findings(rule) == ""


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_without_the_rule_some_order_does_not(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    rule.off(monkeypatch)
    found = findings(rule)
    assert rule.finding in found, found
