"""The worker's end of the control plane.

One thread receives messages (:mod:`megatron.elastic.control.protocol`) on the socket that this worker inherited from
its node's agent. The thread also fences: if the agent is gone, or its lease (a word in shared memory) has run out,
this process and its children end at once. They are gone before another node may count them as lost.

The messages of a worker are ordered by the socket. Its activity is published in shared memory
(:mod:`megatron.elastic.control.slot`), where the agent can read it even if the worker is stopped or dead.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping

from megatron.elastic.control import env
from megatron.elastic.control.membership import Activity, Committed, RunFigures
from megatron.elastic.control.messages import TO_WORKER, DrainSignal, FromWorker
from megatron.elastic.control.protocol import WorkerProtocol
from megatron.elastic.control.slot import Slot
from megatron.elastic.control.wire import FrameReader, ProtocolError, frame
from megatron.elastic.platform.threads import OS_THREADS, Threads

__all__ = ["NotUnderLauncher", "WorkerMembership"]

_LOOK_SECONDS = 0.25
"""Time between two checks of lease and sampler by the control thread while no message arrives."""


class NotUnderLauncher(RuntimeError):
    """This process was not started by the elastic launcher."""

    def __init__(self, missing: str) -> None:
        super().__init__(
            "--elastic needs the elastic launcher: python -m megatron.elastic.launch [torchrun arguments] "
            f"script.py [script arguments] ({missing})"
        )


class WorkerMembership(WorkerProtocol):
    """The protocol over the agent's socket, and what this worker does in shared memory."""

    def __init__(
        self,
        rank: int,
        incarnation: int,
        slots: int,
        channel: socket.socket,
        slot: Slot,
        host: str,
        newcomer: bool = False,
        domain: str = "",
        threads: Threads = OS_THREADS,
    ) -> None:
        super().__init__(rank, incarnation, slots, host, newcomer, domain, threads)
        self._channel = channel
        self._slot = slot
        self._reader = FrameReader(TO_WORKER)
        self._sending = threading.Lock()
        self._publishing = threading.Lock()
        self._drain_asked = False
        self._sampler: Callable[[], Activity | None] | None = None
        self._activity = Activity(-1, "launch")
        self._sampled: Activity | None = None
        self._shows_sample = False
        """The sampled activity is the published one."""
        self._closed = threading.Event()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, threads: Threads = OS_THREADS) -> WorkerMembership:
        """The membership of this process. Raises :class:`NotUnderLauncher` outside the elastic launcher.

        ``threads``: the control thread is one of them. It asks for events of the rank's device.
        """
        names = ("RANK", env.SLOTS, env.INCARNATION, env.CONTROL_FD, env.SLOT_FD, env.HOST, env.DOMAIN)
        missing = [name for name in names if name not in environ]
        if missing:
            raise NotUnderLauncher(f"{missing[0]} is not set")
        try:
            channel = socket.socket(fileno=os.dup(int(environ[env.CONTROL_FD])))
            slot = Slot(int(environ[env.SLOT_FD]))
        except (OSError, ValueError) as error:
            raise NotUnderLauncher(f"the launcher's socket was not inherited: {error}") from None
        rank, incarnation, slots = int(environ["RANK"]), int(environ[env.INCARNATION]), int(environ[env.SLOTS])
        newcomer = environ.get(env.NEWCOMER) == "1"
        return cls(rank, incarnation, slots, channel, slot, environ[env.HOST], newcomer, environ[env.DOMAIN], threads)

    # -- Membership -----------------------------------------------------------

    def publish(self, activity: Activity) -> None:
        """See :meth:`Membership.publish`."""
        with self._publishing:
            self._activity, self._shows_sample = activity, False
            self._slot.publish(activity)

    def committed(self, step: Committed) -> None:
        """See :meth:`Membership.committed`."""
        self._slot.commit(step)

    def figures(self) -> RunFigures | None:
        """See :meth:`Membership.figures`."""
        return self._slot.figures()

    def drain(self) -> None:
        """See :meth:`Membership.drain`. Only leaves word for the control thread: a signal handler may call it."""
        self._drain_asked = True

    def finish(self, code: int) -> None:
        """See :meth:`Membership.finish`."""
        self._slot.finish(code)
        super().finish(code)

    # -- beyond the protocol ---------------------------------------------------

    def sample(self, sampler: Callable[[], Activity | None]) -> None:
        """Have the control thread publish ``sampler()`` a few times a second, when it returns something new.

        For waits inside native code, during which no other thread could publish the ranks
        that this process waits for; None when it waits for none, which shows what was
        published last again. A step below 0 stands for the one published last. Must
        be quick and must not take locks of the caller.
        """
        self._sampler = sampler

    def close(self) -> None:
        """Stop listening, and with it fencing: for a process that outlives its membership. Idempotent."""
        self._closed.set()
        self._channel.shutdown(socket.SHUT_RD)

    # -- the control thread ------------------------------------------------------

    def _listen(self) -> None:
        self._slot.hold()
        self._threads.start("elastic-control", self._serve)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while not self._closed.is_set():
            arrived = poll.poll(_LOOK_SECONDS * 1000)
            if self._closed.is_set():
                return
            self.fence()
            if self._drain_asked:
                self._drain_asked = False
                self._send(DrainSignal())
            if arrived:
                self._receive()
            elif self._sampler is not None:
                self._sample(self._sampler())

    def _sample(self, sampled: Activity | None) -> None:
        with self._publishing:
            published = self._activity
            if sampled is not None and sampled.step < 0:
                sampled = Activity(published.step, sampled.phase, sampled.waiting_for)
            if sampled != self._sampled:
                self._sampled = sampled
                self._slot.publish(published if sampled is None else sampled)
                self._shows_sample = sampled is not None
            if self._shows_sample:
                self._slot.watched()

    def _receive(self) -> None:
        try:
            data = self._channel.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            _end_with_children("the agent of this node is gone")
        try:
            for message in self._reader.feed(data):
                self.handle(message)
        except ProtocolError as error:
            _end_with_children(f"a malformed message from the agent: {error}")

    def fence(self) -> None:
        """See :meth:`Membership.fence`. Any thread."""
        if self._slot.lease_over():
            _end_with_children(
                "the lease of this node ran out (its agent is stopped, or cannot reach the "
                "other nodes): this process ends, the job goes on without it"
            )

    def _end(self, code: int, why: str) -> None:
        sys.stdout.flush()
        print(f"rank {self.rank}: {why}", file=sys.stderr, flush=True)
        os._exit(code)

    def _send(self, message: FromWorker) -> None:
        data = frame(message)
        with self._sending:
            try:
                self._channel.sendall(data)
            except OSError:
                _end_with_children("the agent of this node is gone")


def _end_with_children(why: str) -> None:
    """End this process and everything it started (its process group) at once; does not return."""
    try:
        os.write(2, f"rank {os.environ.get('RANK', '?')}: {why}; this worker ends\n".encode())
    finally:
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(4)
