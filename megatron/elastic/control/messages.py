"""The messages between an agent and its workers, on the socket that each worker inherits.

In JSON a message is an object whose ``t`` names its type. Anything else raises
:class:`~megatron.elastic.control.wire.ProtocolError`: the agent kills a worker that sends it, and a worker whose agent
sends it ends itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from megatron.elastic.comm.address import Address, Rank
from megatron.elastic.control.membership import Decision
from megatron.elastic.control.observations import DrawnTopology, ExpertLoads, Observation, Protection
from megatron.elastic.control.requests import Pending, Request, ReshapeState
from megatron.elastic.control.wire import Codec, Int64

__all__ = [
    "FROM_WORKER",
    "TO_WORKER",
    "Ask",
    "Begun",
    "Decide",
    "DrainSignal",
    "Drawn",
    "End",
    "Finish",
    "Freeze",
    "FromWorker",
    "GiveUp",
    "Hello",
    "MeasuredLoads",
    "Members",
    "Moving",
    "Observed",
    "PendingChanged",
    "Promise",
    "Release",
    "ReshapeNews",
    "Suspicion",
    "ToWorker",
    "ToleranceText",
]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag=str.lower):
    """Base of the messages."""


# -- worker to agent --------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """The worker has opened its membership, and holds the lock by which its end is noticed."""


class Promise(_Message, frozen=True):
    """The state that the worker holds, and a promise to act on nothing before ``generation`` (0: it asks to join)."""

    generation: Int64
    address: Address
    report: str


class Ask(_Message, frozen=True):
    """A request of a member of ``generation``."""

    what: Request
    generation: Int64


class Suspicion(_Message, frozen=True):
    """Evidence against ``rank``, a member of ``generation``."""

    rank: Rank
    generation: Int64
    why: str
    silent: tuple[Rank, ...] = ()
    """Ranks whose hosts answered nothing."""


class ToleranceText(_Message, frozen=True):
    """The losses that ``generation`` can survive now, in one line."""

    generation: Int64
    text: str
    protection: Protection = Protection()


class ReshapeNews(_Message, frozen=True):
    """The state of the ``number``-th request for other sizes, in one line."""

    number: Int64
    state: ReshapeState
    text: str


class Observed(_Message, frozen=True):
    """An event for users alone."""

    what: Observation


class Moving(_Message, frozen=True):
    """The layers that move between ranks from now on, in one line; empty: none any more. For users alone."""

    text: str


class Drawn(_Message, frozen=True):
    """The topology from now on. For users alone."""

    topology: DrawnTopology


class MeasuredLoads(_Message, frozen=True):
    """The measured load of experts from now on. For users alone."""

    loads: ExpertLoads


class DrainSignal(_Message, frozen=True):
    """The worker was sent a signal to end: the whole job is to save and end."""


class GiveUp(_Message, frozen=True):
    """The whole job is to end with exit status ``code``."""

    code: Int64
    why: str


class Finish(_Message, frozen=True):
    """The worker is about to exit with ``code`` on purpose."""

    code: Int64


FromWorker = (
    Hello
    | Promise
    | Ask
    | Suspicion
    | ToleranceText
    | ReshapeNews
    | Observed
    | Moving
    | Drawn
    | MeasuredLoads
    | DrainSignal
    | GiveUp
    | Finish
)
FROM_WORKER: Codec[FromWorker] = Codec(FromWorker)


# -- agent to worker --------------------------------------------------------------------


class Freeze(_Message, frozen=True):
    """``generation`` is being agreed: nothing older may be acted on."""

    generation: Int64


class Decide(_Message, frozen=True):
    """A generation is decided, of which the worker is a member."""

    decision: Decision


class Members(_Message, frozen=True):
    """The members, for a worker that waits to be admitted."""

    members: Mapping[Rank, Address]


class PendingChanged(_Message, frozen=True):
    """The requests that members are to honour at their next boundary, from now on."""

    pending: Pending


class Begun(_Message, frozen=True):
    """All members have begun: from now on the others go on without one that is lost. A step may be committed."""


class Release(_Message, frozen=True):
    """The newest generation goes on without this worker, as it was asked to."""


class End(_Message, frozen=True):
    """The worker is to exit with ``code`` at once, and to print ``why``."""

    code: Int64
    why: str


ToWorker = Freeze | Decide | Members | PendingChanged | Begun | Release | End
TO_WORKER: Codec[ToWorker] = Codec(ToWorker)
