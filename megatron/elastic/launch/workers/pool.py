"""The workers of one node: their zygote, their sockets, their slots, their ends.

The pool knows processes and bytes, nothing of generations. It reports events, such as a worker's end, by callbacks.

- A worker has *ended* when the kernel has begun to tear it down: the lock that its training thread holds for life is
  released (:class:`Deathwatch`). The pool then sends SIGKILL, so no other thread of it runs on.
- A worker is *gone* when its memory and devices are free: its pidfd says so, or the zygote that has reaped it. On busy
  cores that is a hundred times as long after the death. A worker that held no lock has ended when it is gone.

The status is read from the kernel's process table, or comes from the zygote.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.elastic._process import Deathwatch
from megatron.elastic.control.clock import boot_ns
from megatron.elastic.control.messages import FROM_WORKER, FromWorker, ToWorker
from megatron.elastic.control.requests import Pending
from megatron.elastic.control.slot import Slot
from megatron.elastic.control.wire import FrameReader, ProtocolError, frame
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.messages import say
from megatron.elastic.launch.workers.processes import (
    MessageSocket,
    ending_status,
    exit_status,
    kill_group,
)
from megatron.elastic.launch.workers.zygote_messages import Exited, Fork, Forked, FromZygote, Ready, WorkerSpec
from megatron.elastic.launch.workers.zygote_process import ZygoteProcess

__all__ = ["Pool", "PoolEvents", "Worker"]

_OUTBOX_LIMIT = 1 << 29
_NOT_STARTED = 127 << 8
"""Wait status of a worker that could not be forked: exit code 127, as a shell has it."""


@dataclass
class Worker:
    """One incarnation of a rank on this node."""

    number: int
    rank: int
    local_rank: int
    incarnation: int
    channel: socket.socket
    slot: Slot
    pid: int = 0
    pidfd: int = -1
    elastic: bool = False
    """It has opened its membership."""
    killed_for: str | None = None
    """Why this agent killed it."""
    sent_frozen: int = 0
    sent_decided: int = 0
    sent_pending: Pending = field(default_factory=Pending)
    sent_begun: bool = False
    """It was told that all members have begun."""
    sent_members: int = 0
    """Generation whose members it was told while it waited."""
    reader: FrameReader[FromWorker] = field(default_factory=lambda: FrameReader(FROM_WORKER))
    outbox: bytearray = field(default_factory=bytearray)
    ended: bool = False
    """Its owner knows of its end; nothing it may still have said counts."""


@dataclass(frozen=True)
class PoolEvents:
    """Callbacks of the pool to its owner."""

    said: Callable[[Worker, FromWorker], None]
    ended: Callable[[Worker, int], None]
    """With the wait status; once for each worker."""
    zygote_lost: Callable[[bool], None]
    """With whether it had finished preloading."""


class Pool:
    """Starts and watches workers through one zygote."""

    def __init__(self, loop: Loop, preload: tuple[str, ...], events: PoolEvents, zygote: ZygoteProcess) -> None:
        self._loop = loop
        self._preload = preload
        self._events = events
        self.workers: dict[int, Worker] = {}
        self._socket: MessageSocket[FromZygote] | None = None
        self._closing = False
        self._lease_until = 0
        self._deathwatch = Deathwatch()
        loop.watch(self._deathwatch.fileno(), self._dying)
        self._take_zygote(zygote)

    # -- the zygote ---------------------------------------------------------

    def replace_zygote(self) -> None:
        """Start another one after a loss. It begins preloading; this returns at once."""
        self._take_zygote(ZygoteProcess.execute(self._preload))

    def _take_zygote(self, zygote: ZygoteProcess) -> None:
        self.zygote = zygote
        self._ready = False
        self._socket = zygote.socket
        self._loop.watch(zygote.socket.fileno(), self._from_zygote)

    def _from_zygote(self, _: int) -> None:
        assert self._socket is not None
        received = self._socket.receive()
        if received is None:
            self._zygote_gone()
            return
        message, fds = received
        match message:
            case Forked(number, pid):
                self._born(self.workers[number], pid, fds[0])
            case Exited(number, status) if number in self.workers:
                self._end(self.workers[number], status)
            case Ready(notes):
                self._ready = True
                for note in notes:
                    say(note)

    def _zygote_gone(self) -> None:
        assert self._socket is not None
        self._loop.forget(self._socket.fileno())
        self._socket.close()
        self._socket = None
        for worker in list(self.workers.values()):
            # The kernel kills them with it; no process will reap them and relay their status.
            if worker.pid:
                kill_group(worker.pid)
            self._end(worker, 9)
        self.zygote.wait()
        if not self._closing:
            self._events.zygote_lost(self._ready)

    def reap_orphans(self) -> None:
        """As the first process of a container the agent inherits orphans, and must reap them."""
        while os.getpid() == 1:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid == self.zygote.pid:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)

    def continue_zygote(self) -> None:
        """A stopped zygote could not start or reap workers; it has done nothing to be killed for, so it goes on."""
        self.zygote.resume()

    # -- workers --------------------------------------------------------------

    def fork(self, spec: WorkerSpec, worker: Worker, slot_fd: int, theirs: socket.socket, out: int, err: int) -> None:
        """Have the zygote start ``worker`` as ``spec``. Takes over the four descriptors."""
        self.workers[worker.number] = worker
        worker.slot.extend_lease(self._lease_until)
        try:
            if self._socket is None:
                raise ConnectionError("no zygote")
            self._socket.send(Fork(spec), [theirs.fileno(), slot_fd, out, err])
        except OSError:
            # No zygote, or more arguments than one message holds: this worker is not going to be.
            self._loop.post(lambda: self._end(worker, _NOT_STARTED))
        finally:
            theirs.close()
            for fd in (slot_fd, out, err):
                os.close(fd)

    def _born(self, worker: Worker, pid: int, pidfd: int) -> None:
        worker.pid, worker.pidfd = pid, pidfd
        self._loop.watch(pidfd, lambda _: self._died(worker))
        self._loop.watch(worker.channel.fileno(), lambda mask: self._traffic(worker, mask))
        if worker.killed_for is not None:
            kill_group(pid)

    def extend_leases(self, until_ns: int) -> None:
        """Allow the workers, and those to come, to act until ``until_ns`` (boot-time clock)."""
        self._lease_until = until_ns
        for worker in self.workers.values():
            worker.slot.extend_lease(until_ns)

    def lease_left(self) -> float:
        """Seconds for which a worker that starts now may act; infinite where no lease was ever given."""
        return (self._lease_until - boot_ns()) / 1e9 if self._lease_until else math.inf

    def keeps(self, rank: int) -> bool:
        """True while a process of ``rank``, of any incarnation, is not gone yet."""
        return any(worker.rank == rank for worker in self.workers.values())

    def watch_lock(self, worker: Worker) -> None:
        """The worker holds its slot's lock from here on: watch that for its death."""
        self._deathwatch.watch(worker.number, worker.slot.lock())

    def _dying(self, _: int) -> None:
        for number in self._deathwatch.take():
            worker = self.workers.get(number)
            if worker is None or worker.ended:
                continue
            try:
                # If only its training thread ended, the other threads must end before the end is reported.
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
                status = ending_status(worker.pid)
                signal.pidfd_send_signal(worker.pidfd, 0)  # still not reaped: the status was its own
            except ProcessLookupError:
                continue  # it is gone already, and the pidfd or the zygote says so
            if status is not None:
                self._report(worker, status)

    def _died(self, worker: Worker) -> None:
        status = exit_status(worker.pid)
        self._loop.forget(worker.pidfd)
        if status is not None:
            self._end(worker, status)
        # Otherwise the zygote has reaped it already, and its message is on the way.

    def _end(self, worker: Worker, status: int) -> None:
        if worker.number not in self.workers:
            return
        if not worker.ended:
            self._report(worker, status)
        del self.workers[worker.number]
        if worker.pid:
            self._loop.forget(worker.pidfd)
            os.close(worker.pidfd)
        worker.channel.close()
        self._deathwatch.forget(worker.number)
        worker.slot.close()

    def _report(self, worker: Worker, status: int) -> None:
        if worker.pid:
            self._read(worker)
            self._loop.forget(worker.channel.fileno())
        worker.ended = True
        self._events.ended(worker, status)

    def kill(self, worker: Worker, why: str) -> None:
        """SIGKILL the worker and its process group; works on stopped processes."""
        worker.killed_for = worker.killed_for or why
        if worker.pid:
            kill_group(worker.pid)

    # -- bytes ----------------------------------------------------------------

    def _traffic(self, worker: Worker, mask: int) -> None:
        if mask & select.EPOLLOUT:
            self._flush(worker)
        if mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and not self._read(worker):
            # It closed its end (exec, exit): its end as a process is the pidfd's business.
            self._loop.forget(worker.channel.fileno())

    def _read(self, worker: Worker) -> bool:
        """Everything there is to read; False at the end of the stream."""
        while True:
            try:
                data = worker.channel.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            try:
                for message in worker.reader.feed(data):
                    self._events.said(worker, message)
            except ProtocolError as error:
                self.kill(worker, f"malformed message on its control socket ({error})")
                return False

    def tell(self, worker: Worker, message: ToWorker) -> None:
        """Send without ever waiting for the worker: a stopped one does not read."""
        if worker.ended:
            return
        worker.outbox += frame(message)
        if len(worker.outbox) > _OUTBOX_LIMIT:
            self.kill(worker, "does not read its control socket")
        self._flush(worker)

    def _flush(self, worker: Worker) -> None:
        try:
            while worker.outbox:
                sent = worker.channel.send(worker.outbox[: 1 << 20], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del worker.outbox[:sent]
        except BlockingIOError:
            pass
        except OSError:
            worker.outbox.clear()
        if worker.pid:
            self._loop.adjust(worker.channel.fileno(), writing=bool(worker.outbox))

    # -- the end ----------------------------------------------------------------

    def close(self) -> None:
        """Kill all workers and wait for the zygote; nothing is left afterwards."""
        self._closing = True
        for worker in list(self.workers.values()):
            self.kill(worker, "the job is over")
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if not self.zygote.wait(5.0):
            self.zygote.kill()
            self.zygote.wait()
        for number in self.workers:
            self._deathwatch.forget(number)
        self.workers.clear()
