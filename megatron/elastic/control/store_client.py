"""The embedded store as the other processes of the job reach it: one connection, one request at a time.

A connection that breaks is made anew and the request asked again, which is safe for every one of them: a request that
was carried out already finds its own result. It must be the same server that answers: another one, started later at the
same place, would have forgotten everything.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence

from megatron.elastic.control.channel import CHALLENGE_BYTES, Credentials, Dialer, Session
from megatron.elastic.control.store import Store, StoreLost, leading
from megatron.elastic.control.store_messages import (
    LONGEST_WAIT,
    Create,
    Delete,
    Get,
    GetMany,
    Put,
    Replace,
    Reply,
    Request,
    Wait,
    decode_reply,
    encode,
)
from megatron.elastic.control.store_server import PURPOSE, configure
from megatron.elastic.control.wire import ProtocolError

__all__ = ["ReachedStore", "reach"]

_RETRY_SECONDS = 0.1
_HANDSHAKE_SECONDS = 5.0
_RECEIVED = 1 << 14


class NotTheStore(StoreLost):
    """Something listens there that is not this job's store."""


def reach(
    host: str, port: int, credentials: Credentials, timeout: float, silence: float = 30.0, patience: float = 5.0
) -> ReachedStore:
    """The store at ``host:port``, which may not be served yet, within ``timeout`` seconds.

    A connection to a host that was silent for ``silence`` seconds is broken; a broken one is made anew for up to
    ``patience`` seconds, unless the host says that nothing listens there any more. Raises :class:`StoreLost`.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            return ReachedStore(host, port, credentials, timeout, silence, patience)
        except NotTheStore:
            raise
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS >= end:
                raise StoreLost(f"store at {host}:{port}: {error}") from None
            time.sleep(_RETRY_SECONDS)


class ReachedStore(Store):
    """See the module docstring. A request not answered within ``timeout`` seconds raises :class:`StoreLost`."""

    embedded = True

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        timeout: float,
        silence: float,
        patience: float,
        instance: bytes = b"",
    ) -> None:
        self.host, self.port = host, port
        self._credentials, self._timeout, self._silence, self._patience = credentials, timeout, silence, patience
        self._instance = instance
        self._turn = threading.Lock()
        self._incoming = bytearray()
        self._channel, self._session = self._connect()

    @property
    def keeper(self) -> str:
        return "the first agent, which holds the store,"

    def put(self, key: str, value: bytes) -> None:
        self._ask(Put(key, value))

    def get(self, key: str) -> bytes | None:
        return _value(self._ask(Get(key)))

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes | None]:
        found = self._ask(GetMany(list(keys)))
        if not isinstance(found, list) or len(found) != len(keys):
            raise StoreLost(f"store at {self.host}:{self.port}: the reply does not have {len(keys)} values")
        return dict(zip(keys, found, strict=True))

    def create(self, key: str, value: bytes) -> bytes:
        found = _value(self._ask(Create(key, value)))
        if found is None:
            raise StoreLost(f"store at {self.host}:{self.port}: a value that was set is missing")
        return found

    def replace(self, key: str, old: bytes | None, new: bytes) -> bool:
        return self._ask(Replace(key, old, new)) is True

    def wait(self, key: str, timeout: float) -> bytes | None:
        end = time.monotonic() + timeout
        while True:
            left = min(LONGEST_WAIT, max(0.0, end - time.monotonic()))
            found = _value(self._ask(Wait(key, left), extra=left))
            if found is not None or time.monotonic() >= end:
                return found

    def wait_many(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        end = time.monotonic() + timeout
        while True:
            left = min(LONGEST_WAIT, max(0.0, end - time.monotonic()))
            found = self._ask(Wait(keys[0], left, list(keys[1:])), extra=left)
            if isinstance(found, list):
                return leading(found)
            value = _value(found)
            if value is not None or time.monotonic() >= end:
                return [] if value is None else [value]

    def delete(self, key: str) -> None:
        self._ask(Delete(key))

    def clone(self) -> ReachedStore:
        try:
            return ReachedStore(
                self.host, self.port, self._credentials, self._timeout, self._silence, self._patience, self._instance
            )
        except OSError as error:
            raise StoreLost(f"store at {self.host}:{self.port}: {error}") from None

    def close(self) -> None:
        self._channel.close()

    # -- one request -----------------------------------------------------------------

    def _ask(self, request: Request, extra: float = 0.0) -> Reply:
        with self._turn:
            again_until: float | None = None
            while True:
                try:
                    return self._exchange(request, extra)
                except BlockingIOError:  # connected, and stopped
                    raise StoreLost(f"store at {self.host}:{self.port} does not answer") from None
                except (OSError, ProtocolError) as error:
                    # Broken on the way, or not the server's words: the same server is there, or it is lost.
                    now = time.monotonic()
                    again_until = now + self._patience if again_until is None else again_until
                    if now >= again_until:
                        raise StoreLost(f"store at {self.host}:{self.port}: {error}") from None
                    self._reconnect(again_until)

    def _exchange(self, request: Request, extra: float) -> Reply:
        if extra:
            _limit(self._channel, self._timeout + extra)
        self._channel.sendall(self._session.frame(encode(request)))
        while True:
            body = self._session.take(self._incoming)
            if body is not None:
                if extra:
                    _limit(self._channel, self._timeout)
                return decode_reply(body)
            data = self._channel.recv(_RECEIVED)
            if not data:
                raise ConnectionResetError("the connection was closed")
            self._incoming += data

    def _reconnect(self, end: float) -> None:
        self._channel.close()
        while True:
            try:
                self._channel, self._session = self._connect()
                return
            except (ConnectionRefusedError, NotTheStore) as error:  # the server is gone, or is another one
                raise StoreLost(f"store at {self.host}:{self.port}: {error}") from None
            except OSError as error:
                if time.monotonic() >= end:
                    raise StoreLost(f"store at {self.host}:{self.port}: {error}") from None
                time.sleep(_RETRY_SECONDS)

    def _connect(self) -> tuple[socket.socket, Session]:
        """A new connection, proved on both sides. Raises OSError; :class:`NotTheStore` for another server."""
        channel = socket.create_connection((self.host, self.port), timeout=_HANDSHAKE_SECONDS)
        try:
            configure(channel, self._silence)
            dialer = Dialer(self._credentials.key(PURPOSE))
            channel.sendall(dialer.hello)
            challenge = _received(channel, CHALLENGE_BYTES)
            answer, session = dialer.answer(challenge)
            if self._instance not in (b"", dialer.instance):
                raise NotTheStore(f"another server now listens at {self.host}:{self.port}")
            self._instance = dialer.instance
            channel.sendall(answer)
        except ProtocolError as error:
            channel.close()
            raise NotTheStore(f"the server at {self.host}:{self.port} is not this job's store: {error}") from None
        except OSError:
            channel.close()
            raise
        self._incoming.clear()
        channel.settimeout(None)
        _limit(channel, self._timeout)
        return channel, session


def _limit(channel: socket.socket, seconds: float) -> None:
    """Bound one receive. By the kernel: Python's own time-outs cost another system call each time."""
    whole = int(seconds)
    limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6) or 1)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _received(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = channel.recv(size - len(data))
        if not more:
            raise ConnectionResetError("closed during the handshake")
        data += more
    return data


def _value(reply: Reply) -> bytes | None:
    if reply is None or isinstance(reply, bytes):
        return reply
    raise StoreLost("the store's reply is malformed")
