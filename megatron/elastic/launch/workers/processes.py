"""Parts of Linux that a launcher uses: death signals, process descriptors, messages that carry descriptors.

Death is chained agent → zygote → worker → worker's children by
``PR_SET_PDEATHSIG``, which covers SIGKILL of any of them. The signal is lost
when the parent died before it was asked for, so every link checks its parent
afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from megatron.elastic.control.wire import ProtocolError

__all__ = [
    "MessageSocket",
    "accelerator_is_open",
    "describe_status",
    "die_with_parent",
    "ending_status",
    "exit_status",
    "kill_group",
    "name_process",
    "note_process",
    "process_state",
    "sweep_scratch",
    "sweep_scratches",
    "sweep_segments",
    "thread_count",
]

T = TypeVar("T")

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_MAX_MESSAGE = 1 << 17
_MAX_FDS = 8
_DYING_SECONDS = 1.0
"""Time for a killed process to close what it has open."""


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Have the kernel send ``sig`` when the thread that forked this process ends; end now if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def name_process(name: str) -> None:
    """Show this process as ``name`` (15 bytes of it) in ``top`` and ``ps -o comm``; forks share a command line."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def chain_children() -> None:
    """Every process forked from here on by this one's main thread dies with it (data-loader workers).

    A child forked by another thread would get the signal when that *thread* ends,
    so those are left to the process group, which the launcher kills.
    """
    parent = [0]

    def before() -> None:
        parent[0] = os.getpid() if threading.current_thread() is threading.main_thread() else 0

    def after_in_child() -> None:
        if parent[0]:
            die_with_parent(parent[0])

    os.register_at_fork(before=before, after_in_child=after_in_child)


def kill_group(pid: int, sig: int = signal.SIGKILL) -> None:
    """Signal the process group led by ``pid``, or the process alone where it leads none. Silent when gone."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, sig)
            return
        except (ProcessLookupError, PermissionError):
            continue


def process_state(pid: int) -> str | None:
    """The kernel's state letter (R, S, D, T, Z, …), or None when there is no such process."""
    fields = _stat_fields(pid)
    return fields[0] if fields else None


def exit_status(pid: int) -> int | None:
    """Wait status of a process that has ended but is not reaped yet; None when unknown."""
    fields = _stat_fields(pid)
    if not fields or fields[0] not in ("Z", "X"):
        return None
    return int(fields[49])


def ending_status(pid: int) -> int | None:
    """Wait status of a process whose end has begun, reaped or not; means nothing for one that goes on."""
    fields = _stat_fields(pid)
    return int(fields[49]) if fields else None


def thread_count() -> int:
    """Threads of this process, native ones included."""
    return len(os.listdir("/proc/self/task"))


def accelerator_is_open() -> bool:
    """True if this process has started a CUDA or Ascend driver (of newer drivers NVML opens the same devices)."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(("/dev/nvidia-uvm", "/dev/davinci")):
            return True
    return False


def describe_status(status: int) -> str:
    """'signal SIGKILL' or 'exit code 1', from a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"signal {signal.Signals(number).name}"
        except ValueError:
            return f"signal {number}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def sweep_segments(prefix: str) -> None:
    """Remove shared-memory segments and named semaphores whose name begins with ``prefix``."""
    for kind in ("", "sem."):
        _unlink_shared(kind + prefix)


def note_process(scratch: str) -> None:
    """Have this process remembered in its worker's scratch folder, for :func:`sweep_scratch`."""
    with contextlib.suppress(OSError):
        os.close(os.open(os.path.join(scratch, str(os.getpid())), os.O_CREAT | os.O_WRONLY, 0o600))


def sweep_scratch(scratch: str, leader: int = 0) -> None:
    """Remove a worker's scratch folder, and the shared memory over which processes named in it were killed.

    torch makes segments ``torch_<pid>_…`` and takes their names away at once; killed in between, a process leaves
    one. Its number may be that of another process by now, or of one in another PID namespace that shares
    ``/dev/shm``: what any process has open stays. ``leader``: the worker, if processes of its group may still be about
    to end.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(scratch):
            if name.isdigit() and _ended(int(name), leader):
                _unlink_unused(f"torch_{name}_")
    shutil.rmtree(scratch, ignore_errors=True)


def sweep_scratches(folder: str) -> None:
    """Remove what is left of the scratch folders of a node's workers, which have ended, and ``folder`` itself."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            sweep_scratch(os.path.join(folder, name))
        os.rmdir(folder)


def _ended(pid: int, leader: int) -> bool:
    try:
        return os.getpgid(pid) == leader  # killed with its group; if not of it, its number was given anew
    except ProcessLookupError:
        return True


def _unlink_shared(prefix: str) -> None:
    for path in glob.glob(f"/dev/shm/{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _unlink_unused(prefix: str) -> None:
    for path in glob.glob(f"/dev/shm/{glob.escape(prefix)}*"):
        end = time.monotonic() + _DYING_SECONDS
        with contextlib.suppress(OSError):
            while _in_use(path) and time.monotonic() < end:
                time.sleep(0.01)
            if not _in_use(path):
                os.unlink(path)


def _in_use(path: str) -> bool:
    """True if any process of the machine has ``path`` open or mapped; also where the kernel does not tell."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Granted only if no other process has the file open, in any namespace (man 2 fcntl).
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    finally:
        os.close(fd)  # and with it the lease
    return False


def _stat_fields(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    # The command name is in parentheses and may hold anything; the rest follows the last one.
    return text.rpartition(")")[2].split()


class MessageSocket(Generic[T]):
    """Messages with file descriptors over a SOCK_SEQPACKET pair: one message, one datagram (MessagePack).

    ``received``: the type of the messages that this end receives.
    """

    def __init__(self, sock: socket.socket, received: Any) -> None:
        self.socket = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(received)

    @staticmethod
    def pair(left: Any, right: Any) -> tuple[MessageSocket[Any], MessageSocket[Any]]:
        """Return two connected ends, of which one receives messages of type ``left``, the other of ``right``."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return MessageSocket(one, left), MessageSocket(other, right)

    def fileno(self) -> int:
        """For pollers."""
        return self.socket.fileno()

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send; the receiver gets duplicates of ``fds``. Raises ``OSError``, also for a message that is too long."""
        socket.send_fds(self.socket, [msgspec.msgpack.encode(message)], fds)

    def receive(self) -> tuple[T, list[int]] | None:
        """The next message and its descriptors; None when the other end is gone. Raises :class:`ProtocolError`."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, _MAX_MESSAGE, _MAX_FDS)
        except ConnectionError:
            return None
        if not data:
            return None
        try:
            return self._decoder.decode(data), fds
        except msgspec.DecodeError as error:
            raise ProtocolError(f"not a message of this socket: {error}") from None

    def close(self) -> None:
        """Close this end."""
        self.socket.close()
