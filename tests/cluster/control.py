"""The control plane of a cluster in one process: a journal, an agent a node, and each worker's end.

What decides is the real code. Every agent has its own view of the real :class:`Journal`, whose store is in this
process, and its own :class:`Generations`, to which it applies the entries at its own pace. The real
:class:`WorkerMessages` turns the messages of workers into events, the real :func:`notify_worker` writes those to them,
and the worker's half is the real :class:`WorkerProtocol`. Agents speak to the first one by the real :class:`OwnEvents`
and :class:`JointEntries`, over connections that break by chance. Only what carries messages, and the ends and starts of
processes, are made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.events import Decided, Event, Finished, JobEnded, Lost, Readmitted, Together
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.journal import BEGIN, Journal, Mark
from megatron.elastic.control.keys import Keys, LocalStore
from megatron.elastic.control.membership import Activity, Committed, Loss, RunFigures
from megatron.elastic.control.messages import FROM_WORKER, TO_WORKER, DrainSignal, FromWorker
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.protocol import WorkerProtocol
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.wire import encode
from megatron.elastic.launch.agent.notify_workers import notify_worker
from megatron.elastic.launch.agent.own_events import JointEntries, OwnEvents
from megatron.elastic.launch.agent.worker_messages import WorkerMessages
from megatron.elastic.launch.workers.pool import Worker
from tests.cluster.scheduler import ClusterThreads, Process, Scheduler

__all__ = ["Agent", "ClusterMembership", "FirstAgent", "Launched", "SharedJournal"]

_BREAKS = 0.02
"""Probability that the connection to the first agent breaks before, and behind, what is said."""
_HOLD_SECONDS = 0.0005
_READMITTED_AFTER = 0.05
"""Seconds after which a rank that a user lets in is started, where lost ranks do not return by themselves."""


class SharedJournal:
    """The journal of a run, in a store of its own. Nothing is appended but through here."""

    def __init__(self) -> None:
        self._store, self._signer = LocalStore(Keys()), Signer(Credentials("ab" * 16, "cluster"))
        self._end = self.view()
        self.entries: list[Event] = []

    def view(self, read: Mark = BEGIN) -> Journal:
        """A view of its own for an agent that has ``read`` so far."""
        return Journal(self._store, self._signer, read)

    def events(self) -> Iterator[Event]:
        """Yield all entries, and the parts of those that agents said together."""
        for entry in self.entries:
            yield from (part.event for part in entry.parts) if isinstance(entry, Together) else (entry,)

    def append(self, event: Event) -> None:
        """At the end."""
        self.entries += [found for _, found in self._end.append(event) if found is not None]

    def append_next(self, read: Mark, event: Event) -> None:
        """Only if nothing came behind what its author has ``read``."""
        if self.view(read).append_next(event):
            self.entries += [found for _, found in self._end.follow(0.0) if found is not None]


class FirstAgent:
    """The first agent, and the connections of the others to it. It hears them by chance, and one may break before."""

    def __init__(self, scheduler: Scheduler, journal: SharedJournal, nodes: Mapping[int, Node]) -> None:
        self._scheduler = scheduler
        self._said: dict[int, deque[bytes]] = {node: deque() for node in nodes}
        self._broken: set[int] = set()
        """Nodes whose agents have yet to learn that their connection broke."""
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self.entries = JointEntries(nodes, self, journal.append, _HOLD_SECONDS)

    def now(self) -> float:
        """Seconds of the run (:class:`Timers`)."""
        return self._scheduler.now

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call once, ``seconds`` from now (:class:`Timers`)."""
        self._timers.append((self.now() + seconds, call))

    def until_due(self) -> float | None:
        """Seconds until an entry is due that was held back; None if there is none."""
        return max(0.0, min(when for when, _ in self._timers) - self.now()) if self._timers else None

    def say(self, node: int, body: bytes) -> bool:
        """Hear ``body`` of ``node`` later. False if it has no connection at this moment."""
        chance = self._scheduler.random.random
        if node in self._broken or chance() < _BREAKS:
            return False
        self._said[node].append(body)
        if chance() < _BREAKS:  # what was not heard is lost
            self._said[node].clear()
            self._broken.add(node)
        return True

    def broke(self, node: int) -> bool:
        """True if the agent of ``node`` has yet to learn that its connection broke."""
        return node in self._broken

    def connect(self, node: int) -> None:
        """The agent of ``node`` has a connection again."""
        self._broken.discard(node)

    def due(self) -> list[Callable[[], None]]:
        """Return the next actions that it may take: hear an agent, or append events that it held back."""
        due = [partial(self._hear, node) for node, said in self._said.items() if said]
        return [*due, self._appends] if self.until_due() == 0.0 else [*due]

    def _hear(self, node: int) -> None:
        self.entries.hear(node, 0, self._said[node].popleft())

    def _appends(self) -> None:
        _, call = self._timers.pop(0)
        call()


@dataclass
class Launched:
    """One incarnation of a rank, as its agent sees it."""

    worker: Worker
    process: Process
    said: deque[bytes] = field(default_factory=deque)
    """To the agent."""
    told: deque[bytes] = field(default_factory=deque)
    """To the worker."""
    finished: int | None = None
    """Exit code with which it said that it was done."""

    @classmethod
    def of(cls, rank: int, incarnation: int, process: Process) -> Launched:
        """A process that was just started."""
        nothing = cast(Any, None)  # messages do not come from a socket here, and nobody looks into a slot
        return cls(Worker(rank, rank, 0, incarnation, nothing, nothing), process)


class ClusterMembership(WorkerProtocol):
    """A worker's end: messages lie in its agent's queue, and come from one on a thread of its own."""

    def __init__(
        self,
        launched: Launched,
        slots: int,
        host: str,
        newcomer: bool,
        threads: ClusterThreads,
        doing: Callable[[Activity], None],
    ) -> None:
        worker = launched.worker
        super().__init__(worker.rank, worker.incarnation, slots, host, newcomer, threads=threads)
        self._launched, self._doing = launched, doing

    def _listen(self) -> None:
        self._threads.start("control", self._serve)

    def _serve(self) -> None:
        scheduler, told = cast(ClusterThreads, self._threads).scheduler, self._launched.told
        while True:
            scheduler.wait(lambda: bool(told))
            self.handle(TO_WORKER.decode(told.popleft()))

    def _send(self, message: FromWorker) -> None:
        self._launched.said.append(encode(message))

    def _end(self, code: int, why: str) -> None:
        raise AssertionError(f"rank {self.rank} is told to end with code {code}: {why}")

    def publish(self, activity: Activity) -> None:
        self._doing(activity)

    def committed(self, step: Committed) -> None:
        """No user looks at a slot here."""

    def figures(self) -> RunFigures | None:
        return None  # an agent here keeps no history

    def finish(self, code: int) -> None:
        self._launched.finished = code
        super().finish(code)

    def drain(self) -> None:
        self._send(DrainSignal())

    def fence(self) -> None:
        """No lease runs out here."""


class Agent:
    """Of one node. ``start(rank, incarnation, newcomer)`` starts a process there; ``launched``: ranks of the launch."""

    def __init__(
        self,
        scheduler: Scheduler,
        journal: SharedJournal,
        node: int,
        nodes: Mapping[int, Node],
        launched: int,
        respawn_after: float | None,
        start: Callable[[int, int, bool], Launched],
        first: FirstAgent,
    ) -> None:
        self.node, self.process = node, Process(f"agent {node}")
        self.state = Generations(
            {number: Node(one.host, one.ranks) for number, one in nodes.items()}, respawn_after is not None, launched
        )
        self._scheduler, self._journal, self._start = scheduler, journal, start
        self._respawn_after = respawn_after or _READMITTED_AFTER
        self._ranks, self._host = nodes[node].ranks, nodes[node].host
        self._workers: dict[int, Launched] = {}
        self._starts: list[tuple[float, int, int]] = []
        """(when, rank, incarnation) of processes that are to be started."""
        self._read, self._tried = journal.view(), -1
        self.over = False
        """True once the job is over, as far as this agent knows."""
        self._first = first
        self._own = OwnEvents(node, self.state, journal.append, first.entries, partial(first.say, node))
        self._messages = WorkerMessages(
            self.state, self._ranks, self._own.append, self._greet, lambda worker: None, lambda: scheduler.now
        )

    def run(self) -> None:
        """Start this node's workers and serve them, for ever."""
        for rank in self._ranks:
            self._workers[rank] = self._start(rank, 0, rank >= self.state.nominal)
        while True:
            self._scheduler.wait(self._has_work, self._until_due())
            due = self._due()
            if due:
                self._scheduler.random.choice(due)()

    def _has_work(self) -> bool:
        if self._read.position < len(self._journal.entries) or self._first.broke(self.node):
            return True
        if self.node == 0 and self._first.due():
            return True
        return any(one.said or one.process.dead for one in self._workers.values())

    def _until_due(self) -> float | None:
        waits = [max(0.0, min(self._starts)[0] - self._scheduler.now)] if self._starts else []
        held = self._first.until_due() if self.node == 0 else None
        return min([*waits, *([] if held is None else [held])], default=None)

    def _due(self) -> list[Callable[[], None]]:
        """The next actions of this agent. The first one is chosen by chance, as one of several readable sockets is."""
        due: list[Callable[[], None]] = []
        if self._read.position < len(self._journal.entries):
            due.append(self._deliver)
        if self._first.broke(self.node):
            due.append(self._connect)
        if self.node == 0:
            due += self._first.due()
        for launched in self._workers.values():
            if launched.said and not launched.process.dead:
                due.append(lambda one=launched: self._hear(one))  # type: ignore[misc]
            if launched.process.dead:
                due.append(lambda one=launched: self._ended(one))  # type: ignore[misc]
        if self._starts and min(self._starts)[0] <= self._scheduler.now and not self.state.preparing:
            due.append(self._start_next)
        return due

    def _hear(self, launched: Launched) -> None:
        self._messages.said(launched.worker, FROM_WORKER.decode(launched.said.popleft()))

    def _ended(self, launched: Launched) -> None:
        worker = launched.worker
        del self._workers[worker.rank]
        if launched.finished is not None:
            self._own.append(Finished(worker.rank, worker.incarnation, launched.finished))
            return
        loss = Loss(worker.rank, worker.incarnation, self._host, "signal SIGKILL")
        self._own.append(Lost((loss,), (-1,), self._scheduler.now))

    def _connect(self) -> None:
        self._first.connect(self.node)
        self._own.way_lost()

    def _deliver(self) -> None:
        _, entry = next(self._read.follow(0.0))  # others that are there come later, with other events between them
        assert entry is not None, "an entry that does not verify"
        for event in self.state.events_of(entry):
            self._take_in(event)
        self._own.seen()
        self.over = self.state.over()
        if self.state.ready() and self.state.coordinator() == self.node and self._tried != self._read.position:
            self._tried = self._read.position
            self._journal.append_next(self._read.mark, Decided(self.state.frozen, self.node))

    def _take_in(self, event: Event) -> None:
        frozen = self.state.frozen
        self.state.apply(event)
        if self.state.frozen != frozen:
            self._messages.begin()
        if isinstance(event, Lost):
            self._respawn({loss.rank: loss.incarnation for loss in event.losses})
        elif isinstance(event, Readmitted):
            lost = {rank: state for rank, state in self.state.ranks.items() if state.standing == "lost"}
            self._respawn({rank: state.incarnation for rank, state in lost.items() if rank in event.ranks})
        for launched in self._workers.values():
            self._notify(launched)
        self._messages.report_if_complete()

    def _respawn(self, lost: Mapping[int, int]) -> None:
        """Start these ranks of this node later, if they are to return. ``lost``: rank → its incarnation."""
        for rank, incarnation in lost.items():
            if rank in self._ranks and self.state.returns(rank):
                when = self._scheduler.now + self._respawn_after * self._scheduler.random.uniform(0.5, 1.5)
                self._starts.append((when, rank, incarnation + 1))

    def _start_next(self) -> None:
        self._starts.sort()
        _, rank, incarnation = self._starts.pop(0)
        self._workers[rank] = self._start(rank, incarnation, rank >= self.state.nominal or not self.state.fresh)

    def _greet(self, worker: Worker) -> None:
        self._notify(self._workers[worker.rank])

    def _notify(self, launched: Launched) -> None:
        notify_worker(self.state, launched.worker, lambda worker, message: launched.told.append(encode(message)))

    @property
    def ended(self) -> JobEnded | None:
        """The entry by which a worker ended the job, if one did."""
        return self.state.ended
