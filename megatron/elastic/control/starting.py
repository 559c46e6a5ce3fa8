"""The state of a launcher that has not met the others yet, for ``ctl doctor``.

A launcher answers at an abstract Unix socket, named after job and process, from reading its arguments until it has a
console. A connection by the same user gets one :class:`StartStatus` and is closed; nothing is read from it.
"""

from __future__ import annotations

import hashlib
import socket

import msgspec

from megatron.elastic.control.socket_names import start_name
from megatron.elastic.control.wire import Codec, FrameReader, Int64, ProtocolError

__all__ = ["StartStatus", "ask_launcher", "fingerprint"]

_SECONDS = 5.0


class StartStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One launcher that starts."""

    run_id: str
    pid: Int64
    host: str
    doing: str
    """The thing that it does or waits for now."""
    seconds: float
    """For how long."""
    node: Int64
    """Its node rank; −1: not agreed yet."""
    least: Int64
    """Nodes that must come before the job starts."""
    workers: Int64
    store: tuple[tuple[str, Int64], ...]
    """Hosts and ports at which it expects the store."""
    serves: bool
    """True if it serves that store itself."""
    secret: str
    """Fingerprint of its secret."""
    files: Int64
    """Open files that the job needs."""


_STATUS: Codec[StartStatus] = Codec(StartStatus)


def fingerprint(secret: str) -> str:
    """Eight hex digits that two nodes may compare: equal for equal secrets, and of no use to find the secret."""
    return hashlib.blake2b(bytes.fromhex(secret), digest_size=4, person=b"fingerprint").hexdigest()


def ask_launcher(run_id: str, pid: int) -> StartStatus | None:
    """The state of one launcher; None where it has gone on meanwhile, or belongs to another user."""
    reader = FrameReader(_STATUS)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as there:
            there.settimeout(_SECONDS)
            there.connect(start_name(run_id, pid))
            while data := there.recv(1 << 16):
                for status in reader.feed(data):
                    return status
    except (OSError, ProtocolError):
        return None
    return None
