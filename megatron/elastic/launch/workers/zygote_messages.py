"""The messages between an agent and its zygote. File descriptors travel beside them.

Text from a command line or from the environment travels as bytes, since it need not be Unicode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from megatron.elastic.control.wire import Int64

__all__ = ["Exited", "Fork", "Forked", "FromZygote", "Kind", "Ready"]

Kind = Literal["script", "module", "program"]
"""The kind of a worker's program, which says how it is started."""


class _ZygoteMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag=str.lower):
    """Base of the messages."""


class Fork(_ZygoteMessage, frozen=True):
    """Start a worker. Descriptors: its control socket, its slot, standard output, standard error."""

    number: Int64
    """The agent's name for this incarnation, unique in the agent's life."""
    kind: Kind
    target: bytes
    arguments: tuple[bytes, ...]
    environ: Mapping[str, bytes]
    adapt: bool


class Ready(_ZygoteMessage, frozen=True):
    """Preloading is over."""

    notes: tuple[str, ...]
    """Lines for the user on what could not be preloaded or forked."""


class Forked(_ZygoteMessage, frozen=True):
    """A worker's process exists. Descriptor: its pidfd."""

    number: Int64
    pid: Int64


class Exited(_ZygoteMessage, frozen=True):
    """A worker's process has ended and was reaped."""

    number: Int64
    status: Int64
    """Wait status."""


FromZygote = Ready | Forked | Exited
