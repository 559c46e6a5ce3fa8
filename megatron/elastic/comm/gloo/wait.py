"""Waiting for one of gloo's works, which gloo itself may forget.

When a connection closes, gloo tells the operations that stand in its queues. A message that was written or
read in part, or that was about to be written, is in none of them. A thread that waits for it waits until its
time-out, although the message cannot arrive any more. So a wait here does not rely on gloo
to end it. It also ends, with :class:`Forgotten`, when ``void`` says that
nothing can arrive; what waits inside gloo is then left behind, to end with its
own time-out and without touching the tensor.

A collective is run by gloo's threads and can be asked again and again. A
message completes only while a thread waits for it, and a wait that runs out of
time breaks the connection: so a thread that can be left behind waits for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

__all__ = ["Forgotten", "Waiters", "await_collective"]

LOOK_SECONDS = 0.05
"""Interval at which a wait checks that it is not void. An operation that gloo ends wakes it at once."""


class Forgotten(RuntimeError):
    """gloo will not end this wait: the connection has gone under a message."""


def await_collective(work: dist.Work, allowed: timedelta, void: Callable[[], bool]) -> None:
    """Return when ``work`` is done. Raises gloo's ``RuntimeError``, :class:`Forgotten`, or ``TimeoutError``."""
    end = time.monotonic() + allowed.total_seconds()
    while True:
        left = end - time.monotonic()
        try:
            work.wait(timedelta(seconds=min(LOOK_SECONDS, max(left, 0.001))))
        except RuntimeError:
            if work.is_completed():  # since: what was raised may be this look's time, and no end at all
                work.wait()
                return
            if void():
                raise Forgotten("a connection closed during a collective") from None
            if left <= 0.0:
                raise TimeoutError("timed out waiting for a collective") from None
        else:
            return


@dataclass
class _Errand:
    """A message to be waited for."""

    work: dist.Work
    allowed: timedelta
    over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Waiters:
    """Threads that wait for messages, one for each that is waited for; one that is left behind is not used again."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[_Errand | None]] = []

    def await_message(self, work: dist.Work, allowed: timedelta, void: Callable[[], bool]) -> None:
        """Return when ``work`` is done. Raises gloo's ``RuntimeError`` or :class:`Forgotten`."""
        try:
            errands = self._idle.pop()
        except IndexError:
            errands = queue.SimpleQueue()
            threading.Thread(target=_run, args=(errands,), name="elastic-wait", daemon=True).start()
        errand = _Errand(work, allowed)
        errands.put(errand)
        while not errand.over.wait(LOOK_SECONDS):
            if void():
                errands.put(None)  # after this one, whenever it ends
                raise Forgotten("a connection closed during a message")
        self._idle.append(errands)
        if errand.error is not None:
            raise errand.error

    def close(self) -> None:
        """End the threads that wait for nothing."""
        while self._idle:
            self._idle.pop().put(None)


def _run(errands: queue.SimpleQueue[_Errand | None]) -> None:
    while (errand := errands.get()) is not None:
        try:
            errand.work.wait(errand.allowed)  # without a time, c10d waits for ever
        except RuntimeError as error:
            errand.error = error
        errand.over.set()
        del errand  # and the tensor with it
