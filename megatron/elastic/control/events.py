"""What can happen to a job's membership, as values that travel in the journal.

Agents agree by applying the same events in the same order
(:mod:`megatron.elastic.control.generations`). Each event is one frozen
dataclass; ``to_json`` / ``from_json`` are exact inverses and refuse anything
malformed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.elastic.comm.fabric import Address
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.wire import (
    Message,
    ProtocolError,
    address_from_json,
    address_to_json,
    as_object,
    as_rank,
    loss_from_json,
    loss_to_json,
    take_int,
    take_list,
    take_str,
)

__all__ = [
    "Abandoned",
    "Announced",
    "Condemned",
    "Decided",
    "Entry",
    "Event",
    "Finished",
    "JobEnded",
    "Lifted",
    "Lost",
    "NodeBack",
    "NodeLost",
    "Readmitted",
    "Reformed",
    "Reported",
    "Requested",
    "Suspected",
    "Waiting",
    "Wanted",
    "from_json",
    "to_json",
]


@dataclass(frozen=True)
class Entry:
    """What one incarnation hands in: where it is reached and, opaque, what it holds."""

    address: Address
    report: str

    @property
    def rank(self) -> int:
        """The rank that handed this in."""
        return self.address.rank


@dataclass(frozen=True)
class Lost:
    """These incarnations ended without having said so; at which step (−1: none yet)."""

    losses: tuple[Loss, ...]
    steps: tuple[int, ...] = ()
    at: float = 0.0
    """When, in seconds of the job (:class:`~megatron.elastic.control.clock.JobClock`)."""


@dataclass(frozen=True)
class NodeLost:
    """Agent ``node`` in its ``epoch``-th life is gone or unreachable, and all its workers with it."""

    node: int
    epoch: int
    why: str
    at: float = 0.0
    """As in :class:`Lost`."""


@dataclass(frozen=True)
class NodeBack:
    """A new agent took over a lost node's place."""

    node: int
    epoch: int
    host: str
    agent: str = ""
    """Its token: of several that ask for the place, the first in the journal has it."""


@dataclass(frozen=True)
class Reported:
    """Members promise to act on nothing older than ``generation`` and report."""

    generation: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Waiting:
    """Incarnations at the start of their life ask to become members."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Requested:
    """Members of ``generation`` ask for ``what`` at the boundary they stand at."""

    what: str
    ranks: tuple[int, ...]
    generation: int


@dataclass(frozen=True)
class Wanted:
    """A user or a signal asks for ``what`` at the next boundary: 'drain', 'checkpoint', or 'stop', a drain after which
    the job is not to be queued again. No ranks: all of them.
    """

    what: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Finished:
    """An incarnation ended on purpose; ``announced``: it had said so, rather than just left with code 0."""

    rank: int
    incarnation: int
    code: int
    announced: bool = True


@dataclass(frozen=True)
class Abandoned:
    """These ranks will not be started again."""

    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Readmitted:
    """Ranks that were given up may be started again; none given: all of them."""

    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lifted:
    """The ``level``-th quarantine of ``node`` is over, its time or the others' need being come."""

    node: int
    level: int
    why: str


@dataclass(frozen=True)
class Suspected:
    """Evidence by ``by`` against an incarnation of ``rank``."""

    by: int
    rank: int
    incarnation: int
    generation: int
    why: str


@dataclass(frozen=True)
class Condemned:
    """The agent of ``rank`` shall execute this incarnation."""

    rank: int
    incarnation: int
    why: str


@dataclass(frozen=True)
class Reformed:
    """Generation ``generation`` is void although nobody is lost; agree anew."""

    generation: int
    why: str


@dataclass(frozen=True)
class Announced:
    """Of ``generation``, by a member: what can be lost now, in one line."""

    generation: int
    text: str


@dataclass(frozen=True)
class Decided:
    """THE compare-and-set: this journal position decides ``generation``."""

    generation: int
    author: int


@dataclass(frozen=True)
class JobEnded:
    """The job is over with this exit code."""

    code: int
    why: str


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
    | Suspected
    | Condemned
    | Reformed
    | Announced
    | Decided
    | JobEnded
)


def to_json(event: Event) -> Message:
    """JSON form, with the event's kind."""
    body: Message = {"kind": type(event).__name__}
    for name, value in vars(event).items():
        if name == "losses":
            body[name] = [loss_to_json(loss) for loss in value]
        elif name == "entries":
            body[name] = [{"address": address_to_json(e.address), "report": e.report} for e in value]
        else:
            body[name] = list(value) if isinstance(value, tuple) else value
    return body


def _entries(body: Mapping[str, Any]) -> tuple[Entry, ...]:
    items = [as_object(item) for item in take_list(body, "entries")]
    return tuple(Entry(address_from_json(as_object(i.get("address"))), take_str(i, "report")) for i in items)


def _lost(body: Mapping[str, Any]) -> Event:
    losses = tuple(loss_from_json(as_object(item)) for item in take_list(body, "losses"))
    steps = tuple(item if isinstance(item, int) else -1 for item in take_list(body, "steps"))
    return Lost(losses, steps, _time(body))


def _time(body: Mapping[str, Any]) -> float:
    at = body.get("at")
    if not isinstance(at, (int, float)) or not math.isfinite(at):
        raise ProtocolError("field 'at' is not a number of seconds")
    return float(at)


def _finished(body: Mapping[str, Any]) -> Event:
    announced = body.get("announced") is True
    return Finished(take_int(body, "rank"), take_int(body, "incarnation"), take_int(body, "code"), announced)


def _suspected(body: Mapping[str, Any]) -> Event:
    by, rank, incarnation = take_int(body, "by"), take_int(body, "rank"), take_int(body, "incarnation")
    return Suspected(by, rank, incarnation, take_int(body, "generation"), take_str(body, "why"))


def _ranks(body: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(as_rank(item) for item in take_list(body, "ranks"))


_PARSERS: Mapping[str, Callable[[Mapping[str, Any]], Event]] = {
    "Lost": _lost,
    "NodeLost": lambda b: NodeLost(take_int(b, "node"), take_int(b, "epoch"), take_str(b, "why"), _time(b)),
    "NodeBack": lambda b: NodeBack(
        take_int(b, "node"), take_int(b, "epoch"), take_str(b, "host"), take_str(b, "agent")
    ),
    "Reported": lambda b: Reported(take_int(b, "generation"), _entries(b)),
    "Waiting": lambda b: Waiting(_entries(b)),
    "Requested": lambda b: Requested(take_str(b, "what"), _ranks(b), take_int(b, "generation")),
    "Wanted": lambda b: Wanted(take_str(b, "what"), _ranks(b)),
    "Finished": _finished,
    "Abandoned": lambda b: Abandoned(_ranks(b), take_str(b, "why")),
    "Readmitted": lambda b: Readmitted(_ranks(b)),
    "Lifted": lambda b: Lifted(take_int(b, "node"), take_int(b, "level"), take_str(b, "why")),
    "Suspected": _suspected,
    "Condemned": lambda b: Condemned(take_int(b, "rank"), take_int(b, "incarnation"), take_str(b, "why")),
    "Reformed": lambda b: Reformed(take_int(b, "generation"), take_str(b, "why")),
    "Announced": lambda b: Announced(take_int(b, "generation"), take_str(b, "text")),
    "Decided": lambda b: Decided(take_int(b, "generation"), take_int(b, "author")),
    "JobEnded": lambda b: JobEnded(take_int(b, "code"), take_str(b, "why")),
}


def from_json(body: Mapping[str, Any]) -> Event:
    """Inverse of :func:`to_json`. Raises :class:`ProtocolError` for anything else."""
    parser = _PARSERS.get(take_str(body, "kind"))
    if parser is None:
        raise ProtocolError(f"unknown event {body.get('kind')!r}")
    return parser(body)
