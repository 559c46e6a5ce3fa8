"""A byte stream both ends of which prove that they belong to the job, before anything else is said.

Three messages of fixed size open a connection (after SIGMA's and TLS 1.3's pre-shared keys; both nonces are fresh)::

    hello       dialer → listener   magic, nonce
    challenge   listener → dialer   nonce, the server's instance, proof
    answer      dialer → listener   proof

A proof is HMAC-SHA256, under a key made of the job's secret and its run id, over the role and everything said
before. From then on bytes travel in frames: length, body, and keyed BLAKE2b (RFC 7693, faster than HMAC here) over the
frame's number and both. Each direction has a key of its own, made of both nonces, and numbers its frames from 0. So a
frame that was forged, replayed, dropped or moved, within a connection or from another one, ends the connection with
:class:`ProtocolError`.

Messages are authenticated, not encrypted. This module does no input or output.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from dataclasses import dataclass, field

from megatron.elastic.control.wire import ProtocolError

__all__ = [
    "ANSWER_BYTES",
    "CHALLENGE_BYTES",
    "HELLO_BYTES",
    "INSTANCE_BYTES",
    "MAX_FRAME",
    "Acceptor",
    "Credentials",
    "Dialer",
    "Session",
]

MAX_FRAME = 1 << 26
"""Bytes of a body: a snapshot of a job of thousands of ranks fits."""
INSTANCE_BYTES = 16
_MAGIC = b"MEL-ST01"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES
CHALLENGE_BYTES = _NONCE_BYTES + INSTANCE_BYTES + _PROOF_BYTES
ANSWER_BYTES = _PROOF_BYTES
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


@dataclass(frozen=True)
class Credentials:
    """The secret and the run id: shared by all processes of one job, and known to no other."""

    secret: str = field(repr=False)
    """Hex digits."""
    run_id: str

    def key(self, purpose: str) -> bytes:
        """A key for one purpose within this run: a signature for one purpose does not verify for another."""
        return _digest(bytes.fromhex(self.secret), purpose.encode() + b"\0" + self.run_id.encode())


class Session:
    """Frames of one established connection, in both directions. Not for several threads."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._sending = hashlib.blake2b(key=sending, digest_size=_PROOF_BYTES)
        self._receiving = hashlib.blake2b(key=receiving, digest_size=_PROOF_BYTES)
        self._sent = self._received = 0

    def frame(self, body: bytes) -> bytes:
        """``body`` as it travels. Raises :class:`ProtocolError` where it is too long."""
        if len(body) > MAX_FRAME:
            raise ProtocolError(f"message of {len(body)} bytes; the limit is {MAX_FRAME}")
        framed = _LENGTH.pack(len(body)) + body
        code = self._sending.copy()
        code.update(_NUMBER.pack(self._sent) + framed)
        self._sent += 1
        return framed + code.digest()

    def take(self, buffer: bytearray) -> bytes | None:
        """Take the first frame off ``buffer``; its body, or None where it is not complete yet.

        Raises :class:`ProtocolError` for a frame that is not the next one of this connection's other end.
        """
        if len(buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        if length > MAX_FRAME:
            raise ProtocolError(f"frame of {length} bytes announced; the limit is {MAX_FRAME}")
        end = _LENGTH.size + length
        if len(buffer) < end + _PROOF_BYTES:
            return None
        framed, proof = bytes(buffer[:end]), bytes(buffer[end : end + _PROOF_BYTES])
        code = self._receiving.copy()
        code.update(_NUMBER.pack(self._received) + framed)
        if not hmac.compare_digest(proof, code.digest()):
            raise ProtocolError("a frame is not the next one of this connection (repeated, lost or forged)")
        del buffer[: end + _PROOF_BYTES]
        self._received += 1
        return framed[_LENGTH.size :]


class Dialer:
    """The handshake of the end that connects. ``key``: :meth:`Credentials.key` of the service that is wanted."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.hello = _MAGIC + os.urandom(_NONCE_BYTES)
        self.instance = b""
        """Of the server, once its challenge was found good."""

    def answer(self, challenge: bytes) -> tuple[bytes, Session]:
        """The answer and the session. Raises :class:`ProtocolError` for a listener without the key."""
        said, proof = self.hello + challenge[:-_PROOF_BYTES], challenge[-_PROOF_BYTES:]
        if len(challenge) != CHALLENGE_BYTES or not hmac.compare_digest(proof, _proof(self._key, b"listener", said)):
            raise ProtocolError("it has another secret or run id than this job")
        self.instance = challenge[_NONCE_BYTES : _NONCE_BYTES + INSTANCE_BYTES]
        to_listener, to_dialer = _session_keys(self._key, said)
        return _proof(self._key, b"dialer", said), Session(to_listener, to_dialer)


class Acceptor:
    """The handshake of the end that accepts. ``instance``: 16 bytes that tell this server from a later one."""

    def __init__(self, key: bytes, instance: bytes) -> None:
        self._key, self._instance = key, instance
        self._said = b""

    def challenge(self, hello: bytes) -> bytes:
        """The challenge to send. Raises :class:`ProtocolError` for anything but a hello."""
        if len(hello) != HELLO_BYTES or not hello.startswith(_MAGIC):
            raise ProtocolError("the first message is malformed")
        self._said = hello + os.urandom(_NONCE_BYTES) + self._instance
        return self._said[HELLO_BYTES:] + _proof(self._key, b"listener", self._said)

    def session(self, answer: bytes) -> Session:
        """The session. Raises :class:`ProtocolError` for a dialer without the key."""
        if not self._said or not hmac.compare_digest(answer, _proof(self._key, b"dialer", self._said)):
            raise ProtocolError("the client has another secret or run id than this job")
        to_listener, to_dialer = _session_keys(self._key, self._said)
        return Session(to_dialer, to_listener)


def _proof(key: bytes, role: bytes, said: bytes) -> bytes:
    return _digest(key, role + b"\0" + said)


def _session_keys(key: bytes, said: bytes) -> tuple[bytes, bytes]:
    """Of frames to the listener, and of frames to the dialer."""
    return _digest(key, b"frames to the listener\0" + said), _digest(key, b"frames to the dialer\0" + said)


def _digest(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")
