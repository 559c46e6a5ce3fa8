"""Which of this process's sockets belong to gloo, found without guessing.

Nothing in gloo's API wakes a wait on a peer that is alive but has left: not
``abort``, ``shutdown`` or ``destroy_process_group``. Shutting the process's own
gloo sockets down does, at both ends, in about a millisecond.

Every gloo connection of this process has, on one of its two ends, the address
of a *listener* of a known gloo device: our own (accepted connections) or a
peer's (connections we opened). Peers publish theirs, so a socket is recognised
by its addresses alone, whenever it was opened. Sockets that match no published
listener (the store's client, control sockets, other libraries') are never
touched. A descriptor is duplicated before it is looked at, so that one closed
and reused by another thread in between is never shut by mistake.
"""

from __future__ import annotations

import fcntl
import os
import socket
import termios
from array import array
from collections.abc import Callable, Collection
from typing import TypeVar

__all__ = ["Endpoint", "Liveness", "created_listener", "refused", "shut_connections", "unread"]

Endpoint = tuple[str, int]
"""(numeric host, port)."""

T = TypeVar("T")


def created_listener(create: Callable[[], T], attempts: int = 8) -> tuple[T, Endpoint]:
    """Run ``create`` and find the one listening socket it opened.

    Another thread may open a listener at the same instant; then what was
    created is dropped and made again. Raises ``RuntimeError`` when that never
    settles.
    """
    for _ in range(attempts):
        before = set(_descriptors())
        made = create()
        new = [fd for fd in _descriptors() if fd not in before and _look(fd, _is_listening)]
        if len(new) == 1:
            endpoint = _look(new[0], lambda sock: _endpoint(sock.getsockname()))
            if endpoint is not None:
                return made, endpoint
        del made
    raise RuntimeError("could not tell gloo's listening socket from others opened at the same time")


def shut_connections(listeners: Collection[Endpoint]) -> set[int]:
    """Shut down every connection of this process with one end at one of ``listeners``; their inodes."""

    def shut(sock: socket.socket) -> int | None:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if _endpoint(sock.getpeername()) not in listeners and _endpoint(sock.getsockname()) not in listeners:
            return None
        sock.shutdown(socket.SHUT_RDWR)
        return _inode(sock)

    return {inode for fd in _descriptors() if (inode := _look(fd, shut)) is not None}


def unread(sockets: Collection[int]) -> set[int]:
    """Those of ``sockets`` (inodes, all of them shut) that hold bytes which gloo may still read; no more can come.

    A socket without any may stay open for long: gloo keeps those of a group that it is connecting to its time-out.
    """

    def waiting(sock: socket.socket) -> int | None:
        inode = _inode(sock)
        held = array("i", [0])
        if inode in sockets:
            fcntl.ioctl(sock, termios.FIONREAD, held)
        return inode if held[0] else None

    return {inode for fd in _descriptors() if (inode := _look(fd, waiting)) is not None}


def refused(endpoint: Endpoint, timeout: float) -> bool:
    """True when no process listens at ``endpoint`` any more. Unreachable or slow is not a refusal."""
    try:
        socket.create_connection(endpoint, timeout=timeout).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class Liveness:
    """A listening socket that says "this process exists" and nothing else.

    The kernel completes connections to it also for a stopped process, so a
    refusal means that the process is gone.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self._sock.bind((host, 0))
        self._sock.listen(256)
        self._sock.setblocking(False)
        self.endpoint: Endpoint = _endpoint(self._sock.getsockname())

    def drain(self) -> None:
        """Take finished probes off the queue, which would otherwise fill up."""
        while True:
            try:
                self._sock.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        self._sock.close()


def _endpoint(address: object) -> Endpoint:
    if not isinstance(address, tuple) or len(address) < 2:
        return ("", 0)
    host = str(address[0])
    return (host.removeprefix("::ffff:"), int(address[1]))


def _descriptors() -> list[int]:
    """Open descriptors, without that of the listing itself: its number is the next one to be given away."""
    folder = "/proc/self/fd"
    return [int(name) for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")]


def _inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _look(fd: int, ask: Callable[[socket.socket], T]) -> T | None:
    """``ask`` a duplicate of ``fd``; None when it is no (connected) socket or is gone."""
    try:
        duplicate = os.dup(fd)
    except OSError:
        return None
    try:
        sock = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return None
    try:
        return ask(sock)
    except OSError:
        return None
    finally:
        sock.close()
