"""The agent's handle of its zygote: how that process is started, signalled and waited for.

An agent has imported torch before it starts its zygote. A zygote forked from it need not
import torch again, which saves seconds of processor time at the start of a job. A fork
copies the calling thread alone, so it is right only before the agent has started a thread
or opened an accelerator; a zygote that replaces a lost one is started by exec.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from megatron.elastic.launch.workers.processes import (
    MessageSocket,
    accelerator_is_open,
    process_state,
    thread_count,
)
from megatron.elastic.launch.workers.worker import OF_A_JOB
from megatron.elastic.launch.workers.zygote import serve_agent
from megatron.elastic.launch.workers.zygote_messages import Fork, FromZygote

__all__ = ["ZygoteProcess", "may_fork"]

_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Asking whether there is a GPU must not start the driver, which does not survive a fork."""


def may_fork() -> bool:
    """Return whether a copy of this process can serve as a zygote: one thread, no accelerator opened."""
    return thread_count() == 1 and not accelerator_is_open()


@dataclass
class ZygoteProcess:
    """A zygote of this process, its child. ``socket``: requests and reports; closing it ends the zygote."""

    pid: int
    socket: MessageSocket[FromZygote]
    _pidfd: int = field(init=False)
    _ended: bool = False

    def __post_init__(self) -> None:
        self._pidfd = os.pidfd_open(self.pid)

    @classmethod
    def fork(cls, preload: Sequence[str]) -> ZygoteProcess:
        """Start one that shares what this process has imported. Requires :func:`may_fork`."""
        mine, theirs = MessageSocket.pair(FromZygote, Fork)
        agent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with _signals_blocked():
            pid = os.fork()
            if pid == 0:
                mine.close()
                _become_zygote(theirs, agent, preload)
        theirs.close()
        return cls(pid, mine)

    @classmethod
    def execute(cls, preload: Sequence[str]) -> ZygoteProcess:
        """Start one in a new interpreter."""
        mine, theirs = MessageSocket.pair(FromZygote, Fork)
        program = [sys.executable, "-m", "megatron.elastic.launch.workers.zygote"]
        words = [str(theirs.fileno()), str(os.getpid()), ",".join(preload)]
        null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        inherit = (os.POSIX_SPAWN_DUP2, theirs.fileno(), theirs.fileno())  # onto itself: it stays open there
        environ = {**_DRIVER, **os.environ}
        with _signals_blocked():
            pid = os.posix_spawn(sys.executable, [*program, *words], environ, file_actions=[null, inherit], setsid=True)
        theirs.close()
        return cls(pid, mine)

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether it has ended, after at most ``seconds``; reap it then."""
        if self._ended:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if seconds is None else seconds * 1000.0):
            return False
        os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        self._ended = True
        return True

    def kill(self) -> None:
        """End it at once, and with it its workers."""
        if not self._ended:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def resume(self) -> None:
        """Let it go on if something stopped it."""
        if not self._ended and process_state(self.pid) == "T":
            signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Let a process that is started within the block get no signal that it will ignore, until it does.

    A scheduler may signal all processes of a job at any time, and the zygote must not end before its agent.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_JOB)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_zygote(agent: MessageSocket[Fork], agent_pid: int, preload: Sequence[str]) -> NoReturn:
    """Body of the fork: nothing of the agent's own program may run in it, however it ends."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        for name, value in _DRIVER.items():
            os.environ.setdefault(name, value)
        os._exit(serve_agent(agent, agent_pid, preload))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
