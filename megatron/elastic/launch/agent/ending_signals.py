"""Signals that end a job whose workers run. The first one drains an elastic job, a second one ends it at once.

A drain that takes too long ends the job as well, so that the launcher is gone before a scheduler kills it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from megatron.elastic.control.events import Event, JobEnded, Wanted
from megatron.elastic.control.exits import ExitCode
from megatron.elastic.control.membership import WAITING_FOR_RANKS
from megatron.elastic.control.requests import Drain
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.node_leases import Table
from megatron.elastic.launch.arguments import JobSpec
from megatron.elastic.launch.messages import say
from megatron.elastic.launch.workers.pool import Pool
from megatron.elastic.launch.workers.processes import kill_group

__all__ = ["EndingSignals"]

_ANSWER_SECONDS = 1.0
"""Time for the journal to take the end that a second signal asks for. Its store may not answer any more."""


class EndingSignals:
    """Handles the signals of ``job`` from :meth:`listen` on.

    ``table``: returns the activities of this node's workers. ``stop``: ends this agent with a status.
    """

    def __init__(
        self,
        job: JobSpec,
        loop: Loop,
        pool: Pool,
        append: Callable[[Event], None],
        table: Callable[[], Table],
        stop: Callable[[int], None],
    ) -> None:
        self._job, self._loop, self._pool = job, loop, pool
        self._append, self._table, self._stop = append, table, stop
        self._count = 0

    def listen(self) -> None:
        """Handle the signals in the loop from now on."""
        for name in self._job.signals:
            self._loop.on_signal(signal.Signals[name], self._signalled)

    def _signalled(self, number: int) -> None:
        self._count += 1
        name = signal.Signals(number).name
        workers = list(self._pool.workers.values())
        if self._count > 1:
            self._append(JobEnded(128 + number, f"second {name}: the job ends at once, without a checkpoint"))
            self._loop.after(_ANSWER_SECONDS, lambda: self._stop(128 + number))
        elif self._job.elastic or any(worker.elastic for worker in workers):
            say(f"{name}: the job saves a checkpoint at the next step boundary and ends; a second one ends it at once")
            self._append(Wanted(Drain()))
            self._loop.after(self._job.drain_timeout, lambda: self._append(self._late(number)))
        else:
            for worker in workers:
                if worker.pid:
                    kill_group(worker.pid, number)
            end = JobEnded(128 + number, f"{name}: the job ends")
            self._loop.after(self._job.shutdown_timeout, lambda: self._append(end))

    def _late(self, number: int) -> JobEnded:
        """Return the end of a job that did not drain in time. Before its first step there was nothing to save."""
        late = f"{signal.Signals(number).name}: not drained within {self._job.drain_timeout:.0f} s"
        doing = [idle for _, idle in self._table().values()]
        missing = sorted({rank for idle in doing if idle.phase == WAITING_FOR_RANKS for rank in idle.waiting_for})
        if missing:
            late += f", in which ranks {missing} did not come back, without which nothing can be saved"
        if any(idle.step >= 0 for idle in doing):
            return JobEnded(128 + number, f"{late}: the job ends")
        return JobEnded(ExitCode.DRAINED, f"{late}, before the first step: the job ends, there is nothing to save")
