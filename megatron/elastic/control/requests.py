"""The requests of a job: of users to agents, of workers to agents, and of agents to workers.

A user asks through ``ctl`` or a signal (:data:`Command`). The agents keep what was asked and tell every member, which
honours it at its next boundary (:class:`Pending`). At a boundary a member asks for the change itself
(:class:`Request`); it begins when every member has asked.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from megatron.elastic.comm.address import Rank
from megatron.elastic.control.wire import Codec

__all__ = ["COMMANDS", "Admit", "Command", "Drain", "Pending", "Request", "SaveCheckpoint", "Status", "Stop", "Wish"]


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


Command = Status | Drain | Stop | SaveCheckpoint | Admit
"""A request of ``ctl`` to an agent."""
COMMANDS: Codec[Command] = Codec(Command)

Wish = Drain | Stop | SaveCheckpoint
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

    def words(self) -> list[str]:
        """The same as text, as ``ctl status`` shows it: 'checkpoint', 'drain', 'join', 'leave:4,5', 'reform'."""
        named = {"checkpoint": self.checkpoint, "drain": self.drain, "join": self.join, "reform": self.reform}
        leave = ["leave:" + ",".join(map(str, self.leave))] if self.leave else []
        return sorted([*(name for name, asked in named.items() if asked), *leave])
