"""A small event loop over epoll: descriptors, timers, signals, and calls from other threads.

One thread runs everything; nothing it calls may block. Written here because the
order matters: all that is readable is handled before timers, and handlers may
forget descriptors whose event is still in the same batch. Calls of other threads
come before timers too, up to a limit: an agent that takes in many entries of the
journal still renews its lease.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

__all__ = ["Loop", "Timers"]

_TURN_SECONDS = 0.25
"""Calls of other threads are made for so long before timers that are due have their turn."""


class Timers(Protocol):
    """Calls at a later time, on the thread of a loop."""

    def now(self) -> float:
        """Seconds, from any start."""

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call once, ``seconds`` from now."""


class Loop:
    """Runs until :meth:`stop`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._closed, self._closing = False, threading.RLock()  # a signal may come while the loop's thread has it
        self._running = False
        self._signal_handlers: dict[int, Callable[[int], None]] = {}

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call ``handler(event mask)`` whenever ``fd`` is readable, hung up or in error."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def adjust(self, fd: int, writing: bool) -> None:
        """Also watch ``fd`` for being writable, or no longer."""
        if fd in self._handlers:
            self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if writing else 0))

    def forget(self, fd: int) -> None:
        """Watch ``fd`` no longer; silent if it is not watched."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def now(self) -> float:
        """Seconds of the clock by which timers run."""
        return time.monotonic()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call once, ``seconds`` from now."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), call))

    def every(self, seconds: float, call: Callable[[], None]) -> None:
        """Call again and again."""

        def again() -> None:
            call()
            self.after(seconds, again)

        self.after(seconds, again)

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop's thread make ``call``; from any thread. Without effect once the loop is closed."""
        with self._closing:
            if not self._closed:
                self._calls.append(call)
                os.eventfd_write(self._wake, 1)

    def on_signal(self, number: int, handler: Callable[[int], None]) -> None:
        """Handle a signal on the loop (main thread only)."""
        signal.signal(number, lambda signum, _frame: self.post(lambda: handler(signum)))
        self._signal_handlers[number] = handler

    def stop(self) -> None:
        """Leave :meth:`run` after the present batch."""
        self._running = False

    def run(self) -> None:
        """Handle events until stopped."""
        self._running = True
        while self._running:
            wait = -1.0
            if self._calls:
                wait = 0.0
            elif self._timers:
                wait = max(0.0, self._timers[0][0] - time.monotonic())
            for fd, mask in self._epoll.poll(wait):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif fd in self._handlers:
                    self._handlers[fd](mask)
            end = time.monotonic() + _TURN_SECONDS
            while self._calls and time.monotonic() < end:
                self._calls.popleft()()
            now = time.monotonic()
            while self._running and self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()

    def close(self) -> None:
        """Give back descriptors. Threads may still post."""
        with self._closing:
            self._closed = True
            self._epoll.close()
            os.close(self._wake)
