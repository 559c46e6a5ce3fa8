"""Whose pieces take longer than their peers': measured times of one step become samples for the speed tracker.

Idea: cells that run the same unit range are compared with each other. What a row
of that range should take is the lower median over them, so embedding and head
need no cost model, and a stage that is slow everywhere accuses no cell. A range
that only one cell runs has no yardstick and says nothing. A cell of fewer ranks
than at launch is compared by its nominal speed.

Times are integers (ns) and travel in the vote: every rank feeds its tracker the
same numbers and publishes the same speeds. A step boundary later the plan is
made anew from them, without a word on the control plane; the plan's hash in the
next vote shows that all agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megatron.elastic.plan.model import Plan, Profile
from megatron.elastic.plan.profile import PPM, PieceSample, SlowRank, SpeedOptions, SpeedTracker, fit_profile

__all__ = ["Pace", "Range", "Times", "measured_profile", "ranges_of", "samples_of"]

Range = tuple[int, int, int]
"""(cell, first unit, end unit): the pieces of one cell that pass the same units."""

Times = Mapping[Range, tuple[int, int]]
"""Nanoseconds of one step's (forwards, backwards); a missing range was not measured."""


def ranges_of(plan: Plan) -> tuple[Range, ...]:
    """Every cell's unit ranges, ascending: the order of their slots in the vote."""
    return tuple(sorted({(piece.cell, piece.first, piece.end) for piece in plan.pieces}))


def samples_of(plan: Plan, times: Times) -> dict[int, tuple[int, int]]:
    """Cell → (ns its pieces should have taken, ns they took), for ranges that several cells ran."""
    rows: dict[Range, int] = {}
    for piece in plan.pieces:
        key = (piece.cell, piece.first, piece.end)
        rows[key] = rows.get(key, 0) + len(piece.rows)
    nominal = {cell.id: cell.nominal_ppm for cell in plan.cells}
    peers: dict[tuple[int, int], list[Range]] = {}
    for key in sorted(rows):
        if rows[key] and sum(times.get(key, (0, 0))) > 0:
            peers.setdefault(key[1:], []).append(key)
    samples: dict[int, tuple[int, int]] = {}
    for members in peers.values():
        if len(members) < 2:
            continue
        per_row = {key: sum(times[key]) * nominal[key[0]] // PPM // rows[key] for key in members}
        usual = sorted(per_row.values())[(len(members) - 1) // 2]
        for key in members:
            work, measured = samples.get(key[0], (0, 0))
            expected = usual * rows[key] * PPM // nominal[key[0]]
            samples[key[0]] = (work + expected, measured + sum(times[key]))
    return samples


def measured_profile(plan: Plan, times: Times, base: Profile) -> Profile:
    """``base`` with the times that units took in this step; units of one range share them evenly."""
    rows: dict[Range, int] = {}
    for piece in plan.pieces:
        key = (piece.cell, piece.first, piece.end)
        rows[key] = rows.get(key, 0) + len(piece.rows)
    speed = {cell.id: cell.rate_ppm for cell in plan.cells}
    samples = [
        PieceSample(first, end, rows[cell, first, end], backward, spent, speed[cell])
        for (cell, first, end), both in sorted(times.items())
        if rows.get((cell, first, end))
        for backward, spent in zip((False, True), both, strict=True)
        if spent
    ]
    return fit_profile(base, samples)


@dataclass
class Pace:
    """Published speeds of the cells of one generation, from the steps it committed.

    A new generation starts from the speeds the record before it carries, without
    the measurements behind them: those a survivor missed would set it apart.
    """

    options: SpeedOptions = field(default_factory=SpeedOptions)
    tracker: SpeedTracker = field(init=False)

    def __post_init__(self) -> None:
        self.tracker = SpeedTracker(self.options)

    def resume(self, speeds: Iterable[tuple[int, int]], step: int) -> None:
        """Start again from published ``speeds`` (cell, ppm) as of ``step``."""
        self.tracker = SpeedTracker(self.options, step=step)
        self.tracker.publish(dict(speeds))

    def observe(self, plan: Plan, times: Times) -> bool:
        """Take in one committed step; True when a published speed changed."""
        busy = {piece.cell for piece in plan.pieces}
        return self.tracker.observe(samples_of(plan, times), [cell.id for cell in plan.cells if cell.id not in busy])

    def speeds(self) -> tuple[tuple[int, int], ...]:
        """(cell, ppm) of the cells that do not run at their peers' speed, ascending."""
        return tuple((cell, speed) for cell, speed in self.tracker.speeds().items() if speed != PPM)

    def slow(self, plan: Plan) -> tuple[SlowRank, ...]:
        """Cells published as slow, with their ranks, the slowest first."""
        return self.tracker.slow({cell.id: cell.ranks for cell in plan.cells})
