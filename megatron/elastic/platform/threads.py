"""Threads, the means by which they wait for one another, and the clock: those of the operating system.

What blocks, or decides by the time, takes them from here instead of from ``threading`` and ``time``. So the same code
also runs under a scheduler that lets one thread of many run at a time and advances the clock itself
(``tests/cluster``). Locks are not among them: none is held while a thread waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

__all__ = ["OS_THREADS", "Condition", "Event", "OsThreads", "Running", "Threads"]


class Event(Protocol):
    """As ``threading.Event``."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Condition(Protocol):
    """As ``threading.Condition``."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...

    def notify_all(self) -> None: ...


class Running(Protocol):
    """A thread that was started."""

    def join(self) -> None:
        """Wait until it has ended."""


class Threads(Protocol):
    """See the module docstring."""

    def monotonic(self) -> float:
        """Seconds, from any start."""

    def sleep(self, seconds: float) -> None:
        """Let this thread wait so long."""

    def start(self, name: str, body: Callable[[], None]) -> Running:
        """Run ``body`` on a thread that does not keep the process alive."""

    def event(self) -> Event:
        """A new event, not set."""

    def condition(self, lock: threading.Lock | None = None) -> Condition:
        """A new condition over ``lock``, or over a lock of its own."""


class OsThreads:
    """The operating system's threads and its monotonic clock. Each thread calls ``begin`` before its body."""

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin

    def monotonic(self) -> float:
        """See :meth:`Threads.monotonic`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See :meth:`Threads.sleep`."""
        time.sleep(seconds)

    def start(self, name: str, body: Callable[[], None]) -> Running:
        """See :meth:`Threads.start`."""

        def run() -> None:
            self._begin()
            body()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def event(self) -> Event:
        """See :meth:`Threads.event`."""
        return threading.Event()

    def condition(self, lock: threading.Lock | None = None) -> Condition:
        """See :meth:`Threads.condition`."""
        return threading.Condition(lock)


OS_THREADS = OsThreads()
