"""The agent's side of ``python -m megatron.elastic.ctl``: a socket that leaves no file behind.

An abstract Unix socket named after job and node. Callers must be of the same
user (or root), as the kernel tells. One request a connection, one answer, both
JSON frames. A request names the job; one for another job is refused. A connection
with a malformed request is closed without an answer.
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

from megatron.elastic.control.answers import Answer, Refusal
from megatron.elastic.control.requests import JOB_REQUESTS, Command, JobRequest
from megatron.elastic.control.socket_names import console_name, job_name
from megatron.elastic.control.wire import FrameReader, ProtocolError, frame
from megatron.elastic.launch.agent.loop import Loop

__all__ = ["Console"]

_REQUEST_LIMIT = 1 << 16
_CALLERS = 16
_SECONDS = 30.0
"""For a command and its answer. On a busy node the answer of a large job takes several."""


@dataclass
class _Inquirer:
    """One connection."""

    channel: socket.socket
    reader: FrameReader[JobRequest] = field(default_factory=lambda: FrameReader(JOB_REQUESTS, _REQUEST_LIMIT))
    answer: bytearray | None = None
    """Its part that is not sent yet; None: no request has come."""


class Console:
    """Answers commands through ``handle`` on the loop's thread."""

    def __init__(self, loop: Loop, run_id: str, node: int, handle: Callable[[Command], Answer]) -> None:
        self._loop = loop
        self._job = job_name(run_id)
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
        """Answer the first request once it is whole; False at the end of the connection."""
        data = caller.channel.recv(_REQUEST_LIMIT)
        if caller.answer is None:
            for request in itertools.islice(caller.reader.feed(data), 1):
                caller.answer = bytearray(frame(self._answer(request)))
        return bool(data)

    def _answer(self, request: JobRequest) -> Answer:
        if request.job != self._job:
            return Refusal(f"this is the agent of job {self._job!r}, not of {request.job!r}: nothing is done")
        return self._handle(request.command)

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
