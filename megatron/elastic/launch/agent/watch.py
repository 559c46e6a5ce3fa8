"""One agent's view of its workers: which are stopped, which make progress, how long phases take.

Looks at the kernel's process states and at the workers' shared-memory slots,
never sends a message. It kills no process itself; it reports a stopped process to
its owner and hands out the table of idle times from which the wait-for graph is
made (:mod:`megatron.elastic.control.suspicion`).

When the agent itself was kept from running, nothing seen before counts: a
suspended machine or job must not lose ranks when it wakes up.

A wait in native code is told by a thread of the worker that looks at it again and again. Native code that holds the
interpreter's lock, such as that which builds indices of data for minutes, keeps that thread from running: the wait
told last may be over, and is not believed any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron.elastic.control.membership import Activity
from megatron.elastic.control.slot import Glimpse
from megatron.elastic.control.suspicion import Idle
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.workers.pool import Worker
from megatron.elastic.launch.workers.processes import process_state

__all__ = ["Watch"]

_NATIVE = "native code"
"""Phase of a worker whose wait is not believed. No such phase is seen to end, so it may last the longest."""


@dataclass
class _Progress:
    progress: int
    activity: Activity
    changed: float
    stopped_since: float | None = None


class Watch:
    """Call :meth:`look` every ``timing.look`` seconds."""

    def __init__(self, timing: Timing, stopped: Callable[[Worker], None]) -> None:
        self._timing = timing
        self._stopped = stopped
        self._seen: dict[int, _Progress] = {}
        """By worker number."""
        self._longest: dict[str, float] = {}
        """Longest duration of each phase, seconds, among all workers of this node."""
        self._last_look = time.monotonic()

    def look(self, workers: Iterable[Worker]) -> None:
        """Note what changed since the last look, with ``workers`` those that can be lost without ending the job."""
        now = time.monotonic()
        if now - self._last_look > max(self._timing.stopped, 4 * self._timing.look):
            self._start_over(now)
        self._last_look = now
        current = {worker.number: worker for worker in workers if worker.pid}
        for number in self._seen.keys() - current.keys():
            del self._seen[number]
        for worker in current.values():
            self._look_at(worker, now)

    def idle(self, worker: Worker) -> Idle | None:
        """The activity of ``worker`` and its duration; None before it was first seen."""
        seen = self._seen.get(worker.number)
        if seen is None:
            return None
        activity, seconds = seen.activity, time.monotonic() - seen.changed
        return Idle(activity.step, activity.phase, activity.waiting_for, seconds, self._limit(activity.phase))

    def _limit(self, phase: str) -> float:
        longest = self._longest.get(phase)
        if longest is None:
            return self._timing.hang_unknown
        return max(self._timing.hang, self._timing.hang_factor * longest)

    def _look_at(self, worker: Worker, now: float) -> None:
        glimpse = worker.slot.look()
        activity = self._believed(glimpse)
        seen = self._seen.get(worker.number)
        if seen is None:
            self._seen[worker.number] = seen = _Progress(glimpse.progress, activity, now)
        elif (glimpse.progress, activity) != (seen.progress, seen.activity):
            seen.progress, seen.activity, seen.changed = glimpse.progress, activity, now
        phase, usual = glimpse.activity.phase, glimpse.usual_ns / 1e9
        # A time beyond the limit was a hang: it must not raise the limit.
        if 0.0 < usual <= self._limit(phase):
            self._longest[phase] = max(self._longest.get(phase, 0.0), usual)
        # 'T' is a stop signal; 't', a debugger at work, is left alone.
        if process_state(worker.pid) != "T":
            seen.stopped_since = None
        elif seen.stopped_since is None:
            seen.stopped_since = now
        elif now - seen.stopped_since >= self._timing.stopped:
            self._stopped(worker)

    def _believed(self, glimpse: Glimpse) -> Activity:
        """Return the activity that ``glimpse`` tells, without a wait that the worker has not seen for too long."""
        unseen_ns = time.monotonic_ns() - glimpse.watched_ns
        if glimpse.watched_ns and unseen_ns > self._timing.unseen * 1e9:
            return Activity(glimpse.activity.step, _NATIVE)
        return glimpse.activity

    def _start_over(self, now: float) -> None:
        for seen in self._seen.values():
            seen.changed, seen.stopped_since = now, None
