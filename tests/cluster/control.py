"""The control plane of a cluster in one process: a journal, an agent a node, and each worker's end.

What decides is the real code: every agent has its own :class:`Generations`, to which it applies the journal at its own
pace; the real :class:`WorkerMessages` turns the messages of workers into events, the real :func:`notify_worker` writes
those to them, and the worker's half is the real :class:`WorkerProtocol`. Only what carries messages, and the ends and
starts of processes, are made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from megatron.elastic.control.events import Decided, Event, Finished, JobEnded, Lost
from megatron.elastic.control.generations import Generations, Node
from megatron.elastic.control.membership import Activity, Loss
from megatron.elastic.control.messages import FROM_WORKER, TO_WORKER, DrainSignal, FromWorker
from megatron.elastic.control.protocol import WorkerProtocol
from megatron.elastic.control.wire import Codec, encode
from megatron.elastic.launch.agent.notify_workers import notify_worker
from megatron.elastic.launch.agent.worker_messages import WorkerMessages
from megatron.elastic.launch.workers.pool import Worker
from tests.cluster.scheduler import ClusterThreads, Process, Scheduler

__all__ = ["Agent", "ClusterMembership", "Journal", "Launched"]

EVENT: Codec[Event] = Codec(Event)


@dataclass
class Journal:
    """The one order of events, as text."""

    entries: list[bytes] = field(default_factory=list)

    def append(self, event: Event) -> None:
        """At the end."""
        self.entries.append(encode(event))

    def append_at(self, position: int, event: Event) -> None:
        """Only if nothing came in between."""
        if len(self.entries) == position:
            self.append(event)

    def read(self, position: int) -> Event:
        """The entry at ``position``."""
        return EVENT.decode(self.entries[position])


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

    def finish(self, code: int) -> None:
        self._launched.finished = code
        super().finish(code)

    def drain(self) -> None:
        self._send(DrainSignal())

    def fence(self) -> None:
        """No lease runs out here."""


class Agent:
    """Of one node. ``start(rank, incarnation, newcomer)`` starts a process there."""

    def __init__(
        self,
        scheduler: Scheduler,
        journal: Journal,
        node: int,
        nodes: Mapping[int, Node],
        respawn_after: float | None,
        start: Callable[[int, int, bool], Launched],
    ) -> None:
        self.node, self.process = node, Process(f"agent {node}")
        self.state = Generations(
            {number: Node(one.host, one.ranks) for number, one in nodes.items()}, respawn_after is not None
        )
        self._scheduler, self._journal, self._start = scheduler, journal, start
        self._respawn_after = respawn_after or 0.0
        self._ranks, self._host = nodes[node].ranks, nodes[node].host
        self._workers: dict[int, Launched] = {}
        self._starts: list[tuple[float, int, int]] = []
        """(when, rank, incarnation) of processes that are to be started."""
        self._position, self._tried = 0, -1
        self.over = False
        """Whether the job is, as far as this agent knows."""
        self._messages = WorkerMessages(self.state, self._ranks, journal.append, self._greet, lambda worker: None)

    def run(self) -> None:
        """Start this node's workers and serve them, for ever."""
        for rank in self._ranks:
            self._workers[rank] = self._start(rank, 0, False)
        while True:
            self._scheduler.wait(self._has_work, self._until_a_start())
            due = self._due()
            if due:
                self._scheduler.random.choice(due)()

    def _has_work(self) -> bool:
        if self._position < len(self._journal.entries):
            return True
        return any(one.said or one.process.dead for one in self._workers.values())

    def _until_a_start(self) -> float | None:
        return max(0.0, min(self._starts)[0] - self._scheduler.now) if self._starts else None

    def _due(self) -> list[Callable[[], None]]:
        """What this agent could do next: what it does first is chance, as which of its sockets is read first."""
        due: list[Callable[[], None]] = []
        if self._position < len(self._journal.entries):
            due.append(self._deliver)
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
            self._journal.append(Finished(worker.rank, worker.incarnation, launched.finished))
            return
        loss = Loss(worker.rank, worker.incarnation, self._host, "signal SIGKILL")
        self._journal.append(Lost((loss,), (-1,), self._scheduler.now))

    def _deliver(self) -> None:
        event = self._journal.read(self._position)
        self._position += 1
        frozen = self.state.frozen
        self.state.apply(event)
        if self.state.frozen != frozen:
            self._messages.begin()
        if isinstance(event, Lost):
            self._respawn(event)
        for launched in self._workers.values():
            self._notify(launched)
        self._messages.report_if_complete()
        self.over = self.state.over()
        if self.state.ready() and self.state.coordinator() == self.node and self._tried != self._position:
            self._tried = self._position
            self._journal.append_at(self._position, Decided(self.state.frozen, self.node))

    def _respawn(self, event: Lost) -> None:
        for loss in event.losses:
            if loss.rank in self._ranks and self.state.returns(loss.rank):
                when = self._scheduler.now + self._respawn_after * self._scheduler.random.uniform(0.5, 1.5)
                self._starts.append((when, loss.rank, loss.incarnation + 1))

    def _start_next(self) -> None:
        self._starts.sort()
        _, rank, incarnation = self._starts.pop(0)
        self._workers[rank] = self._start(rank, incarnation, not self.state.fresh)

    def _greet(self, worker: Worker) -> None:
        self._notify(self._workers[worker.rank])

    def _notify(self, launched: Launched) -> None:
        notify_worker(self.state, launched.worker, lambda worker, message: launched.told.append(encode(message)))

    @property
    def ended(self) -> JobEnded | None:
        """How a worker ended the job, if one did."""
        return self.state.ended
