"""The frequency axis: clocks that absorb the imbalance no plan can remove.

Idea: a piece's time follows ``t(f) = a / f + b`` (``a``: work bound by the clock,
``b``: memory and transfers), fitted online by least squares over (clock, time)
samples. After planning, cells differ by what whole units and whole
micro-batches leave over. Cells with slack can run slower without delaying the
step (energy); cells on the critical path can run faster where the platform
allows it (time). ElasWave (arXiv 2510.00606) uses DVFS the same way.

Integers in, integers out: fits use exact rational arithmetic, so that every
process derives the same clocks. Setting them is the platform's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["ClockFit", "ClockRange", "balance_clocks", "fit_clock", "top_clock"]


@dataclass(frozen=True)
class ClockFit:
    """``t(f) = work / f + fixed``: ns, with ``work`` in ns x kHz."""

    work: int
    fixed: int

    def time_ns(self, khz: int) -> int:
        """Predicted time at ``khz``, rounded up."""
        return -(-self.work // khz) + self.fixed

    def clock_khz(self, time_ns: int) -> int | None:
        """Lowest clock that finishes within ``time_ns``, None when no clock does."""
        room = time_ns - self.fixed
        return -(-self.work // room) if room > 0 else None


@dataclass(frozen=True)
class ClockRange:
    """Clocks a cell may run at, ascending, and the one it runs at by default."""

    allowed_khz: tuple[int, ...]
    nominal_khz: int

    def at_least(self, khz: int) -> int:
        """Lowest allowed clock not below ``khz`` (the highest when there is none)."""
        return next((allowed for allowed in self.allowed_khz if allowed >= khz), self.allowed_khz[-1])


def fit_clock(samples: Iterable[tuple[int, int]]) -> ClockFit | None:
    """Least-squares ``t = a x + b`` with ``x = 1 / f`` over (kHz, ns) samples; neither part below 0.

    None without two different clocks. Raises ``ValueError`` for a clock or time
    that is not positive.
    """
    points = sorted(samples)
    if any(khz <= 0 or time <= 0 for khz, time in points):
        raise ValueError("clocks and times must be positive")
    if len({khz for khz, _ in points}) < 2:
        return None
    count = len(points)
    xs = [Fraction(1, khz) for khz, _ in points]
    ts = [time for _, time in points]
    mean_x, mean_t = sum(xs, Fraction(0)) / count, Fraction(sum(ts), count)
    spread = sum(((x - mean_x) ** 2 for x in xs), Fraction(0))
    slope = sum(((x - mean_x) * (t - mean_t) for x, t in zip(xs, ts, strict=True)), Fraction(0)) / spread
    slope = max(slope, Fraction(0))
    fixed = mean_t - slope * mean_x
    if fixed < 0:
        fixed = Fraction(0)
        slope = sum((x * t for x, t in zip(xs, ts, strict=True)), Fraction(0)) / sum((x * x for x in xs), Fraction(0))
    return ClockFit(round(slope), round(fixed))


def balance_clocks(
    fits: Mapping[int, ClockFit], ranges: Mapping[int, ClockRange], loads: Mapping[int, int], boost: bool = True
) -> tuple[tuple[int, int], ...]:
    """(cell, kHz) ascending: all cells busy for about equally long, that long as short as clocks allow.

    Busy time is not step time (``clocks.with_clocks`` accounts for fill and drain).

    ``loads[cell]`` is how often the fitted piece runs in a step. With ``boost`` off
    no cell exceeds the nominal clock. Cells without fit or range keep theirs (absent).
    """
    cells = [cell for cell in sorted(loads) if cell in fits and cell in ranges and loads[cell] > 0]
    if not cells:
        return ()
    top = {cell: top_clock(ranges[cell], boost) for cell in cells}
    deadline = max(loads[cell] * fits[cell].time_ns(top[cell]) for cell in cells)
    chosen = []
    for cell in cells:
        wanted = fits[cell].clock_khz(deadline // loads[cell])
        clock = top[cell] if wanted is None else min(top[cell], ranges[cell].at_least(wanted))
        chosen.append((cell, clock))
    return tuple(chosen)


def top_clock(clocks: ClockRange, boost: bool) -> int:
    """Highest clock a cell may run at: the nominal one, or with ``boost`` the highest allowed."""
    below: Sequence[int] = [khz for khz in clocks.allowed_khz if boost or khz <= clocks.nominal_khz]
    return below[-1] if below else clocks.allowed_khz[0]
