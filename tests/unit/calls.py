"""The number of calls, or of lines of Python, in a piece of work: unlike its time, the same on every machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import TraceFunction

__all__ = ["calls_in", "lines_in"]


def calls_in(work: Callable[[], object]) -> int:
    """Return the number of calls, of Python's functions and of others, that ``work()`` makes on this thread."""
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update((event,)))
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls["call"] + calls["c_call"]


def lines_in(work: Callable[[], object]) -> int:
    """Return the number of lines of Python that ``work()`` runs on this thread; each turn of a loop counts."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> TraceFunction:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
