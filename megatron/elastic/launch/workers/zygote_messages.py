"""The messages between an agent and its zygote. File descriptors travel beside them.

Text from a command line or from the environment travels as bytes, since it need not be Unicode.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from megatron.elastic.control.wire import Int64

__all__ = ["Exited", "Fork", "Forked", "FromZygote", "Kind", "Ready", "WorkerSpec"]

Kind = Literal["script", "module", "program"]
"""The kind of a worker's program, which says how it is started."""


class _ZygoteMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag=str.lower):
    """Base of the messages."""


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The program of a worker and its environment."""

    number: Int64
    """The agent's name for this incarnation, unique in the agent's life."""
    kind: Kind
    target: bytes
    arguments: tuple[bytes, ...]
    environ: Mapping[str, bytes]
    """Added to the zygote's own environment."""
    adapt: bool = False
    """Import ``megatron.elastic.adaptor`` before the script."""

    @classmethod
    def of(
        cls,
        number: int,
        kind: Kind,
        target: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        adapt: bool = False,
    ) -> WorkerSpec:
        """The same from text, as the operating system gives it."""
        values = {name: os.fsencode(value) for name, value in environ.items()}
        return cls(number, kind, os.fsencode(target), tuple(map(os.fsencode, arguments)), values, adapt)

    def variable(self, name: str) -> str:
        """A variable of its environment; empty where there is none."""
        return os.fsdecode(self.environ.get(name, b""))


class Fork(_ZygoteMessage, frozen=True):
    """Start a worker. Descriptors: its control socket, its slot, standard output, standard error."""

    spec: WorkerSpec


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
