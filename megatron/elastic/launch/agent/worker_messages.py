"""The handling of a worker's messages: they become entries of the journal.

The reports of a node are one entry for each frozen generation, appended once every living member on the node has
reported. A report that came before the freeze counts too: a worker that has reported does nothing more until the
decision, so its report stays true. A message that is malformed, or speaks for another rank, raises
:class:`ProtocolError`, and the pool ends the worker that sent it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from megatron.elastic.control.events import (
    Announced,
    Entry,
    Event,
    JobEnded,
    Reported,
    Requested,
    Reshaped,
    Suspected,
    Waiting,
    Wanted,
)
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.messages import (
    Ask,
    DrainSignal,
    Drawn,
    Finish,
    FromWorker,
    GiveUp,
    Hello,
    MeasuredLoads,
    Moving,
    Observed,
    Promise,
    ReshapeNews,
    Suspicion,
    ToleranceText,
)
from megatron.elastic.control.observations import DrawnTopology, ExpertLoads
from megatron.elastic.control.requests import Drain
from megatron.elastic.control.wire import ProtocolError
from megatron.elastic.launch.messages import say
from megatron.elastic.launch.workers.pool import Worker

__all__ = ["WorkerMessages"]

_LONGEST_TEXT = 500
"""Characters of a worker's free text that go into the journal."""


class WorkerMessages:
    """For the ``ranks`` of one node. ``hello``: a worker opened its membership; ``leaving``: one is about to exit.

    ``now``: seconds of the job.
    """

    def __init__(
        self,
        state: Generations,
        ranks: Sequence[int],
        append: Callable[[Event], None],
        hello: Callable[[Worker], None],
        leaving: Callable[[Worker], None],
        now: Callable[[], float],
    ) -> None:
        self._now = now
        self._state, self._ranks, self._append = state, ranks, append
        self._hello, self._leaving = hello, leaving
        self._entries: dict[int, Entry] = {}
        self._early: dict[int, Entry] = {}
        """Reports for the next generation, before it is frozen: of ranks that asked for it, or lost a peer first."""
        self._reported = 0
        self.topology: DrawnTopology | None = None
        """The newest one that a rank of this node has told."""
        self.expert_loads: ExpertLoads | None = None
        """The newest load of experts that a rank of this node has told."""
        self.moving: dict[int, str] = {}
        """Rank of this node → the layers that move, as it told last."""

    def said(self, worker: Worker, message: FromWorker) -> None:  # noqa: C901, PLR0912 - a case for each kind of message
        """Take one message. Raises :class:`ProtocolError` where it speaks for another rank."""
        match message:
            case Hello():
                worker.elastic = True
                self.moving.pop(worker.rank, None)  # of the process before it, which may have been lost meanwhile
                self._hello(worker)
            case Promise():
                self._take_report(worker, message)
            case Ask(what, generation):
                self._append(Requested(what, (worker.rank,), generation))
            case Suspicion():
                self._take_suspicion(worker, message)
            case ToleranceText(generation, text, protection):
                self._append(Announced(generation, text[:_LONGEST_TEXT], protection))
            case ReshapeNews(number, state, text):
                self._append(Reshaped(number, state, text[:_LONGEST_TEXT]))
            case Observed(what):
                self._append(msgspec.structs.replace(what, at=self._now()))
            case Moving(text):
                self.moving[worker.rank] = text[:_LONGEST_TEXT]
            case Drawn(topology):
                self.topology = topology
            case MeasuredLoads(loads):
                self.expert_loads = loads
            case GiveUp(code, why):
                self._append(JobEnded(code, why))
            case DrainSignal():
                self._drain(worker)
            case Finish():
                self._leaving(worker)

    def reported(self, rank: int) -> bool:
        """True if ``rank`` has handed in its report for the change under way."""
        return not self._state.quiet and rank in self._entries

    def begin(self) -> None:
        """A newer generation is frozen: what was handed in for the one before counts no longer."""
        self._entries, self._early = self._early, {}

    def report_if_complete(self) -> None:
        """One journal entry for all of this node's members, once all have reported."""
        state = self._state
        mine = [rank for rank in self._ranks if state.ranks[rank].standing == "member"]
        if state.quiet or self._reported == state.frozen or not mine:
            return
        if all(rank in self._entries for rank in mine):
            self._reported = state.frozen
            self._append(Reported(state.frozen, tuple(self._entries[rank] for rank in mine)))

    def _drain(self, worker: Worker) -> None:
        if self._state.drain != ():
            say(
                f"rank {worker.rank} received a signal to end: the job saves a "
                "checkpoint at the next step boundary and ends"
            )
            self._append(Wanted(Drain()))

    def _take_report(self, worker: Worker, message: Promise) -> None:
        address, generation = message.address, message.generation
        if (address.rank, address.incarnation) != (worker.rank, worker.incarnation):
            raise ProtocolError(f"an address of rank {address.rank} from rank {worker.rank}")
        entry = Entry(address, message.report)
        if generation == 0:
            self._append(Waiting((entry,)))
        elif self._state.quiet and generation == self._state.frozen + 1:
            self._early[worker.rank] = entry
        elif generation == self._state.frozen:
            self._entries[worker.rank] = entry
            self.report_if_complete()

    def _take_suspicion(self, worker: Worker, message: Suspicion) -> None:
        rank, generation, decision = message.rank, message.generation, self._state.decision
        if decision is not None and decision.generation == generation and rank in decision.members:
            incarnation = decision.members[rank].incarnation
            silent = tuple(sorted(set(message.silent) & decision.members.keys()))
            self._append(Suspected(worker.rank, rank, incarnation, generation, message.why[:_LONGEST_TEXT], silent))
