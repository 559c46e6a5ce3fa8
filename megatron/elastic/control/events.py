"""The events of a job's membership: the entries of the journal.

Agents agree by applying the same events in the same order
(:mod:`megatron.elastic.control.generations`). Each event is an immutable struct, in JSON an object whose ``kind`` is
the name of its class.
"""

from __future__ import annotations

import msgspec

from megatron.elastic.comm.address import Address, Rank
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.observations import Protection, Recovered, Reprotected, Stepping
from megatron.elastic.control.requests import Request, ReshapeState, Wish
from megatron.elastic.control.wire import Int64

__all__ = [
    "Abandoned",
    "Announced",
    "Condemned",
    "Decided",
    "Entry",
    "Event",
    "Examined",
    "Finished",
    "JobEnded",
    "Lifted",
    "Lost",
    "NodeBack",
    "NodeLost",
    "OwnEvent",
    "Part",
    "Readmitted",
    "Reformed",
    "Reported",
    "Requested",
    "Reshaped",
    "Suspected",
    "Together",
    "Waiting",
    "Wanted",
]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The report of one incarnation: its address and, opaque, the state that it holds."""

    address: Address
    report: str

    @property
    def rank(self) -> int:
        """The rank that reported."""
        return self.address.rank


class _Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=True):
    """Base of the events."""


class Lost(_Event, frozen=True):
    """These incarnations ended without having announced it; at which step (−1: none yet)."""

    losses: tuple[Loss, ...]
    steps: tuple[Int64, ...] = ()
    at: float = 0.0
    """When, in seconds of the job (:class:`~megatron.elastic.control.clock.JobClock`)."""


class NodeLost(_Event, frozen=True):
    """Agent ``node`` in its ``epoch``-th life is gone or unreachable, and all its workers with it."""

    node: Int64
    epoch: Int64
    why: str
    at: float = 0.0
    """As in :class:`Lost`."""


class NodeBack(_Event, frozen=True):
    """A new agent took over a lost node's place."""

    node: Int64
    epoch: Int64
    host: str
    agent: str = ""
    """Its token: of several that ask for the place, the first in the journal has it."""


class Reported(_Event, frozen=True):
    """Members promise to act on nothing older than ``generation`` and report."""

    generation: Int64
    entries: tuple[Entry, ...]


class Waiting(_Event, frozen=True):
    """Incarnations at the start of their life ask to become members."""

    entries: tuple[Entry, ...]


class Requested(_Event, frozen=True):
    """Members of ``generation`` ask for ``what`` at the boundary that they have reached."""

    what: Request
    ranks: tuple[Rank, ...]
    generation: Int64


class Wanted(_Event, frozen=True):
    """A user or a signal asks for ``what`` at the next boundary."""

    what: Wish


class Finished(_Event, frozen=True):
    """An incarnation ended on purpose; ``announced``: it had said so, rather than just left with code 0."""

    rank: Rank
    incarnation: Int64
    code: Int64
    announced: bool = True


class Abandoned(_Event, frozen=True):
    """These ranks will not be started again."""

    ranks: tuple[Rank, ...]
    why: str


class Readmitted(_Event, frozen=True):
    """Ranks that were given up may be started again; none given: all of them."""

    ranks: tuple[Rank, ...] = ()


class Lifted(_Event, frozen=True):
    """The ``level``-th quarantine of ``node`` is over: its time has passed, or the other ranks need its ranks."""

    node: Int64
    level: Int64
    why: str
    needed: bool = False
    """True if the other ranks need its ranks: then a finding of its hardware checks keeps them out no longer."""


class Examined(_Event, frozen=True):
    """The hardware checks of ``node`` have this finding from now on; empty: none any more."""

    node: Int64
    finding: str


class Suspected(_Event, frozen=True):
    """Evidence by ``by`` against an incarnation of ``rank``."""

    by: Rank
    rank: Rank
    incarnation: Int64
    generation: Int64
    why: str
    silent: tuple[Rank, ...] = ()
    """Ranks whose hosts answered ``by`` nothing."""


class Condemned(_Event, frozen=True):
    """The agent of ``rank`` shall kill this incarnation."""

    rank: Rank
    incarnation: Int64
    why: str


class Reformed(_Event, frozen=True):
    """Generation ``generation`` is void although no rank is lost: a new one has to be agreed."""

    generation: Int64
    why: str


class Announced(_Event, frozen=True):
    """The losses that ``generation`` can survive now, as a member told in one line."""

    generation: Int64
    text: str
    protection: Protection = Protection()
    """The same in numbers."""


class Reshaped(_Event, frozen=True):
    """The state of the ``number``-th request for other sizes, as a member told in one line."""

    number: Int64
    state: ReshapeState
    text: str


class Decided(_Event, frozen=True):
    """THE compare-and-set: this journal position decides ``generation``."""

    generation: Int64
    author: Int64


class JobEnded(_Event, frozen=True):
    """The job is over with this exit code."""

    code: Int64
    why: str


OwnEvent = Lost | Waiting | Reported | Requested | Finished
"""Events of an agent's own ranks. Each may happen on all nodes at the same moment."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event that the agent of ``node`` tells of its own ranks in its life ``epoch``.

    Parts of a node that count are numbered from 1, over all lives.
    """

    node: Int64
    epoch: Int64
    number: Int64
    event: OwnEvent

    def ranks(self) -> tuple[Rank, ...]:
        """The ranks that it speaks of."""
        match self.event:
            case Lost(losses):
                return tuple(loss.rank for loss in losses)
            case Waiting(entries) | Reported(_, entries):
                return tuple(entry.rank for entry in entries)
            case Requested(_, ranks):
                return ranks
            case Finished(rank):
                return (rank,)


class Together(_Event, frozen=True):
    """Events that several agents told of their own ranks, those of each agent in their order.

    A part may be in the journal several times, by different ways. It counts once, and behind the part before it.
    """

    parts: tuple[Part, ...]


Event = (
    Lost
    | NodeLost
    | NodeBack
    | Reported
    | Waiting
    | Requested
    | Wanted
    | Finished
    | Abandoned
    | Readmitted
    | Lifted
    | Examined
    | Suspected
    | Condemned
    | Reformed
    | Announced
    | Reshaped
    | Stepping
    | Recovered
    | Reprotected
    | Together
    | Decided
    | JobEnded
)
