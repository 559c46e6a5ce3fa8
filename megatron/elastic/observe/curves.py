"""The points of curves that are worth writing, for logs in which every point costs time.

Idea: a value that stays the same is a straight line between its first point and its last one. It is written again right
before it changes, so that the curve has a step there. It is also written once in :data:`LONGEST` steps, so that a
reader of the log sees that it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = ["LONGEST", "Curves"]

LONGEST = 100
"""Most steps between two points of a curve."""


@dataclass(frozen=True)
class _Last:
    """The newest value of a curve: the steps at which it was seen last, and written last."""

    value: float
    seen: int
    written: int


class Curves:
    """Chooses the points of one log."""

    def __init__(self) -> None:
        self._last: dict[str, _Last] = {}

    def points(self, values: Mapping[str, float], step: int) -> list[tuple[str, float, int]]:
        """Return the (name, value, step) to write, given the ``values`` at ``step``, which may be an earlier one."""
        found = []
        for name, value in values.items():
            last = self._last.get(name)
            if last is not None and last.seen < step:
                if last.value == value and step < last.written + LONGEST:
                    self._last[name] = replace(last, seen=step)
                    continue
                if last.value != value and last.written < last.seen:
                    found.append((name, last.value, last.seen))
            found.append((name, value, step))
            self._last[name] = _Last(value, step, step)
        return found
