"""The zygote: a process that has imported torch and forks workers from itself.

Importing torch and Megatron takes seconds; a fork of a process that already has
takes milliseconds. So each agent keeps one such parent. It holds to three rules:

- It computes nothing and starts no thread: a fork copies only the forking thread,
  and a lock held by another would stay locked for ever in the child. If a preloaded
  module starts one all the same, the zygote says which and starts workers by
  fork + exec, without the preloaded modules.
- It is the workers' parent: it reaps them and relays how they ended. The agent
  sees a death by itself through the pidfd that the zygote hands over.
- When its agent goes, it takes every worker's process group with it, and what they left in memory and on disk.

``python -m megatron.elastic.launch.workers.zygote FD AGENT_PID MODULE[,MODULE…]``
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

from megatron.elastic.control import env
from megatron.elastic.launch.workers.device_count import counted_by_a_child
from megatron.elastic.launch.workers.processes import (
    MessageSocket,
    accelerator_is_open,
    die_with_parent,
    kill_group,
    name_process,
    sweep_scratch,
    sweep_scratches,
    sweep_segments,
    thread_count,
)
from megatron.elastic.launch.workers.worker import OF_A_JOB, Start, become
from megatron.elastic.launch.workers.zygote_messages import Exited, Fork, Forked, FromZygote, Ready

__all__ = ["Zygote", "main", "serve_agent"]


class Zygote:
    """Serves fork requests of one agent until that agent is gone."""

    def __init__(self, agent: MessageSocket[Fork]) -> None:
        self._agent = agent
        self._workers: dict[int, tuple[int, int, str]] = {}
        """pidfd → (worker number, pid, scratch folder)."""
        self._may_fork = True
        self._segments = self._scratch = ""

    def preload(self, modules: Sequence[str]) -> None:
        """Import ``modules`` and tell the agent what came of it."""
        notes: list[str] = []
        if modules:
            with counted_by_a_child():
                self._import(modules, notes)
        if accelerator_is_open():
            notes.append("a preloaded module has started the accelerator's driver, which does not survive a fork")
        if thread_count() > 1 or accelerator_is_open():
            self._may_fork = False
            notes.append("workers are started by exec instead of fork, which takes seconds")
        # Keeps the collector from writing to (and so copying) pages shared with the workers.
        gc.collect()
        gc.freeze()
        self._tell(Ready(tuple(notes)))

    def _import(self, modules: Sequence[str], notes: list[str]) -> None:
        for name in modules:
            before = thread_count()
            try:
                importlib.import_module(name)
            except Exception as error:
                if hasattr(error, "texts"):  # bad input, on which every rank ends with one line of its own
                    break
                notes.append(f"could not preload {name}: {type(error).__name__}: {error}")
            if thread_count() > before:
                notes.append(f"preloading {name} started {thread_count() - before} thread(s)")

    def serve(self) -> Start | None:
        """Fork on request and reap. Returns its start in a forked worker, None in the zygote once the agent is gone."""
        poll = select.poll()
        poll.register(self._agent, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd in self._workers:
                    poll.unregister(fd)
                    self._reap(fd)
                    continue
                received = self._agent.receive()
                if received is None:
                    self._end()
                    return None
                request, fds = received
                start = Start(request.spec, list(fds), os.getpid(), not self._may_fork)
                forked = self._fork(start)
                if forked is None:
                    return start
                poll.register(forked, select.POLLIN)

    def _fork(self, start: Start) -> int | None:
        spec = start.spec
        pid = os.fork()
        if pid == 0:
            self._agent.close()
            for fd in self._workers:
                os.close(fd)
            return None
        pidfd = os.pidfd_open(pid)
        self._segments, scratch = spec.variable(env.SEGMENT_PREFIX), spec.variable(env.SCRATCH)
        self._scratch = os.path.dirname(scratch)
        self._workers[pidfd] = (spec.number, pid, scratch)
        start.close_fds()
        self._tell(Forked(spec.number, pid), [pidfd])
        return pidfd

    def _reap(self, pidfd: int) -> None:
        number, pid, scratch = self._workers.pop(pidfd)
        # The rest of the worker's process group (data-loader workers) is killed too. This comes before the
        # reaping, while no other process can have its process id.
        kill_group(pid)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        self._tell(Exited(number, status))
        sweep_scratch(scratch, pid)

    def _tell(self, message: FromZygote, fds: Sequence[int] = ()) -> None:
        try:
            self._agent.send(message, fds)
        except OSError:
            self._end()
            os._exit(1)

    def _end(self) -> None:
        for _, pid, _ in self._workers.values():
            kill_group(pid)
        for _, pid, scratch in self._workers.values():
            os.waitpid(pid, 0)
            sweep_scratch(scratch, pid)
        if self._segments:
            sweep_segments(self._segments)
        sweep_scratches(self._scratch)  # also of workers of an earlier zygote, or reaped just now


def serve_agent(agent: MessageSocket[Fork], agent_pid: int, modules: Sequence[str]) -> int:
    """Body of the zygote process; return its exit code. A forked worker goes on as the user's program instead."""
    name_process("elastic-zygote")
    for number in OF_A_JOB:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_A_JOB)
    # The end of the agent is the end of its socket, and has to be passed on to all that workers started. What
    # could keep the zygote from seeing it is being stopped: hence this signal.
    die_with_parent(agent_pid, signal.SIGCONT)
    zygote = Zygote(agent)
    zygote.preload(modules)
    start = zygote.serve()
    if start is None:
        return 0
    del zygote
    become(start)


def main(argv: list[str]) -> int:
    """Serve the agent that the command line names: ``FD AGENT_PID MODULE[,MODULE…]``."""
    agent: MessageSocket[Fork] = MessageSocket(socket.socket(fileno=int(argv[1])), Fork)
    return serve_agent(agent, int(argv[2]), [name for name in argv[3].split(",") if name])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
