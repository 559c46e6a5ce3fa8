"""What workers say becomes entries of the journal.

Reports of a node go together: for each frozen generation one entry, once every member
that lives here has handed in its own, be it before the freeze: whoever reports does nothing
more until the decision, so what it says of itself stays true. A message that is malformed, or speaks for another
rank, raises :class:`ProtocolError`, and the pool ends its worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.elastic.control.events import (
    Announced,
    Entry,
    Event,
    JobEnded,
    Reported,
    Requested,
    Suspected,
    Waiting,
    Wanted,
)
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.wire import Message, ProtocolError, address_from_json, as_object, take_int, take_str
from megatron.elastic.launch.messages import say
from megatron.elastic.launch.workers.pool import Worker

__all__ = ["WorkerMessages"]

_REQUESTS = ("setup", "begin", "join", "leave", "stay", "checkpoint", "reform")


class WorkerMessages:
    """For the ``ranks`` of one node. ``hello``: a worker opened its membership; ``leaving``: one is about to exit."""

    def __init__(
        self,
        state: Generations,
        ranks: Sequence[int],
        append: Callable[[Event], None],
        hello: Callable[[Worker], None],
        leaving: Callable[[Worker], None],
    ) -> None:
        self._state, self._ranks, self._append = state, ranks, append
        self._hello, self._leaving = hello, leaving
        self._entries: dict[int, Entry] = {}
        self._early: dict[int, Entry] = {}
        """Handed in for the next generation while none is being agreed: by who asked for it, or lost a peer first."""
        self._reported = 0

    def said(self, worker: Worker, message: Message) -> None:
        """Take one message. Raises :class:`ProtocolError` for anything malformed."""
        kind = take_str(message, "t")
        if kind == "hello":
            worker.elastic = True
            self._hello(worker)
        elif kind == "report":
            self._take_report(worker, message)
        elif kind == "request" and take_str(message, "what") in _REQUESTS:
            self._append(Requested(take_str(message, "what"), (worker.rank,), take_int(message, "g")))
        elif kind == "suspect":
            self._take_suspicion(worker, message)
        elif kind == "tolerance":
            self._append(Announced(take_int(message, "g"), take_str(message, "text")[:500]))
        elif kind == "give_up":
            self._append(JobEnded(take_int(message, "code"), take_str(message, "why")))
        elif kind == "drain":
            if self._state.drain != ():
                say(f"rank {worker.rank} was sent a signal to end: the job saves and ends at the next step boundary")
                self._append(Wanted("drain"))
        elif kind == "finish":
            self._leaving(worker)
        else:
            raise ProtocolError(f"unknown message {kind!r}")

    def reported(self, rank: int) -> bool:
        """Whether ``rank`` has handed in its report for the change under way."""
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

    def _take_report(self, worker: Worker, message: Message) -> None:
        address = address_from_json(as_object(message.get("address")))
        if (address.rank, address.incarnation) != (worker.rank, worker.incarnation):
            raise ProtocolError(f"an address of rank {address.rank} from rank {worker.rank}")
        entry = Entry(address, take_str(message, "report"))
        generation = take_int(message, "g")
        if generation == 0:
            self._append(Waiting((entry,)))
        elif self._state.quiet and generation == self._state.frozen + 1:
            self._early[worker.rank] = entry
        elif generation == self._state.frozen:
            self._entries[worker.rank] = entry
            self.report_if_complete()

    def _take_suspicion(self, worker: Worker, message: Message) -> None:
        rank, generation = take_int(message, "rank"), take_int(message, "g")
        decision = self._state.decision
        if decision is not None and decision.generation == generation and rank in decision.members:
            incarnation = decision.members[rank].incarnation
            self._append(Suspected(worker.rank, rank, incarnation, generation, take_str(message, "why")[:500]))
