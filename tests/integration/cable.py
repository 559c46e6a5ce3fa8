"""A cable between an agent and the store, to be cut and mended: forwards TCP connections on loopback."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["Cable", "cable"]


class Cable:
    """Forwards what comes to ``port`` to ``to``, a port of this host, from a thread of its own."""

    def __init__(self, to: int) -> None:
        self._to, self._cut = to, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._other: dict[socket.socket, socket.socket] = {}
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Connections that there are break; new ones are made, and nothing comes through them."""
        with self._lock:
            self._cut = True
            for end in list(self._other):
                self._drop(end)

    def mend(self) -> None:
        """New connections come through again."""
        with self._lock:
            self._cut = False

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        for end in list(self._other):
            self._drop(end)
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._end.is_set():
            ready = self._selector.select(0.05)
            with self._lock:
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._other:
                        self._forward(key.fileobj)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.socket()
        with suppress(OSError):
            if not self._cut:
                far.connect(("127.0.0.1", self._to))
            self._other[near], self._other[far] = far, near
            self._selector.register(near, selectors.EVENT_READ)
            if not self._cut:
                self._selector.register(far, selectors.EVENT_READ)
            return
        near.close()  # nothing listens there
        far.close()

    def _forward(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            if data and not self._cut:
                self._other[end].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        for each in (end, self._other.pop(end, None)):
            if each is not None:
                self._other.pop(each, None)
                with suppress(KeyError, ValueError):
                    self._selector.unregister(each)
                with suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.close()


@contextmanager
def cable(to: int) -> Iterator[Cable]:
    made = Cable(to)
    try:
        yield made
    finally:
        made.close()
