"""Computing costs from traces of real runs: the simulator's cost model for a machine that can be measured.

Idea: the time of a stage's forward or backward has two parts: a fixed part *of each piece* (the data it reads, the
model's wrapper, autograd's start) and the sum of its units' costs. Least squares over stages of several jobs separates
them. Without the fixed part, it would be counted with the embedding and the head, and twice on a stage that has both.
Then pipelines would seem too fast and plain data parallelism too slow.

The pause between two actions is measured where no rank waits. The times of a piece vary from step to step, and a step
lasts as long as the slowest of the ranks that wait for each other. So steps are simulated with ratios of a piece's time
to its median, drawn from the same traces.

Invariant: a prediction for a job uses only the traces that the caller passes. Costs are those of pieces of the traced
size and of a whole backward.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from megatron.elastic.plan.cost import Costs, PieceCost
from megatron.elastic.plan.model import Piece, Plan
from megatron.elastic.plan.schedule.timing import execute

__all__ = [
    "OPS",
    "Between",
    "Calibration",
    "Line",
    "Stage",
    "StepTrace",
    "TracedAction",
    "TracedJob",
    "Unit",
    "calibrated",
]

OPS = ("F", "B")
DRAWS = 101
"""Simulated steps, of which the median is what is predicted."""


class TracedAction(NamedTuple):
    """An action as traced, ns by its rank's clock."""

    op: str
    piece: int
    first: int
    end: int
    start: int
    stop: int


class Stage(NamedTuple):
    """Units ``[first, end)`` of a model of ``units``: embedding, layers, head."""

    first: int
    end: int
    units: int

    @property
    def ends(self) -> tuple[bool, bool]:
        """Two flags: the stage has the embedding, the stage has the head."""
        return self.first == 0, self.end == self.units

    @property
    def layers(self) -> int:
        """Of the stage."""
        return self.end - self.first - sum(self.ends)


@dataclass(frozen=True)
class StepTrace:
    """One step of one rank."""

    work: tuple[TracedAction, ...]
    """By start."""
    compute_ns: int
    """The whole compute phase."""


@dataclass(frozen=True)
class TracedJob:
    """Steps that all ran the same plan: rank → trace, each. Every rank ran one stage."""

    units: int
    steps: tuple[Mapping[int, StepTrace], ...]

    def stage(self, work: TracedAction) -> Stage:
        """Where ``work`` was done."""
        return Stage(work.first, work.end, self.units)

    def traces(self) -> Iterable[StepTrace]:
        """Of all ranks and steps."""
        return (trace for step in self.steps for trace in step.values())


class Unit(NamedTuple):
    """ns of a piece: of itself, and of its units. Only their sums over whole stages mean something."""

    embedding: float
    layer: float
    head: float
    piece: float

    def of(self, stage: Stage) -> float:
        """ns of a piece through ``stage``."""
        return max(0.0, float(np.dot(self, _columns(stage))))


class Line(NamedTuple):
    """ns that grow with the layers of a stage."""

    fixed: float
    layer: float

    def of(self, stage: Stage) -> float:
        """ns at ``stage``."""
        return max(0.0, self.fixed + self.layer * stage.layers)


@dataclass(frozen=True)
class Between:
    """Gaps between actions, ns."""

    after: Mapping[str, Line]
    """Op → from the end of such an action to the start of the next, where that waits for nothing."""
    around: Line
    """In a first stage, of the compute phase: before the first action and after the last."""
    across: float
    """Beyond ``after``: until another rank, which waited for that action, starts. 0 without a pipeline."""

    def costs(self, plan: Plan, units: int, took: Callable[[str, Piece], float]) -> Costs:
        """Of ``plan``'s pieces and edges, when ``took(op, piece)`` ns is what actions last."""
        pieces = []
        for piece in plan.pieces:
            stage = Stage(piece.first, piece.end, units)
            forward, backward = (round(took(op, piece) + self.after[op].of(stage)) for op in OPS)
            pieces.append(PieceCost(forward, backward, 0, 0))
        return Costs(tuple(pieces), (round(self.across),) * len(plan.edges))

    def makespan(self, plan: Plan, units: int, took: Callable[[str, Piece], float]) -> float:
        """The compute phase (ns) of ``plan``'s tables."""
        first = next(Stage(piece.first, piece.end, units) for piece in plan.pieces if piece.first == 0)
        span = execute(plan, self.costs(plan, units, took)).makespan
        return span + self.around.of(first) - self.after["B"].of(first)


@dataclass(frozen=True)
class Calibration:
    """The cost model: what actions take in the median, what lies between them, and how they vary."""

    pieces: Mapping[str, Unit]
    between: Between
    varying: tuple[Mapping[str, tuple[float, ...]], ...]
    """A step of a rank: op → what its actions took, in order, over the medians of their job."""

    def compute_ns(self, plan: Plan, units: int, seed: int = 0) -> float:
        """The compute phase (ns) of a step of ``plan``: the median of ``DRAWS`` simulated ones."""
        rng = random.Random(seed)
        return median(self.between.makespan(plan, units, self._drawn(units, rng)) for _ in range(DRAWS))

    def _drawn(self, units: int, rng: random.Random) -> Callable[[str, Piece], float]:
        """One step's actions: every cell varies as some rank did in some step."""
        steps: dict[int, Mapping[str, tuple[float, ...]]] = {}
        done: dict[tuple[int, str], int] = {}

        def took(op: str, piece: Piece) -> float:
            like = steps.setdefault(piece.cell, rng.choice(self.varying))[op]
            number = done[piece.cell, op] = done.get((piece.cell, op), -1) + 1
            return self.pieces[op].of(Stage(piece.first, piece.end, units)) * like[number % len(like)]

        return took


def calibrated(jobs: Sequence[TracedJob]) -> Calibration:
    """The cost model that ``jobs`` tell. Raises ``ValueError`` when they do not tell pieces, layers and ends apart."""
    samples: dict[str, list[tuple[Stage, float]]] = {op: [] for op in OPS}
    varying: list[Mapping[str, tuple[float, ...]]] = []
    for job in jobs:
        usual = _medians(job)
        for (op, stage), spent in usual.items():
            samples[op].append((stage, spent))
        for trace in job.traces():
            over = [(work.op, (work.stop - work.start) / usual[work.op, job.stage(work)]) for work in trace.work]
            varying.append({op: tuple(ratio for of, ratio in over if of == op) for op in OPS})
    pieces = {op: Unit(*_least_squares(list(map(_columns, s)), t)) for op, (s, t) in _unzipped(samples).items()}
    return Calibration(pieces, _between(jobs), tuple(varying))


def _medians(job: TracedJob) -> dict[tuple[str, Stage], float]:
    """(op, stage) → ns of an action of ``job``."""
    found: dict[tuple[str, Stage], list[int]] = {}
    for trace in job.traces():
        for work in trace.work:
            found.setdefault((work.op, job.stage(work)), []).append(work.stop - work.start)
    return {key: median(spent) for key, spent in found.items()}


def _between(jobs: Sequence[TracedJob]) -> Between:
    """Gaps between the actions of ``jobs``."""
    gaps: dict[tuple[str, Stage], list[int]] = {}
    around: dict[Stage, list[int]] = {}
    for job in jobs:
        for trace in job.traces():
            work = trace.work
            for before, after in pairwise(work):
                if _waits_for_nothing(before, after, job.units):
                    gaps.setdefault((before.op, job.stage(before)), []).append(after.start - before.stop)
            if work[0].first == 0:
                outside = trace.compute_ns - (work[-1].stop - work[0].start)
                around.setdefault(job.stage(work[0]), []).append(outside)
    lies = {op: _line({stage: times for (of, stage), times in gaps.items() if of == op}) for op in OPS}
    hops = [
        target.start - source.stop - lies[source.op].of(job.stage(source))
        for job in jobs
        for step in job.steps
        for source, target in _hops(step)
    ]
    return Between(lies, _line(around), max(0.0, median(hops)) if hops else 0.0)


def _waits_for_nothing(before: TracedAction, after: TracedAction, units: int) -> bool:
    """The backward right after a piece's last forward, and a forward that starts a piece, have all they need."""
    if after.op == "F":
        return after.first == 0
    return before.op == "F" and before.piece == after.piece and after.end == units


def _hops(step: Mapping[int, StepTrace]) -> list[tuple[TracedAction, TracedAction]]:
    """Of a pipeline of two: the second's first forward and the first's last backward have nothing to do but wait."""
    lines = sorted((trace.work for trace in step.values()), key=lambda work: work[0].first)
    if len(lines) != 2 or lines[1][0].first != lines[0][0].end:
        return []
    return [(lines[0][0], lines[1][0]), (lines[1][-1], lines[0][-1])]


def _columns(stage: Stage) -> tuple[float, float, float, float]:
    embedding, head = stage.ends
    return float(embedding), float(stage.layers), float(head), 1.0


def _unzipped(samples: Mapping[str, list[tuple[Stage, float]]]) -> dict[str, tuple[list[Stage], list[float]]]:
    return {op: ([stage for stage, _ in found], [spent for _, spent in found]) for op, found in samples.items()}


def _line(found: Mapping[Stage, Sequence[int]]) -> Line:
    """Through the medians at stages of some depths; at a single depth, what goes through that."""
    rows = np.array([[1.0, float(stage.layers)] for stage in found])
    solved = np.linalg.lstsq(rows, np.array([median(times) for times in found.values()]), rcond=None)[0]
    return Line(*map(float, solved))


def _least_squares(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Costs of the columns, by relative error. Raises ``ValueError`` when the rows leave some open."""
    weights = 1.0 / np.array(times)
    table = np.array(rows) * weights[:, None]
    solved, _, rank, _ = np.linalg.lstsq(table, np.ones(len(times)), rcond=None)
    if rank < table.shape[1]:
        raise ValueError(
            "these jobs cannot separate the cost of a piece from that of embedding and head: add "
            "a job without a pipeline, and jobs of several pipeline sizes"
        )
    return [float(value) for value in solved]
