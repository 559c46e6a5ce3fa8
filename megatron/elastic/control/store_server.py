"""The embedded store: served by the first agent, to processes that know the job's secret.

One thread serves all connections over epoll and never blocks. A connection is a *stranger* until the handshake of
:mod:`channel` has proved that it belongs to the job. Strangers cannot keep the job waiting: their number and their time
are limited. If there are too many, the oldest one of the address that has most of them is closed. Each turn of the loop
serves the job's own connections first and accepts only a few new ones. Memory is never allocated by an announced size:
a stranger's messages have fixed sizes, and a frame of a member takes only as much memory as has arrived of it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import socket
import threading
import time
from collections import Counter, deque

from megatron.elastic.control.channel import (
    ANSWER_BYTES,
    HELLO_BYTES,
    INSTANCE_BYTES,
    Acceptor,
    Credentials,
    Session,
)
from megatron.elastic.control.keys import Keys, LocalStore, Waiter
from megatron.elastic.control.store import StoreLost, leading
from megatron.elastic.control.store_messages import (
    Create,
    Delete,
    Get,
    GetMany,
    Put,
    Replace,
    Reply,
    Request,
    Wait,
    decode_request,
    encode,
)
from megatron.elastic.control.wire import ProtocolError

__all__ = ["PURPOSE", "ServedStore", "StoreServer", "listen", "serve"]

PURPOSE = "store"
_LOOPBACK = "127.0.0.1"
_STRANGERS = 128
_STRANGER_SECONDS = 5.0
_ACCEPTED_A_TURN = 16
_PAUSE_SECONDS = 0.01
"""After a turn with as many new connections as may be, the listener is left alone for so long."""
_BACKLOG = 1024
_RECEIVED = 1 << 14
_SILENT_SECONDS = 30
"""A member's host that vanished without a word is noticed after so long."""


def serve(host: str, port: int, credentials: Credentials) -> ServedStore:
    """Serve at ``port`` (0: any free one) of ``host`` ("": all addresses). Raises :class:`StoreLost`."""
    try:
        listener = listen(host, port)
    except (OSError, OverflowError) as error:
        raise StoreLost(str(error)) from None
    return ServedStore(Keys(), listener, credentials)


def listen(host: str, port: int) -> socket.socket:
    """Listen at ``port`` (0: any free one) of ``host``; "": all addresses, of IPv4 and IPv6. Raises ``OSError``."""
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (97, 99):  # EAFNOSUPPORT, EADDRNOTAVAIL: a machine without IPv6
                raise
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


class ServedStore(LocalStore):
    """The store of the agent that serves it. ``host`` and ``port``: where it is reached in this machine."""

    def __init__(self, keys: Keys, listener: socket.socket, credentials: Credentials) -> None:
        super().__init__(keys)
        where = listener.getsockname()
        self.host, self.port = (_LOOPBACK if where[0] in ("::", "0.0.0.0") else str(where[0])), int(where[1])
        self._server = StoreServer(keys, listener, credentials)

    def close(self) -> None:
        """Stop serving; clients find the store lost."""
        self._server.close()


class _Connection:
    """One client. ``session`` is None while it is a stranger."""

    def __init__(self, channel: socket.socket, address: str, handshake: Acceptor) -> None:
        self.channel, self.address, self.handshake = channel, address, handshake
        self.deadline = time.monotonic() + _STRANGER_SECONDS
        self.session: Session | None = None
        self.greeted = False
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.waiting: tuple[Wait, Waiter] | None = None
        """The wait under way, and the call registered for its key."""
        self.asked = 0
        """Waits so far: tells the present one's end from an earlier one's."""


class StoreServer:
    """See the module docstring. Serves ``keys`` on a daemon thread until :meth:`close`."""

    def __init__(self, keys: Keys, listener: socket.socket, credentials: Credentials) -> None:
        self._keys, self._listener = keys, listener
        self._key, self._instance = credentials.key(PURPOSE), os.urandom(INSTANCE_BYTES)
        listener.setblocking(False)
        self._connections: dict[int, _Connection] = {}
        self._strangers: dict[int, _Connection] = {}
        """In the order of their coming, and so of their deadlines."""
        self._came: deque[tuple[_Connection, int, bytes]] = deque()
        """Values that were waited for, from any thread: connection, number of the wait, value."""
        self._ends: list[tuple[float, int, _Connection, int]] = []
        self._order = itertools.count()
        self._paused_until = 0.0
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and stop."""
        if not self._closing.is_set():
            self._closing.set()
            os.eventfd_write(self._wake, 1)
            self._thread.join()

    # -- the loop --------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            ready = dict(self._epoll.poll(self._until_next_deadline()))
            if ready.pop(self._wake, None) is not None:
                os.eventfd_read(self._wake)
            knocking = ready.pop(self._listener.fileno(), None) is not None
            for fd in sorted(ready, key=self._strangers.__contains__):
                if fd in self._connections:
                    self._guarded(self._connections[fd], ready[fd])
            while self._came:
                self._answer_wait(*self._came.popleft())
            self._end_overdue(time.monotonic())
            if knocking:
                self._accept()
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._listener.close()
        self._epoll.close()

    def _until_next_deadline(self) -> float:
        """Seconds; -1 where nothing is due ever."""
        dues = [self._ends[0][0]] if self._ends else []
        dues += [next(iter(self._strangers.values())).deadline] if self._strangers else []
        dues += [self._paused_until] if self._paused_until else []
        return max(0.0, min(dues) - time.monotonic()) if dues else -1.0

    def _end_overdue(self, now: float) -> None:
        while self._strangers and (oldest := next(iter(self._strangers.values()))).deadline <= now:
            self._drop(oldest)
        while self._ends and self._ends[0][0] <= now:
            _, _, connection, number = heapq.heappop(self._ends)
            self._answer_wait(connection, number, None)
        if self._paused_until and self._paused_until <= now:
            self._paused_until = 0.0
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    # -- connections -----------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_A_TURN):
            try:
                channel, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it has gone, or no descriptor is left: some will be given back
                break
            if len(self._strangers) >= _STRANGERS:
                self._make_way()
            channel.setblocking(False)
            configure(channel, _SILENT_SECONDS)
            connection = _Connection(channel, str(address[0]), Acceptor(self._key, self._instance))
            self._connections[channel.fileno()] = self._strangers[channel.fileno()] = connection
            self._epoll.register(channel.fileno(), select.EPOLLIN)
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        self._epoll.unregister(self._listener.fileno())

    def _make_way(self) -> None:
        """Drop the oldest stranger of the address that has most of them."""
        crowded, _ = Counter(each.address for each in self._strangers.values()).most_common(1)[0]
        self._drop(next(each for each in self._strangers.values() if each.address == crowded))

    def _guarded(self, connection: _Connection, mask: int) -> None:
        try:
            if mask & select.EPOLLOUT:
                self._flush(connection)
            if mask & ~select.EPOLLOUT:
                self._receive(connection)
        except (OSError, ProtocolError):
            self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        # A stranger is read no further than its next message goes.
        wanted = ANSWER_BYTES if connection.greeted else HELLO_BYTES
        try:
            data = connection.channel.recv(_RECEIVED if connection.session else wanted - len(connection.incoming))
        except BlockingIOError:
            return
        if not data:
            raise ProtocolError("the client closed the connection")
        connection.incoming += data
        if connection.session is not None:
            self._serve(connection)
        elif len(connection.incoming) == wanted:
            message = bytes(connection.incoming)
            connection.incoming.clear()
            if connection.greeted:
                connection.session = connection.handshake.session(message)
                del self._strangers[connection.channel.fileno()]
            else:
                connection.greeted = True
                self._send(connection, connection.handshake.challenge(message))

    def _serve(self, connection: _Connection) -> None:
        assert connection.session is not None
        while connection.waiting is None:  # one request after the other
            body = connection.session.take(connection.incoming)
            if body is None:
                return
            request = decode_request(body)
            if isinstance(request, Wait):
                self._wait(connection, request)
            else:
                self._reply(connection, self._carry_out(request))

    def _carry_out(self, request: Request) -> Reply:
        keys = self._keys
        match request:
            case Get():
                return keys.get(request.key)
            case GetMany():
                return [keys.get(key) for key in request.keys]
            case Put():
                keys.put(request.key, request.value)
            case Create():
                return keys.replace(request.key, None, request.value)
            case Replace():
                return keys.replace(request.key, request.old, request.new) == request.new
            case Delete():
                keys.delete(request.key)
        return None

    def _wait(self, connection: _Connection, request: Wait) -> None:
        connection.asked += 1
        number = connection.asked

        def came(value: bytes) -> None:
            self._came.append((connection, number, value))
            if threading.current_thread() is not self._thread:
                os.eventfd_write(self._wake, 1)

        found = self._keys.when(request.key, came)
        if found is not None:
            self._reply(connection, self._with_next(request, found))
            return
        connection.waiting = request, came
        heapq.heappush(self._ends, (time.monotonic() + request.seconds, next(self._order), connection, number))

    def _answer_wait(self, connection: _Connection, number: int, value: bytes | None) -> None:
        """End a wait, unless it has ended already."""
        if connection.waiting is None or connection.asked != number:
            return
        request, call = connection.waiting
        if value is None:
            self._keys.forget(request.key, call)
        connection.waiting = None
        try:
            self._reply(connection, None if value is None else self._with_next(request, value))
            self._serve(connection)  # requests it sent meanwhile
        except (OSError, ProtocolError):
            self._drop(connection)

    def _with_next(self, request: Wait, value: bytes) -> Reply:
        """Return the reply to a wait that ``value`` ends."""
        if not request.then:
            return value
        return [value, *leading(map(self._keys.get, request.then))]

    def _reply(self, connection: _Connection, reply: Reply) -> None:
        assert connection.session is not None
        self._send(connection, connection.session.frame(encode(reply)))

    def _send(self, connection: _Connection, data: bytes) -> None:
        if not connection.outgoing:
            with contextlib.suppress(BlockingIOError):
                data = data[connection.channel.send(data) :]
        if data:
            connection.outgoing += data
            self._epoll.modify(connection.channel.fileno(), select.EPOLLOUT)  # no more requests before this is gone

    def _flush(self, connection: _Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            del connection.outgoing[: connection.channel.send(connection.outgoing)]
        if not connection.outgoing:
            self._epoll.modify(connection.channel.fileno(), select.EPOLLIN)

    def _drop(self, connection: _Connection) -> None:
        fd = connection.channel.fileno()
        if self._connections.pop(fd, None) is None:
            return
        self._strangers.pop(fd, None)
        if connection.waiting is not None:
            request, call = connection.waiting
            self._keys.forget(request.key, call)
            connection.waiting = None
        self._epoll.unregister(fd)
        connection.channel.close()


def configure(channel: socket.socket, silence: float) -> None:
    """No delay for small frames, and an end with OSError when the other host is silent for ``silence`` seconds."""
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, silence / 2), (socket.TCP_KEEPINTVL, silence / 6)):
        channel.setsockopt(socket.IPPROTO_TCP, option, max(1, int(seconds)))
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))
