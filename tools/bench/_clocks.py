"""Clocks of CPU time on functions of a rank, for benches that tell what a part of a step costs.

They read the CPU time of the thread, so that waiting for a peer, or for a core that others use, is not taken for cost.
They nest: the time of an inner clock is taken off the outer one. Looking at a clock takes time too: what an empty
function costs by it is measured first and taken off each call, both of the function and of the one around it.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["SKIPPED", "Clocks", "write_counts"]

SKIPPED = 8
"""Steps before the clocks count: caches, profiles and prefetching settle."""

_EMPTY_CALLS = 2000


def _nothing() -> None:
    pass


class Clocks:
    """CPU seconds by name, within steps that count."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._inner = [0.0]
        self._inside = self._around = 0.0
        self._calibrate()

    def _calibrate(self) -> None:
        """Measure an empty function: what its own clock shows, and what the one around it has to bear beyond that."""
        empty = self.timed("empty", _nothing)
        began = time.thread_time()
        for _ in range(_EMPTY_CALLS):
            empty()
        each = (time.thread_time() - began) / _EMPTY_CALLS
        self._inside = self.spent["empty"] / _EMPTY_CALLS
        self._around = each - self._inside
        self.clear()
        self._inner = [0.0]

    def clear(self) -> None:
        """Forget what was counted so far."""
        self.spent.clear()
        self.calls.clear()

    def put(self, owner: object, function: str, name: str | Callable[..., str]) -> None:
        """Put the clock ``name`` on a function of ``owner``. Raises ``KeyError`` where it has none of that name."""
        setattr(owner, function, self.timed(name, vars(owner)[function]))

    def timed(self, name: str | Callable[..., str], original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``original`` on the clock ``name`` (or the one that ``name`` returns for its arguments)."""

        def replacement(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                took = time.thread_time() - began
                inside = self._inner.pop()
                self._inner[-1] += took + self._around
                clock = name if isinstance(name, str) else name(*args)
                self.spent[clock] += took - inside - self._inside
                self.calls[clock] += 1

        return replacement


def write_counts(clocks: Clocks, processes: Sequence[float], **more: Any) -> None:
    """Write the counts of one rank for ``overhead``. ``processes``: CPU seconds of each step, the skipped ones too."""
    steps = max(1, len(processes) - SKIPPED)
    report = {
        "cpu_seconds": {name: spent / steps for name, spent in clocks.spent.items()},
        "calls": {name: calls / steps for name, calls in clocks.calls.items()},
        "process_seconds": processes[SKIPPED:],
        **more,
    }
    Path(os.environ["OVERHEAD_OUT"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))
