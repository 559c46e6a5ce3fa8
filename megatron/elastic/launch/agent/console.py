"""The agent's side of ``python -m megatron.elastic.ctl``: a socket that leaves no file behind.

An abstract Unix socket named after job and node. Callers must be of the same
user (or root), as the kernel tells. One command a connection, one answer, both
JSON frames. A connection with a malformed command is closed without an answer.
A caller that reads slowly does not delay the others.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.elastic.control.answers import Answer
from megatron.elastic.control.requests import COMMANDS, Command
from megatron.elastic.control.wire import FrameReader, ProtocolError, frame
from megatron.elastic.launch.agent.loop import Loop

__all__ = ["Console", "console_name"]

_PREFIX = "megatron-elastic"
_REQUEST_LIMIT = 1 << 16
_CALLERS = 16
_SECONDS = 30.0
"""For a command and its answer. On a busy node the answer of a large job takes several."""


def console_name(run_id: str, node: int) -> str:
    """Address of a node's console in the abstract namespace."""
    return f"\0{_PREFIX}/{run_id[:80]}/{node}"


@dataclass
class _Inquirer:
    """One connection."""

    channel: socket.socket
    reader: FrameReader[Command] = field(default_factory=lambda: FrameReader(COMMANDS, _REQUEST_LIMIT))
    answer: bytearray | None = None
    """Its part that is not sent yet; None: no command has come."""


class Console:
    """Answers commands through ``handle`` on the loop's thread."""

    def __init__(self, loop: Loop, run_id: str, node: int, handle: Callable[[Command], Answer]) -> None:
        self._loop = loop
        self._handle = handle
        self._callers: dict[int, _Inquirer] = {}
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(console_name(run_id, node))
        except OSError:
            # Another job of the same name on this machine; ours runs without a console.
            self._socket.close()
            self._socket = None
            return
        self._socket.listen(_CALLERS)
        self._socket.setblocking(False)
        loop.watch(self._socket.fileno(), self._accept)

    @property
    def open(self) -> bool:
        """True if the name was free."""
        return self._socket is not None

    def _accept(self, _: int) -> None:
        assert self._socket is not None
        try:
            channel, _address = self._socket.accept()
        except OSError:
            return
        peer = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _pid, uid, _gid = struct.unpack("3i", peer)
        if uid not in (os.getuid(), 0) or len(self._callers) >= _CALLERS:
            channel.close()
            return
        channel.setblocking(False)
        caller = self._callers[channel.fileno()] = _Inquirer(channel)
        self._loop.watch(channel.fileno(), lambda mask: self._serve(caller, mask))
        self._loop.after(_SECONDS, lambda: self._drop(caller))

    def _serve(self, caller: _Inquirer, mask: int) -> None:
        """Read and send without waiting. Drops a caller that is done or broken."""
        try:
            if mask & ~select.EPOLLOUT and not self._read(caller):
                self._drop(caller)
                return
            if caller.answer:
                del caller.answer[: caller.channel.send(caller.answer, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except (OSError, ProtocolError):
            self._drop(caller)
            return
        if caller.answer is not None and not caller.answer:
            self._drop(caller)
        else:
            self._loop.adjust(caller.channel.fileno(), writing=bool(caller.answer))

    def _read(self, caller: _Inquirer) -> bool:
        """Carry out the first command once it is whole; False at the end of the connection."""
        data = caller.channel.recv(_REQUEST_LIMIT)
        if caller.answer is None:
            for command in itertools.islice(caller.reader.feed(data), 1):
                caller.answer = bytearray(frame(self._handle(command)))
        return bool(data)

    def _drop(self, caller: _Inquirer) -> None:
        fd = caller.channel.fileno()
        if self._callers.get(fd) is caller:
            del self._callers[fd]
            self._loop.forget(fd)
            caller.channel.close()

    def close(self) -> None:
        """Stop answering."""
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
