"""The agent's side of ``python -m megatron.elastic.ctl``: a socket that leaves no file behind.

An abstract Unix socket named after job and node. Callers must be of the same
user (or root), as the kernel tells. One command a connection, one answer, both
JSON frames. A connection with a malformed command is closed without an answer.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

from megatron.elastic.control.answers import Answer
from megatron.elastic.control.requests import COMMANDS, Command
from megatron.elastic.control.wire import FrameReader, ProtocolError, frame
from megatron.elastic.launch.agent.loop import Loop

__all__ = ["Console", "console_name"]

_PREFIX = "megatron-elastic"
_REQUEST_LIMIT = 1 << 16
_CALLERS = 16
_SECONDS = 5.0


def console_name(run_id: str, node: int) -> str:
    """Address of a node's console in the abstract namespace."""
    return f"\0{_PREFIX}/{run_id[:80]}/{node}"


class Console:
    """Answers commands through ``handle`` on the loop's thread."""

    def __init__(self, loop: Loop, run_id: str, node: int, handle: Callable[[Command], Answer]) -> None:
        self._loop = loop
        self._handle = handle
        self._callers: dict[int, tuple[socket.socket, FrameReader[Command]]] = {}
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
            caller, _address = self._socket.accept()
        except OSError:
            return
        peer = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _pid, uid, _gid = struct.unpack("3i", peer)
        if uid not in (os.getuid(), 0) or len(self._callers) >= _CALLERS:
            caller.close()
            return
        caller.setblocking(False)
        fd = caller.fileno()
        self._callers[fd] = (caller, FrameReader(COMMANDS, _REQUEST_LIMIT))
        self._loop.watch(fd, lambda _mask: self._serve(fd))
        self._loop.after(_SECONDS, lambda: self._drop(fd, caller))

    def _serve(self, fd: int) -> None:
        caller, reader = self._callers[fd]
        try:
            data = caller.recv(_REQUEST_LIMIT)
            for command in reader.feed(data):
                caller.send(frame(self._handle(command)), socket.MSG_NOSIGNAL)
                data = b""
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            data = b""
        if not data:
            self._drop(fd, caller)

    def _drop(self, fd: int, caller: socket.socket) -> None:
        if fd in self._callers and self._callers[fd][0] is caller:
            del self._callers[fd]
            self._loop.forget(fd)
            caller.close()

    def close(self) -> None:
        """Stop answering."""
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
