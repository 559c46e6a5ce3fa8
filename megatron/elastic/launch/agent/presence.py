"""A connection from each agent to the first one, which the kernel closes when an agent is killed.

A closed connection says less than a lease does: a device on the way may have reset it. So
it makes no node lost. The agent that notices looks for a shorter time at the other's lease
(``doubt``), until the connection is there again (``trust``): the caller connects anew, with
growing pauses, for as long as it lives. That time may be shorter than its workers' fence:
an agent that neither calls again nor renews was killed, and they with it (death signals).

A caller proves that it is an agent of this job and holds its node's place: it signs the
number that the listener has just made up together with its node, epoch and token. So nothing
that was recorded opens a connection. Unknown callers may wait ``timing.lease`` for nothing; when
too many do, the oldest gives way to the next, so that agents still get in.

Over the connection an agent says what is to be in the journal (:meth:`Presence.say`), a signed line each. A line is
signed for the number of the connection and its own, so none is left out, repeated or from elsewhere. Whether it was
heard shows in the journal alone.
"""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.control.store_server import listen
from megatron.elastic.control.wire import Codec, Int64, ProtocolError, encode
from megatron.elastic.launch.agent.agent_place import AgentPlace

__all__ = ["Presence"]

_LINE_LIMIT = 4096
_SAID_LIMIT = 1 << 26
"""Bytes of a line of an agent that has introduced itself."""
_RECEIVED = 1 << 16
_SENT = 1 << 20
"""Bytes that an agent may have said and the kernel not sent: a line is sent at once or not at all."""
_UNKNOWN = 64
_LISTENER, _HELLO = "presence", "presence/hello"
_ACCEPTED = b"accepted\n"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0


class _Listener(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address of the first agent."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class _Introduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An agent's proof that it holds its place; ``nonce``: the number that the listener has made up."""

    node: Int64
    epoch: Int64
    agent: str
    nonce: str


_LISTENERS: Codec[_Listener] = Codec(_Listener)
_INTRODUCTIONS: Codec[_Introduction] = Codec(_Introduction)


@dataclass
class _Caller:
    socket: socket.socket
    nonce: str
    buffer: bytearray = field(default_factory=bytearray)
    agent: tuple[int, int] | None = None
    """(node, epoch), once it has proved them."""
    heard: int = 0
    """Number of lines that it has said since."""


@dataclass
class _Line:
    """An agent's own connection to the first one, once it was accepted."""

    socket: socket.socket
    nonce: str
    said: int = 0


class Presence:
    """See the module docstring. Callbacks run on the loop's thread.

    ``hear(node, epoch, body)``: what another agent said, to the first one; it raises :class:`ProtocolError` for what
    no agent says. ``broken()``: what this one said last may not have been heard.
    """

    def __init__(
        self,
        place: AgentPlace,
        doubt: Callable[[int], None],
        trust: Callable[[int], None],
        hear: Callable[[int, int, bytes], None],
        broken: Callable[[], None],
    ) -> None:
        self._place, self._loop, self._timing = place, place.loop, place.timing
        self._doubt, self._trust, self._heard, self._broken = doubt, trust, hear, broken
        self._listener: socket.socket | None = None
        self._callers: dict[int, _Caller] = {}
        self._newest: dict[int, int] = {}
        """Node → descriptor of the newest connection of its agent."""
        self._call: socket.socket | None = None
        self._line: _Line | None = None
        self._calling = False

    def start(self, host: str, address: str) -> None:
        """Listen or call, once this agent holds its place; again after it has taken its place anew.

        ``host``: of the first agent where it serves the store; ``address``: where this node is reached.
        """
        if self._place.node == 0:
            if self._listener is None:
                self._listener = self._listen()
            there = _Listener(address, self._listener.getsockname()[1])
            threading.Thread(target=self._announce, args=(there,), name="presence", daemon=True).start()
        elif not self._calling:
            self._calling = True
            threading.Thread(target=self._keep_calling, args=(host,), name="presence", daemon=True).start()
        else:
            self.call_again()  # it was introduced in another life

    def say(self, body: bytes) -> bool:
        """Say ``body`` to the first agent, behind what was said before. False if there is no connection.

        Never waits: a connection that takes no more is given up.
        """
        line = self._line
        if line is None:
            return False
        data = self._place.signer.sign(_said(line.nonce, line.said), body) + b"\n"
        line.said += 1
        try:
            sent = line.socket.send(data, socket.MSG_NOSIGNAL)
        except OSError:
            sent = 0
        if sent < len(data):
            self._line = None
            _shut(line.socket)
        return sent == len(data)

    def call_again(self) -> None:
        """Give up the connection to the first agent, if there is one; the thread makes another."""
        call, self._line = self._call, None
        if call is not None:
            _shut(call)

    # -- the first agent ------------------------------------------------------------

    def _listen(self) -> socket.socket:
        listener = listen("", 0)
        listener.setblocking(False)
        self._loop.watch(listener.fileno(), self._accept)
        return listener

    def _announce(self, there: _Listener) -> None:
        with suppress(StoreLost):  # the journal's follower tells the loop
            self._place.store.clone().put(_LISTENER, self._place.signer.sign(_LISTENER, encode(there)))

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        try:
            connection, _address = self._listener.accept()
        except OSError:
            return
        unknown = [fd for fd, caller in self._callers.items() if caller.agent is None]
        if len(unknown) >= _UNKNOWN:
            self._drop(unknown[0])
        caller = _Caller(connection, secrets.token_hex(16))
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        fd = connection.fileno()
        self._callers[fd] = caller
        self._loop.watch(fd, lambda _mask: self._hear(fd, caller))
        self._loop.after(self._timing.lease, lambda: self._drop_unknown(fd, caller))
        try:
            connection.send(caller.nonce.encode() + b"\n", socket.MSG_NOSIGNAL)
        except OSError:
            self._drop(fd)

    def _hear(self, fd: int, caller: _Caller) -> None:
        known = caller.agent is not None
        try:
            data = caller.socket.recv(_RECEIVED if known else _LINE_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.buffer += data
        if not data or len(caller.buffer) > (_SAID_LIMIT if known else _LINE_LIMIT):
            self._drop(fd)
        elif caller.buffer.endswith(b"\n") and not known:
            self._introduce(fd, caller, bytes(caller.buffer[:-1]))
        elif known and b"\n" in data:
            self._take_lines(fd, caller)

    def _take_lines(self, fd: int, caller: _Caller) -> None:
        assert caller.agent is not None
        *lines, rest = bytes(caller.buffer).split(b"\n")
        caller.buffer = bytearray(rest)
        try:
            for line in lines:
                body = self._place.signer.open(_said(caller.nonce, caller.heard), line)
                if body is None or not self._holds_place:
                    raise ProtocolError("not the next line of this connection, or this agent is the first one no more")
                caller.heard += 1
                self._heard(*caller.agent, body)
        except ProtocolError:
            self._drop(fd)

    @property
    def _holds_place(self) -> bool:
        mine = self._place.nodes[self._place.node]
        return mine.alive and mine.agent == self._place.token

    def _introduce(self, fd: int, caller: _Caller, line: bytes) -> None:
        try:
            hello = _INTRODUCTIONS.decode(self._place.signer.open(_HELLO, line) or b"")
            node = self._place.nodes.get(hello.node)
            held = node is not None and (hello.epoch, hello.agent) == (node.epoch, node.agent)
            if hello.nonce != caller.nonce or not held or not self._holds_place:
                raise ProtocolError("an answer to another question, or an agent that holds no place")
        except ProtocolError:
            self._drop(fd)
            return
        caller.agent = hello.node, hello.epoch
        caller.buffer.clear()
        self._newest[hello.node] = fd
        self._trust(hello.node)
        try:
            caller.socket.send(_ACCEPTED, socket.MSG_NOSIGNAL)
        except OSError:
            self._drop(fd)

    def _drop_unknown(self, fd: int, caller: _Caller) -> None:
        if caller.agent is None and self._callers.get(fd) is caller:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        caller = self._callers.pop(fd)
        self._loop.forget(fd)
        caller.socket.close()
        if caller.agent is None:
            return
        number, epoch = caller.agent
        if self._newest.get(number) == fd:
            del self._newest[number]
            node = self._place.nodes[number]
            if node.alive and node.epoch == epoch:
                self._doubt(number)

    # -- the others -----------------------------------------------------------------

    def _keep_calling(self, host: str) -> None:
        """Hold a connection to the first agent for life; another one whenever it breaks."""
        pause = _FIRST_PAUSE
        with suppress(StoreLost):
            store = self._place.store.clone()
            while True:
                if self._hold(store, host):
                    pause = _FIRST_PAUSE
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _hold(self, store: Store, host: str) -> bool:
        """Connect, introduce this agent and wait for the end of the connection; whether it was accepted."""
        value = store.wait(_LISTENER, self._timing.lease)
        body = self._place.signer.open(_LISTENER, value) if value is not None else None
        try:
            there = _LISTENERS.decode(body or b"")
            address = (host if store.embedded else there.host, there.port)
            with socket.create_connection(address, timeout=self._timing.lease) as call:
                self._call = call
                with call.makefile("rb") as reader:
                    nonce = reader.readline(_LINE_LIMIT).decode("ascii").rstrip("\n")
                    hello = _Introduction(self._place.node, self._place.epoch, self._place.token, nonce)
                    call.sendall(self._place.signer.sign(_HELLO, encode(hello)) + b"\n")
                    if reader.readline(_LINE_LIMIT) != _ACCEPTED:
                        return False
                call.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT)
                call.setblocking(False)
                self._line = _Line(call, nonce)
                self._loop.post(lambda: self._trust(0))
                poll = select.poll()
                poll.register(call, select.POLLIN)
                poll.poll()  # readable only at its end
        except (OSError, ValueError):
            return False
        finally:
            self._call = self._line = None
        self._loop.post(self._broken)
        if not store.embedded:  # else the end of the store says it, to the journal's follower
            self._loop.post(lambda: self._doubt(0))
        return True


def _said(nonce: str, number: int) -> str:
    """Return what the ``number``-th line of a connection is signed for."""
    return f"presence/said/{nonce}/{number}"


def _shut(call: socket.socket) -> None:
    with suppress(OSError):  # it has ended by itself
        call.shutdown(socket.SHUT_RDWR)
