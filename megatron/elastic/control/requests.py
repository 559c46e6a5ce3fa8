"""The requests of a job: of users to agents, of workers to agents, and of agents to workers.

A user asks through ``ctl`` or a signal (:data:`Command`). The agents keep what was asked and tell every member, which
honours it at its next boundary (:class:`Pending`). At a boundary a member asks for the change itself
(:class:`Request`); it begins when every member has asked.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

import msgspec

from megatron.elastic.comm.address import Rank
from megatron.elastic.control.wire import Codec, Int64

__all__ = [
    "JOB_REQUESTS",
    "Admit",
    "Command",
    "Drain",
    "JobRequest",
    "OpenReshape",
    "ParallelSizes",
    "Pending",
    "Request",
    "Reshape",
    "ReshapeState",
    "SaveCheckpoint",
    "Status",
    "Stop",
    "Wish",
]

_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
"""A parallel size."""
_SizeOrNone = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A parallel size; 0: the launch's."""

ReshapeState = Literal["open", "under way", "in force", "refused"]
"""The state of a request for other sizes. The last two end it."""


class ParallelSizes(NamedTuple):
    """Tensor-, pipeline-, data-, context- and expert-parallel size."""

    tensor: int
    pipeline: int
    data: int
    context: int = 1
    experts: int = 1
    """Into how many sets ranks deal the experts of a layer; in a request 0: as at the launch."""

    @property
    def cell(self) -> int:
        """Number of ranks that share a micro-batch at a stage."""
        return self.tensor * self.context

    @property
    def ranks(self) -> int:
        """Number of ranks that compute."""
        return self.cell * self.pipeline * self.data

    def __str__(self) -> str:
        context = f"CP {self.context}, " if self.context > 1 else ""
        experts = f"EP {self.experts}, " if self.experts > 1 else ""
        return f"TP {self.tensor}, {context}{experts}PP {self.pipeline}, DP {self.data}"


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do"):
    """Base of the commands: ``do`` names the command."""


class Status(_Command, frozen=True, tag="status"):
    """Describe the job."""


class Drain(_Command, frozen=True, tag="drain"):
    """Save and end the job at the next boundary; with ``ranks``, have only these ranks leave."""

    ranks: tuple[Rank, ...] = ()


class Stop(_Command, frozen=True, tag="stop"):
    """A drain of the whole job that is final: the job is not to be queued again."""


class SaveCheckpoint(_Command, frozen=True, tag="checkpoint"):
    """Save at the next boundary and go on."""


class Admit(_Command, frozen=True, tag="admit"):
    """Start ranks again that are not restarted automatically any more. No ``ranks``: all of them."""

    ranks: tuple[Rank, ...] = ()


class Reshape(_Command, frozen=True, tag="reshape"):
    """Go on with these parallel sizes."""

    tensor: _Size
    pipeline: _Size
    data: _Size
    context: _Size = 1
    experts: _SizeOrNone = 0

    @property
    def sizes(self) -> ParallelSizes:
        """All of them as one value."""
        return ParallelSizes(self.tensor, self.pipeline, self.data, self.context, self.experts)


Command = Status | Drain | Stop | SaveCheckpoint | Admit | Reshape
"""A request of a user."""


class JobRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command as ``ctl`` sends it to an agent."""

    job: str
    """Name of the job that is meant (:func:`~megatron.elastic.control.socket_names.job_name`)."""
    command: Command


JOB_REQUESTS: Codec[JobRequest] = Codec(JobRequest)

Wish = Drain | Stop | SaveCheckpoint | Reshape
"""A command that every agent learns from the journal and that the members honour at a boundary."""


class Request(StrEnum):
    """A member's request to the agents."""

    SETUP = "setup"
    """Nothing is held here yet that could outlive a loss: until every member has asked to BEGIN, a loss starts all
    ranks anew."""
    BEGIN = "begin"
    """The first step can begin."""
    JOIN = "join"
    """Admit the newcomers. A new generation begins when every member has asked."""
    LEAVE = "leave"
    """Let the ranks go that were asked to leave. A new generation begins when every member has asked."""
    STAY = "stay"
    """The ranks that were asked to leave cannot be spared: withdraw that, once every member has asked."""
    CHECKPOINT = "checkpoint"
    """The checkpoint that was asked for is being saved: withdraw that, once every member has asked."""
    REFORM = "reform"
    """Begin a new generation at once, although no rank comes or goes."""


class OpenReshape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for other sizes that is not carried out yet."""

    number: Int64
    tensor: _Size
    pipeline: _Size
    data: _Size
    context: _Size = 1
    experts: _SizeOrNone = 0
    hopeless: bool = False
    """Fewer ranks are here, or will be, than the sizes take."""

    @property
    def sizes(self) -> ParallelSizes:
        """All of them as one value."""
        return ParallelSizes(self.tensor, self.pipeline, self.data, self.context, self.experts)


class Pending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The requests that the members are to honour at their next boundary."""

    join: bool = False
    """Newcomers wait to be admitted."""
    drain: bool = False
    """The job is to save and end."""
    checkpoint: bool = False
    """The job is to save and go on."""
    reform: bool = False
    """For a member that waits for ranks: some that were to return will not. It asks for a decision that says which."""
    leave: tuple[Rank, ...] = ()
    """Ranks that are to leave, ascending."""
    reshape: OpenReshape | None = None
    """The job is to go on with other sizes."""

    def words(self) -> list[str]:
        """The same as text for ``ctl status``: 'checkpoint', 'join', 'leave:4,5', 'reshape:tp2,pp4,dp1' and so on."""
        named = {"checkpoint": self.checkpoint, "drain": self.drain, "join": self.join, "reform": self.reform}
        leave = ["leave:" + ",".join(map(str, self.leave))] if self.leave else []
        sizes = [] if self.reshape is None else [str(self.reshape.sizes).replace(" ", "").lower()]
        reshape = [f"reshape:{text}" for text in sizes]
        return sorted([*(name for name, asked in named.items() if asked), *leave, *reshape])
