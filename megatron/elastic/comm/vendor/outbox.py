"""Sends of device tensors over host links, each begun when the device has written its host copy.

A thread waits for the device, so that the rank goes on launching work. Invariant: messages begin in the order of their
calls and in the generation of their call, or not at all; :meth:`Outbox.void` and an edit leave none of an older one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommTimeout, GenerationChanged

__all__ = ["Outbox", "Posted"]


class Posted(dist.Work):
    """A send that is begun later. ``host``: the page-locked tensor that it reads."""

    def __init__(self, generation: int, host: torch.Tensor, begin: Callable[[torch.Tensor], dist.Work]) -> None:
        super().__init__()
        self.generation = generation
        self._host = host
        self._begin = begin
        self._settled = threading.Event()
        """Begun, or void."""
        self._work: dist.Work | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Begin the send, unless it is void."""
        if self._settled.is_set():
            return
        try:
            self._work = self._begin(self._host)
        except Exception as error:  # raised again by the wait
            self._error = error
        self._settled.set()

    def void(self, error: Exception) -> None:
        """Let the wait raise ``error`` if the send has not begun."""
        if not self._settled.is_set():
            self._error = error
            self._settled.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is sent. Raises the communicator's typed errors."""
        if not self._settled.wait(None if timeout is None else timeout.total_seconds()):
            assert timeout is not None, "a wait without a time-out ends only when the send is begun or void"
            raise CommTimeout(timeout.total_seconds())
        if self._error is not None:
            raise self._error
        assert self._work is not None, "a send that is begun has a work"
        return self._work.wait() if timeout is None else self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._settled.is_set() and (self._work is None or self._work.is_completed())

    def is_success(self) -> bool:
        return self._settled.is_set() and self._work is not None and self._work.is_success()


class Outbox:
    """The sends of one process. Its thread starts with the first one and makes ``device`` current in itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: queue.SimpleQueue[tuple[torch.Event, Posted] | None] = queue.SimpleQueue()
        self._waiting: list[Posted] = []
        self._beginning = threading.Lock()
        self._thread: threading.Thread | None = None

    def post(self, generation: int, host: torch.Tensor, begin: Callable[[torch.Tensor], dist.Work]) -> Posted:
        """Call ``begin(host)`` when the work that is now queued on the current stream is done."""
        written = torch.Event(self._device)
        written.record(torch.accelerator.current_stream(self._device))
        posted = Posted(generation, host, begin)
        with self._beginning:
            self._waiting.append(posted)
        self._queue.put((written, posted))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="elastic-outbox", daemon=True)
            self._thread.start()
        return posted

    def void(self, generation: int) -> None:
        """End all sends of older generations that have not begun: their waits raise ``GenerationChanged``."""
        with self._beginning:
            self._void(generation)

    @contextmanager
    def edited(self, generation: int) -> Iterator[None]:
        """Begin nothing during the block, and nothing of a generation before ``generation`` afterwards."""
        with self._beginning:
            self._void(generation)
            yield

    def close(self) -> None:
        """End the thread once it has come to its queue's end. Idempotent."""
        self._queue.put(None)

    def _void(self, generation: int) -> None:
        for posted in self._waiting:
            if posted.generation < generation:
                posted.void(GenerationChanged(generation))
        self._waiting = [posted for posted in self._waiting if posted.generation >= generation]

    def _run(self) -> None:
        torch.accelerator.set_device_index(self._device)
        while (item := self._queue.get()) is not None:
            written, posted = item
            try:
                written.synchronize()
            except RuntimeError as error:  # the device's own: a kernel has failed
                posted.void(error)
            with self._beginning:
                posted.begin()
                if posted in self._waiting:
                    self._waiting.remove(posted)
