"""The clocks that processes compare: one of each machine, and one of the job.

``CLOCK_BOOTTIME`` goes on while the machine is suspended, unlike ``CLOCK_MONOTONIC``,
and does not follow the wall clock. A worker that wakes up with its machine finds its
lease run out, as the other nodes do.

Between machines there is only the wall clock, which is set forth and back. So agents
count the seconds of the job themselves (:class:`JobClock`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["JobClock", "boot_ns", "boot_seconds"]


def boot_ns() -> int:
    """Nanoseconds since this machine was started, suspended time included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_seconds() -> float:
    """The same in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class JobClock:
    """Seconds since the start of the agent that started first; the same on all agents but for the way of a message.

    This machine's boot-time clock, put forward to the newest time that another agent was heard to have. It never goes
    back, and no setting of a wall clock moves it.
    """

    def __init__(self, read: Callable[[], float] = boot_seconds) -> None:
        self._read = read
        self._ahead = -read()

    def now(self) -> float:
        """Seconds of the job."""
        return self._read() + self._ahead

    def hear(self, at: float) -> None:
        """Another agent's clock showed ``at``."""
        self._ahead = max(self._ahead, at - self._read())
