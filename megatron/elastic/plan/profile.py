"""Fail-slow: measured piece times become cell speeds, with hysteresis.

Idea: every cell reports (work, measured ns) per step, where work is what its
pieces should take at nominal speed. Its speed is work / measured, relative to
the median cell of the same step, so that a slow step of all cells (a garbage
collection, a checkpoint) accuses no cell. Where two differ, the faster one is
taken for normal: noise only ever slows. For the same reason the estimate is the
upper quartile over a window of steps: a cell is slow only if nearly all of its
steps are. The *published* speed, the one the planner sees, only moves when the estimate has left a dead band
around it for several steps in a row, and for long enough. So noise causes no new plan, and a real slowdown
shows within a few steps. A recovery returns the work: all of it, once no cell counts as slow by the estimate.

A cell so slow that the plan gives it nothing is not measured, and would have nothing
for ever. After some steps without work it is taken to be twice as fast: on trial,
with less than its peers as a rule. Found as slow as before, it rests twice as long.

Integers in, integers out (parts per million); :class:`SpeedTracker` is updated
by the same numbers on every process (they travel in the vote), so all publish
the same speeds.

:func:`fit_profile` turns measured piece times into unit costs, for planner and
simulator alike.

Source: the fail-slow problem (Gunawi et al., FAST 2018); gray failures in
training: FALCON (arXiv 2410.12588).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from megatron.elastic.plan.model import Profile, UnitCost

__all__ = ["PPM", "PieceSample", "SlowRank", "SpeedOptions", "SpeedTracker", "fit_profile"]

PPM = 1_000_000


@dataclass(frozen=True)
class SpeedOptions:
    """Window and dead band of the tracker."""

    window: int = 5
    """Steps whose upper quartile is the current estimate."""
    patience: int = 3
    """Steps in a row the estimate must be outside the dead band before the published speed moves."""
    evidence_ns: int = 0
    """Least sum of those steps, by the cell that computed longest: noise of a machine outlasts three short steps."""
    band_ppm: int = 100_000
    """Half-width of the dead band around the published speed."""
    slow_ppm: int = 850_000
    """Published speeds below this are reported as slow."""
    step_ppm: int = 10_000
    """Published speeds are multiples of this, so that plans do not change for nothing."""
    rest: int = 10
    """Steps a slow cell is given nothing before its first trial; twice as many before each further one."""
    longest_rest: int = 640


@dataclass(frozen=True)
class SlowRank:
    """A cell that is slower than its peers, named with its ranks when they are known."""

    cell: int
    ranks: tuple[int, ...]
    speed_ppm: int
    since_step: int

    def __str__(self) -> str:
        names = ",".join(map(str, self.ranks)) if self.ranks else f"of cell {self.cell}"
        return f"rank {names} runs at {self.speed_ppm / 10_000:.0f}% of its peers since step {self.since_step}"


@dataclass
class _CellSpeed:
    recent: deque[int]
    published: int = PPM
    outside: int = 0
    evidence: int = 0
    since: int = 0
    rested: int = 0
    """Steps without work."""
    trials: int = 0
    """Number of trials with work after which it was still slow."""


@dataclass
class SpeedTracker:
    """Speeds of all cells, updated once a step."""

    options: SpeedOptions = field(default_factory=SpeedOptions)
    cells: dict[int, _CellSpeed] = field(default_factory=dict)
    step: int = 0

    def observe(self, samples: Mapping[int, tuple[int, int]], resting: Collection[int] = ()) -> bool:
        """One step's ``cell → (work_ns, measured_ns)``; True when a published speed changed (plan again).

        ``resting``: cells that the plan gives nothing. Others without a sample keep what they have. Raises
        ``ValueError`` for a negative time.
        """
        self.step += 1
        tried = [self._rest(cell) for cell in sorted(resting)]
        rates: dict[int, int] = {}
        for cell in sorted(samples):
            work, measured = samples[cell]
            if work < 0 or measured < 0:
                raise ValueError(f"cell {cell}: negative time")
            if work and measured:
                rates[cell] = work * PPM // measured
        if not rates:
            return any(tried)
        ordered = sorted(rates.values())
        usual = max(1, ordered[len(ordered) // 2])
        longest = max(samples[cell][1] for cell in rates)
        changed = [self._update(cell, rate * PPM // usual, longest) for cell, rate in rates.items()]
        return any(changed) or any(tried)

    def _rest(self, cell: int) -> bool:
        """A step without work; whether it is to be tried again."""
        state = self.cells.get(cell)
        if state is None or state.published == PPM:
            return False
        state.rested += 1
        if state.rested < min(self.options.rest << state.trials, self.options.longest_rest):
            return False
        state.recent.clear()
        state.published = min(PPM, 2 * state.published)
        state.rested, state.trials, state.since = 0, state.trials + 1, self.step
        return True

    def _update(self, cell: int, relative: int, computed: int) -> bool:
        state = self.cells.setdefault(cell, _CellSpeed(deque(maxlen=self.options.window)))
        state.recent.append(relative)
        estimate = min(PPM, sorted(state.recent)[3 * len(state.recent) // 4])
        if abs(estimate - state.published) <= self.options.band_ppm:
            state.outside = state.evidence = 0
            return False
        state.outside += 1
        state.evidence += computed
        if state.outside < self.options.patience or state.evidence < self.options.evidence_ns:
            return False
        step = self.options.step_ppm
        rounded = max(step, (estimate + step // 2) // step * step)
        state.published = PPM if estimate >= PPM - self.options.band_ppm else rounded
        if state.published == PPM:
            state.rested = state.trials = 0
        state.outside, state.evidence, state.since = 0, 0, self.step
        return True

    def publish(self, speeds: Mapping[int, int]) -> None:
        """Take ``speeds`` (ppm by cell) over from before, without the measurements behind them."""
        for cell, speed in speeds.items():
            self.cells[cell] = _CellSpeed(deque(maxlen=self.options.window), published=speed, since=self.step)

    def speeds(self) -> dict[int, int]:
        """Published speeds, ppm of the median cell; cells never seen are absent."""
        return {cell: state.published for cell, state in sorted(self.cells.items())}

    def forget(self, cells: Iterable[int]) -> None:
        """Cells that left, or came back as new processes, start without a history."""
        for cell in cells:
            self.cells.pop(cell, None)

    def slow(self, ranks: Mapping[int, tuple[int, ...]] | None = None) -> tuple[SlowRank, ...]:
        """Cells published as slow, the slowest first."""
        found = [
            SlowRank(cell, (ranks or {}).get(cell, ()), state.published, state.since)
            for cell, state in self.cells.items()
            if state.published < self.options.slow_ppm
        ]
        return tuple(sorted(found, key=lambda slow: (slow.speed_ppm, slow.cell)))


def _median(values: Iterable[int]) -> int:
    """Lower middle value: an integer that occurs."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


@dataclass(frozen=True)
class PieceSample:
    """A measured action: ``rows`` through units ``[first, end)`` on a cell of ``speed_ppm`` took ``measured_ns``."""

    first: int
    end: int
    rows: int
    backward: bool
    measured_ns: int
    speed_ppm: int = PPM


def fit_profile(base: Profile, samples: Iterable[PieceSample]) -> Profile:
    """``base`` with unit times scaled to what was measured.

    A unit's factor is the median, over the samples whose range covers it, of
    measured to predicted time; units never measured take the median factor of
    all. Weight-gradient time scales with the backward. Integers throughout.
    """
    factors: dict[bool, dict[int, list[int]]] = {False: {}, True: {}}
    every: dict[bool, list[int]] = {False: [], True: []}
    for sample in sorted(samples, key=lambda s: (s.first, s.end, s.rows, s.backward, s.measured_ns, s.speed_ppm)):
        units = base.units[sample.first : sample.end]
        predicted = sum(u.backward_ns if sample.backward else u.forward_ns for u in units) * sample.rows
        if not predicted:
            continue
        factor = sample.measured_ns * sample.speed_ppm // predicted
        every[sample.backward].append(factor)
        for unit in range(sample.first, sample.end):
            factors[sample.backward].setdefault(unit, []).append(factor)
    overall = {way: _median(found) if found else PPM for way, found in every.items()}

    def scaled(unit: int, cost: UnitCost) -> UnitCost:
        forward = _median(factors[False].get(unit, [overall[False]]))
        backward = _median(factors[True].get(unit, [overall[True]]))
        return replace(
            cost,
            forward_ns=max(1, cost.forward_ns * forward // PPM),
            backward_ns=max(1, cost.backward_ns * backward // PPM),
            weight_grad_ns=cost.weight_grad_ns * backward // PPM,
        )

    return replace(base, units=tuple(scaled(number, unit) for number, unit in enumerate(base.units)))
