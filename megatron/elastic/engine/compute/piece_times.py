"""The times of one pass's computations, by the clock of the device that performs them.

Where a call only launches work, events before and behind each computation have its times. Nothing waits for the device
before the times are read, so measuring costs two events a computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from megatron.elastic.plan.model import Action, Op
from megatron.elastic.platform.base import Platform, StreamEvent

__all__ = ["HOST_CLOCK", "Clock", "DeviceClock", "HostClock", "PieceTimes", "Timed", "clock_of"]


class Timed(NamedTuple):
    """The time of a computation by this process's monotonic clock, without waiting for its inputs."""

    op: Op
    piece: int
    start_ns: Any
    end_ns: Any
    """Integers; marks of the clock until they are read."""
    aside_ns: int
    """Of it, for other work than the piece's."""


class Clock(Protocol):
    """Marks moments in the order of the work that this thread calls."""

    @property
    def on_host(self) -> bool:
        """True if work that the host does beside a computation takes from its time."""

    def mark(self) -> Any:
        """Return the moment when all work called so far is done. Does not wait."""

    def nanoseconds(self, marks: Sequence[Any]) -> Sequence[int]:
        """Return the moments of ``marks``, by this process's monotonic clock. Waits until all have come."""

    def timed(self, marked: Sequence[Timed]) -> Sequence[Timed]:
        """Return ``marked`` with the moments of their marks. Waits until all have come."""


class HostClock:
    """For work that is done when its call returns."""

    on_host = True

    def mark(self) -> int:
        """See :meth:`Clock.mark`."""
        return time.monotonic_ns()

    def nanoseconds(self, marks: Sequence[int]) -> Sequence[int]:
        """See :meth:`Clock.nanoseconds`. A mark of this clock is its moment."""
        return marks

    def timed(self, marked: Sequence[Timed]) -> Sequence[Timed]:
        """See :meth:`Clock.timed`."""
        return marked


@dataclass(frozen=True)
class DeviceClock:
    """For work of the current stream of ``platform``'s current device."""

    platform: Platform
    on_host: bool = False

    def mark(self) -> StreamEvent:
        """See :meth:`Clock.mark`."""
        event = self.platform.new_event(timing=True)
        event.record(self.platform.current_stream())
        return event

    def nanoseconds(self, marks: Sequence[StreamEvent]) -> Sequence[int]:
        """See :meth:`Clock.nanoseconds`. Events have distances alone: one that comes now ties them to the clock."""
        if not marks:
            return []
        self.platform.current_stream().synchronize()
        present = self.mark()
        present.synchronize()
        now = time.monotonic_ns()
        return [now - round(1e6 * mark.elapsed_time(present)) for mark in marks]

    def timed(self, marked: Sequence[Timed]) -> Sequence[Timed]:
        """See :meth:`Clock.timed`."""
        moments = self.nanoseconds([mark for one in marked for mark in (one.start_ns, one.end_ns)])
        ends = zip(marked, moments[::2], moments[1::2], strict=True)
        return [one._replace(start_ns=start, end_ns=end) for one, start, end in ends]


HOST_CLOCK = HostClock()


def clock_of(platform: Platform) -> Clock:
    """Return the clock that measures the work of ``platform``."""
    return HOST_CLOCK if platform.synchronous else DeviceClock(platform)


@dataclass
class PieceTimes:
    """The computations of a pass, in the order of their calls."""

    clock: Clock = HOST_CLOCK
    _marked: list[Timed] = field(default_factory=list)

    @contextmanager
    def around(
        self, action: Action, drag: Callable[[Callable[[], int]], None], aside: Callable[[], int] = lambda: 0
    ) -> Iterator[None]:
        """Measure the block. ``drag`` is called behind it, with a function that waits for it and returns its ns.

        ``aside`` returns the ns that this thread has spent so far on other work than pieces.
        """
        start, before = self.clock.mark(), aside()
        yield
        apart = aside() - before if self.clock.on_host else 0

        def spent() -> int:
            first, last = self.clock.nanoseconds([start, self.clock.mark()])
            return last - first - apart

        drag(spent)
        self._marked.append(Timed(action.op, action.piece, start, self.clock.mark(), apart))

    def read(self) -> Sequence[Timed]:
        """Return the times of all computations so far; waits until the device has done them."""
        return self.clock.timed(self._marked)
