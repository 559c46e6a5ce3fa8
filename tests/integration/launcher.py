"""Launchers as real processes that did not have to import torch and Megatron each by itself.

A job's launcher and its zygote need six seconds of processor time for their imports, which is most of the cost of a
small job. Here one server process imports them once and forks a launcher for each job. From the fork on, a launcher is
what ``python -m megatron.elastic.launch`` is: a process of its own with the given arguments, environment and output,
that can be signalled, stopped and killed. A command that is none of this package's launcher, or whose environment
differs in a variable that libraries read when they are loaded, is started by exec.

``python -m tests.integration.launcher FD MODULE[,MODULE...]`` is the server.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from megatron.elastic.launch.workers.preload import modules_for
from megatron.elastic.launch.workers.processes import MessageSocket, thread_count

__all__ = ["Launcher", "start_launcher"]

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = "megatron.elastic.launch"
OF_LAUNCHER = (
    "megatron.elastic.launch.arguments",
    "megatron.elastic.launch.agent.agent",
    "megatron.elastic.launch.agent.rendezvous",
    "megatron.elastic.launch.workers.zygote_process",
)
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
"""Of the servers."""
READ_LATER = ("MEGATRON_ELASTIC_", "LOST_RANK", "STOPPED_RANK", "OTHER_RANK")
"""Beginnings of the names of variables that may differ from the server's: no import reads them."""


class Start(msgspec.Struct):
    """Fork a launcher. Descriptors: its output, and where its wait status is to be written."""

    arguments: tuple[str, ...]
    environ: Mapping[str, str]


class Started(msgspec.Struct):
    """A launcher runs. Descriptor: its pidfd."""

    pid: int


def start_launcher(
    command: Sequence[str], environ: Mapping[str, str], out: int | IO[str] = subprocess.PIPE
) -> subprocess.Popen[str] | Launcher:
    """Start a job of ``command`` in the repository's root; its output and errors go to ``out``."""
    if list(command[:3]) != [sys.executable, "-m", LAUNCHER] or not _may_share(environ):
        return subprocess.Popen(
            command, cwd=ROOT, env=dict(environ), stdout=out, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
    elastic_script = str(ROOT / "pretrain_gpt.py") in command and "--elastic" in command
    target = str(ROOT / "pretrain_gpt.py") if elastic_script else os.devnull
    return _server((*OF_LAUNCHER, *modules_for("script", target, False, elastic_script))).start(command, environ, out)


def _may_share(environ: Mapping[str, str]) -> bool:
    """Return whether ``environ`` differs from the servers' only in what no import has read."""
    differing = {name for name in environ.keys() | ENVIRON.keys() if environ.get(name) != ENVIRON.get(name)}
    return all(name.startswith((*READ_LATER, "PYTEST_")) for name in differing)


class Launcher:
    """A launcher that a server forked, with the part of :class:`subprocess.Popen` that tests use."""

    def __init__(self, pid: int, pidfd: int, status: socket.socket, stdout: IO[str] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._status = status
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative after a signal. Raises ``subprocess.TimeoutExpired`` after ``timeout`` s."""
        with self._lock:
            if self.returncode is None:
                if not select.select([self._status], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(LAUNCHER, timeout or 0.0)
                status = self._status.recv(64)
                assert status, "the server of launchers has ended"
                self.returncode = os.waitstatus_to_exitcode(int(status))
                self._status.close()
                os.close(self._pidfd)
            return self.returncode

    def poll(self) -> int | None:
        """Return the exit code if it has ended."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Signal it unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class Server:
    """A process that has imported ``modules`` and forks launchers on request. It ends with this one."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, theirs = MessageSocket.pair(Started, Start)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.launcher", str(theirs.fileno()), ",".join(modules)],
            cwd=ROOT,
            env=ENVIRON,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self.close)

    def start(self, command: Sequence[str], environ: Mapping[str, str], out: int | IO[str]) -> Launcher:
        """Fork a launcher of ``command``."""
        mine, theirs = socket.socketpair()
        read, write = os.pipe() if out == subprocess.PIPE else (-1, _descriptor(out))
        with self._lock:
            self._socket.send(Start(tuple(command[3:]), environ), [write, theirs.fileno()])
            answer = self._socket.receive()
        os.close(write)
        theirs.close()
        assert answer is not None, "the server of launchers has ended"
        started, (pidfd,) = answer
        return Launcher(started.pid, pidfd, mine, os.fdopen(read, "r") if read >= 0 else None)

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._process.wait(10)


@functools.cache
def _server(modules: tuple[str, ...]) -> Server:
    return Server(modules)


def _descriptor(out: int | IO[str]) -> int:
    if isinstance(out, int):
        assert out == subprocess.DEVNULL
        return os.open(os.devnull, os.O_WRONLY)
    return os.dup(out.fileno())


# -- the server's process --------------------------------------------------------------------


def serve(requests: MessageSocket[Start], given: Mapping[str, str]) -> None:
    """Fork launchers and report how they ended, until the other end of ``requests`` is closed.

    ``given``: this process's environment before its imports, some of which add to it.
    """
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    launchers = dict[int, tuple[int, int]]()
    """pidfd → (process id, descriptor for its wait status)."""
    while True:
        for fd, _ in poll.poll():
            if fd in launchers:
                poll.unregister(fd)
                pid, status = launchers.pop(fd)
                os.write(status, str(os.waitpid(pid, 0)[1]).encode())
                os.close(status)
                os.close(fd)
                continue
            received = requests.receive()
            if received is None:  # the tests were ended in the middle of a job
                for pidfd in launchers:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return
            request, (out, status) = received
            pid = os.fork()
            if pid == 0:
                for name in given.keys() - request.environ.keys():
                    os.environ.pop(name, None)
                os.environ.update(request.environ)
                _become_launcher(request.arguments, out)
            pidfd = os.pidfd_open(pid)
            launchers[pidfd] = pid, status
            poll.register(pidfd, select.POLLIN)
            os.close(out)
            requests.send(Started(pid), [pidfd])


def _become_launcher(arguments: Sequence[str], out: int) -> NoReturn:
    """Run ``python -m megatron.elastic.launch`` in this fork, with none of the server's descriptors."""
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.closerange(3, max(int(name) for name in os.listdir("/proc/self/fd")) + 1)
    sys.argv = [LAUNCHER, *arguments]
    code = 1
    try:
        runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)
    except SystemExit as end:  # argparse
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Import the modules that the command line names, and serve."""
    given = dict(os.environ)
    for name in sys.argv[2].split(","):
        importlib.import_module(name)
    assert thread_count() == 1, "a fork copies one thread: a module that is imported here starts another"
    gc.collect()
    gc.freeze()
    serve(MessageSocket(socket.socket(fileno=int(sys.argv[1])), Start), given)


if __name__ == "__main__":
    main()
