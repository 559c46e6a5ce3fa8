"""Streams and events of a device that finishes work before a call returns.

They keep CUDA's shape (names and arguments), because Megatron calls them through
the redirection, and they measure: an event's time is the host clock's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["HostEvent", "HostStream", "use_stream"]


class HostEvent:
    """Always complete; ``elapsed_time`` reads the host's monotonic clock."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
        self._recorded_ns = 0

    def record(self, stream: object | None = None) -> None:
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: object | None = None) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: object) -> float:
        """Milliseconds between the two ``record`` calls."""
        if not isinstance(end_event, HostEvent):
            raise TypeError(f"expected a HostEvent, got {type(end_event).__name__}")
        return (end_event._recorded_ns - self._recorded_ns) / 1e6


class HostStream:
    """No queue: a call has ended when it returns."""

    def __init__(self, device: object | None = None, priority: int = 0, **_: object) -> None:
        self.device = torch.device("cpu")
        self.priority = priority
        self.cuda_stream = 0
        self.stream_id = 0

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: object) -> None:
        """Nothing is pending."""

    def wait_event(self, event: object) -> None:
        """Nothing is pending."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = event or HostEvent()
        event.record(self)
        return event


@contextmanager
def use_stream(stream: object | None) -> Iterator[object | None]:
    """Run a block "on" ``stream``: there is only one order of execution."""
    yield stream
