"""Device clocks in a run: devices with slack run slower, while a step takes hardly longer.

With ``boost`` clocks may also rise above those of before the job, as long as ranks are missing. The ranks that are
left then make up for a part of the loss, as with nonuniform tensor parallelism's higher power (arXiv 2504.06095).

Every vote carries the clock range and present clock of each cell's devices, and the
times of its pieces. From these numbers every rank derives the same clocks, which
become part of the plan (``Plan.frequencies_khz``); each rank then sets its own
device. Until a cell was measured at two clocks, its time is assumed to be proportional
to 1/f, which can only save too little energy. With two clocks, ``t(f) = a / f + b`` is
fitted.

Invariant: remembered values (times, launch clocks) are of one generation and
equal on all its ranks; a generation begins at the clocks that devices had before the
job. ``platform/frequency.py`` restores a changed clock, also after a crash.

Source: ElasWave (arXiv 2510.00606), its frequency dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron.elastic.plan.clocks import with_clocks
from megatron.elastic.plan.frequency import ClockFit, ClockRange, fit_clock
from megatron.elastic.plan.model import Cell, Plan, Profile
from megatron.elastic.plan.pace import Range, Times, measured_profile
from megatron.elastic.platform.frequency import Applied, FrequencyControl, FrequencyUnavailable

__all__ = ["ClockState", "Clocks"]

ClockState = tuple[int, int, int, int]
"""(number of devices that can be set, lowest, highest, present clock), kHz; of one device or summed over a cell."""

_SETTLE = 4
"""Steps from one choice of clocks to the next."""
_WINDOW = 8
"""Number of newest times that are kept for a clock."""
_TOLERANCE_PPM = 20_000
"""Allowed increase of the step time. It cannot be 0: every cell takes part in the pipeline's fill and drain."""
_STEPS = 15
"""Number of steps into which a device's range is divided for the planner; the device takes its next higher clock."""


@dataclass
class Clocks:
    """The clock of this rank's device, and the measured times of all cells.

    ``say`` logs one line if the device refuses a clock; ``note`` records every clock that was set. ``boost`` allows
    clocks above those of before the job while the plan is short of ranks.
    """

    control: FrequencyControl
    say: Callable[[str], None]
    note: Callable[[Applied, int | None], None]
    boost: bool = False
    _before: int = 0
    """Clock of the device before the job set one."""
    _asked: int = 0
    _usable: bool = True
    _launch_khz: dict[int, int] = field(default_factory=dict)
    _samples: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """Cell → clock, one of the planner's (:func:`_step_of`) → newest times of one row through the cell's units, ns."""
    _profile: Profile | None = None
    """Unit costs at the launch's clocks."""
    _present: dict[int, int] = field(default_factory=dict)
    _steady: int = 0

    def state(self) -> ClockState:
        """Return this device's part of the vote; zeros if its clock cannot be set."""
        if not self._usable or not self.control.available():
            return 0, 0, 0, 0
        try:
            limits, present = self.control.limits(), self._asked or self.control.current()
        except FrequencyUnavailable as error:
            return self._refused(error)
        self._before = self._before or present
        return 1, limits.min_khz, limits.max_khz, present

    def forget(self) -> None:
        """Begin a generation: discard measurements and restore the clock of before the job."""
        self._launch_khz.clear()
        self._samples.clear()
        self._present.clear()
        self._profile, self._steady = None, 0
        if self._asked:
            self._set(self._before)

    def observe(
        self, plan: Plan, times: Times, states: Mapping[int, ClockState], profile: Profile, short: bool = False
    ) -> Plan | None:
        """Take in one committed step. Returns the plan with new clocks if they should change; equal on every rank.

        ``short``: fewer ranks compute than the sizes in force have.
        """
        able = {cell.id: _of_cell(cell, states.get(cell.id, (0, 0, 0, 0))) for cell in plan.cells}
        ranges = {}
        per_row = _per_row(plan, times)
        self._present.clear()
        for cell, found in able.items():
            if found is None or cell not in per_row:
                continue
            lowest, highest, present = found
            launch_khz = self._launch_khz.setdefault(cell, present)
            ranges[cell] = ClockRange(_steps(lowest, highest, launch_khz), launch_khz)
            step = self._present[cell] = _step_of(present, ranges[cell])
            kept = self._samples.setdefault(cell, {}).setdefault(step, [])
            kept.append(per_row[cell])
            del kept[:-_WINDOW]
        self._steady += 1
        if self._steady < _SETTLE or not ranges:
            return None
        self._steady = 0
        self._profile = self._profile or measured_profile(plan, times, profile)
        fits = {cell: self._fit(cell) for cell in ranges}
        boost = self.boost and short
        chosen = with_clocks(plan, self._profile, fits, ranges, boost=boost, tolerance_ppm=_TOLERANCE_PPM)
        if all(_near(khz, self._present[cell], ranges[cell]) for cell, khz in chosen.frequencies_khz):
            return None
        return chosen

    def at_nominal(self, times: Times) -> dict[Range, tuple[int, int]]:
        """Return ``times`` scaled to the launch's clocks, so that a lowered clock does not count as a slow device."""
        found: dict[Range, tuple[int, int]] = {}
        for key, (forward, backward) in times.items():
            launch_khz, present = self._launch_khz.get(key[0], 0), self._present.get(key[0], 0)
            if not present or launch_khz == present:  # a device that refused keeps its clock
                found[key] = (forward, backward)
                continue
            fit = self._fit(key[0])
            here, there = fit.time_ns(present), fit.time_ns(launch_khz)
            found[key] = (forward * there // here, backward * there // here)
        return found

    def apply(self, plan: Plan, cell: Cell | None) -> None:
        """Set this rank's device to the clock of ``plan``, unless it has that clock already."""
        wanted = dict(plan.frequencies_khz).get(cell.id) if cell is not None else None
        if self._usable and wanted is not None and wanted != (self._asked or self._before):
            self._set(wanted)

    def restore(self) -> None:
        """Restore the device's clock of before the job. Idempotent."""
        if self._asked:
            self._asked = 0
            try:
                self.control.restore()
            except FrequencyUnavailable as error:
                self.say(str(error))

    def _set(self, khz: int) -> None:
        try:
            applied = self.control.set(khz, more_power=khz > self._before)
        except FrequencyUnavailable as error:
            self._refused(error)
            return
        self._asked = khz
        self.note(applied, self.control.power_mw())

    def _refused(self, error: FrequencyUnavailable) -> ClockState:
        self._usable = False
        self.say(str(error))
        return 0, 0, 0, 0

    def _fit(self, cell: int) -> ClockFit:
        seen = {khz: min(times) for khz, times in self._samples[cell].items()}
        fitted = fit_clock(seen.items())
        if fitted is not None:
            return fitted
        khz, time = next(iter(seen.items()))
        return ClockFit(work=khz * time, fixed=0)


def _of_cell(cell: Cell, total: ClockState) -> tuple[int, int, int] | None:
    """Return (lowest, highest, present) if the clock of every device of the cell can be set."""
    able, lowest, highest, present = total
    size = len(cell.ranks)
    return (lowest // size, highest // size, present // size) if able == size else None


def _per_row(plan: Plan, times: Times) -> dict[int, int]:
    """Return cell → measured ns of one row through all its units."""
    rows: dict[Range, int] = {}
    for piece in plan.pieces:
        key = (piece.cell, piece.first, piece.end)
        rows[key] = rows.get(key, 0) + len(piece.rows)
    found: dict[int, int] = {}
    for key, count in rows.items():
        if spent := sum(times.get(key, (0, 0))):
            found[key[0]] = found.get(key[0], 0) + spent // count
    return found


def _steps(lowest: int, highest: int, launch_khz: int) -> tuple[int, ...]:
    span = highest - lowest
    return tuple(sorted({launch_khz, *(lowest + span * step // _STEPS for step in range(_STEPS + 1))}))


def _step_of(khz: int, clocks: ClockRange) -> int:
    """Return the launch's clock if ``khz`` is at most one step from it, else the nearest of the planner's clocks.

    The clock of a device that was not set differs a little at each look. No fit can be made of such differences.
    """
    if _near(khz, clocks.nominal_khz, clocks):
        return clocks.nominal_khz
    return min(clocks.allowed_khz, key=lambda allowed: abs(allowed - khz))


def _near(one: int, other: int, clocks: ClockRange) -> bool:
    """Return whether two clocks are at most one step apart, too little for a change."""
    allowed = clocks.allowed_khz
    return abs(one - other) <= (allowed[-1] - allowed[0]) // _STEPS
