"""How a piece of work's time depends on the clock: t(f) = a/f + b, fitted online.

``a`` is the part that scales with the clock (arithmetic), ``b`` the part that does not
(memory, links, waits). With both known, the slowest clock that still meets a deadline
can be computed, which is how the frequency axis lets a fast stage wait less and burn
less (DESIGN section 7; ElasWave, arXiv 2510.00606, frequency scaling).

Invariant: results are integers (ns, kHz), so every process that is handed them plans
alike; a, b ≥ 0; nothing is fitted from a single clock, where a and b cannot be told apart.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

__all__ = ["ClockFit", "ClockModel"]


@dataclass(frozen=True)
class ClockFit:
    """t(f) = cycles / f + fixed: ``cycles_ns_khz`` in ns·kHz, ``fixed_ns`` in ns."""

    cycles_ns_khz: int
    fixed_ns: int
    error_ppm: int
    """Root mean square relative error over the observed clocks, millionths."""

    def time_ns(self, khz: int) -> int:
        """Predicted time at a clock."""
        if khz <= 0:
            raise ValueError(f"a clock of {khz} kHz")
        return -(-self.cycles_ns_khz // khz) + self.fixed_ns

    def slowest_khz(self, deadline_ns: int) -> int | None:
        """The slowest clock that meets ``deadline_ns``; None when no clock does."""
        room = deadline_ns - self.fixed_ns
        if room < 0 or (room == 0 and self.cycles_ns_khz > 0):
            return None
        return 1 if self.cycles_ns_khz == 0 else -(-self.cycles_ns_khz // room)


class ClockModel:
    """Collects (clock, time) of one kind of work on one device.

    Per clock the median of the last ``window`` times counts, so a hiccup does not
    move the fit and a drift does.
    """

    def __init__(self, window: int = 32) -> None:
        self._window = window
        self._times: dict[int, deque[int]] = {}

    def add(self, khz: int, nanoseconds: int) -> None:
        """One observation. ``khz`` is the clock the device really ran at."""
        if khz <= 0 or nanoseconds < 0:
            raise ValueError(f"{nanoseconds} ns at {khz} kHz")
        self._times.setdefault(khz, deque(maxlen=self._window)).append(nanoseconds)

    def fit(self) -> ClockFit | None:
        """Least squares in 1/f over the clocks seen; None with fewer than two."""
        points = [(1.0 / khz, median(times)) for khz, times in sorted(self._times.items())]
        if len(points) < 2:
            return None
        a, b = _least_squares(points)
        squares = [((a * x + b - t) / t) ** 2 for x, t in points if t > 0]
        error = math.sqrt(sum(squares) / len(squares)) if squares else 0.0
        return ClockFit(round(a), round(b), round(error * 1e6))


def _least_squares(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of t = a·x + b with both kept at 0 or above."""
    n = len(points)
    mean_x, mean_t = sum(x for x, _ in points) / n, sum(t for _, t in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    a = sum((x - mean_x) * (t - mean_t) for x, t in points) / spread
    if a <= 0.0:
        return 0.0, mean_t
    b = mean_t - a * mean_x
    if b >= 0.0:
        return a, b
    return sum(x * t for x, t in points) / sum(x * x for x, _ in points), 0.0
