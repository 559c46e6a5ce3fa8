"""The graph axis: which units sit on which cells, over whole-topology shapes.

Idea: a shape is a set of pipelines with a quota of nominal micro-batches each;
the step lasts as long as its slowest pipeline. Because quotas are free, a
damaged pipeline need not match the others: it is cut anew over the cells it has
left and computes fewer samples. The candidates:

* *alike*: every pipeline the same length, left-over cells idle;
* *recut*: damaged (or unbalanced) pipelines by themselves, the others untouched;
* *pool*: damaged pipelines and a few healthy ones are dissolved and their cells
  form pipelines of the best lengths (merged, re-lengthened, cells of a dead
  replica joining others), found by an unbounded knapsack;
* *drop*: damaged pipelines idle;
* *stay*: pipelines with a cell of fewer ranks than at launch go on with fewer micro-batches.

Sources: ElasWave (arXiv 2510.00606) migrates layers between stages; unequal
replicas and quotas go beyond it. The knapsack is Dinkelbach-like: with the best
time so far as deadline, it maximises the micro-batches that fit, and repeats
while that is enough for the whole batch in less time.

All integers, all ties broken by position: deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.elastic import _plan
from megatron.elastic.plan.cost import PPM
from megatron.elastic.plan.dataflow import PlanError, apportion, microbatches
from megatron.elastic.plan.model import Profile, Replica, Segment, Topology
from megatron.elastic.plan.search.partition import (
    CellCapacity,
    Model,
    PipelineTime,
    cut_pipeline,
    nearest_cuts,
    pipeline_time,
    share_out,
)
from megatron.elastic.plan.topology import is_whole

__all__ = [
    "GraphOptions",
    "Pipeline",
    "Shape",
    "candidate_shapes",
    "knapsack",
    "pipeline_bound",
    "ranks",
    "seats",
    "work_bound",
]

Range = tuple[int, int]


@dataclass(frozen=True)
class GraphOptions:
    """Which shapes may be considered (ablations switch them off)."""

    alike: bool = True
    recut: bool = True
    pool: bool = True
    drop: bool = True
    stay: bool = True
    split_backward: bool = False
    """Rank shapes by zero-bubble tables instead of 1F1B."""
    late_weights: bool = True
    """With a split backward, ask for the memory of all its late weight gradients; else only for 1F1B's, and tables
    defer them as far as memory goes (the closed form is then too hopeful)."""
    even_quotas: bool = False
    """Every pipeline computes the same number of micro-batches (the dataflow axis off)."""
    pool_cells: int = 128
    """Largest number of cells dissolved into one pool."""
    pool_replicas: int = 12
    """Most healthy replicas dissolved beside the damaged ones."""
    every_pool: bool = True
    """A larger pool need not beat a smaller one by the closed form: for callers that rank by tables afterwards."""

    @property
    def cuts(self) -> bool:
        """True if a whole replica may be cut anew."""
        return self.alike or self.recut or self.pool


@dataclass(frozen=True)
class Pipeline:
    """One replica to be: its segments and how many nominal micro-batches it computes a step."""

    segments: tuple[Segment, ...]
    quota: int


@dataclass(frozen=True)
class Shape:
    """Pipelines that share a batch; ``time_ns`` by the closed form, ``kind`` names the generator."""

    pipelines: tuple[Pipeline, ...]
    time_ns: int
    kind: str

    def replicas(self) -> tuple[Replica, ...]:
        """The shape as replicas, pipelines without quota included (they hold units and own state)."""
        return tuple(Replica(pipeline.segments) for pipeline in self.pipelines)


@dataclass(frozen=True)
class _Line:
    """A pipeline under consideration."""

    segments: tuple[Segment, ...]
    time: PipelineTime


class _Search:
    """Candidate generation over one topology; caches cuts by what the cells are like and hold."""

    def __init__(self, topology: Topology, profile: Profile, options: GraphOptions, margin: int = 1) -> None:
        self.total = microbatches(topology.grid)
        self.options = options
        self.model = Model(
            profile,
            topology.grid.micro_batch_size,
            topology.grid.data_parallel_size,
            topology.tied,
            options.split_backward,
            (self.total, len(topology.cells)),
        )
        self.model.late_weights &= options.late_weights
        self.model.margin = margin
        self.longest = max(len(replica.segments) for replica in topology.replicas)
        self.places = {cell.id: CellCapacity(cell.rate_ppm, cell.memory_bytes) for cell in topology.cells}
        self.cuts: dict[tuple[tuple[CellCapacity, ...], tuple[tuple[Range, ...], ...]], tuple[int, ...] | None] = {}
        self.holds: dict[int, tuple[Range, ...]] = {}
        for replica in topology.replicas:
            for segment in replica.segments:
                span = (segment.first, segment.end)
                self.holds[segment.cell] = (*self.holds.get(segment.cell, ()), span)
        self.ranks = ranks(self.places, self.holds, self.model.units)
        self.idle = [cell for cell in self.places if cell not in self.holds]
        self.healthy: list[_Line] = []
        self.slow: list[_Line] = []
        """Whole pipelines that would gain by another cut: those of ``damaged`` that can compute as they are."""
        self.small = {cell.id for cell in topology.cells if cell.nominal_ppm < PPM}
        self.damaged: list[list[int]] = []
        self.even: dict[CellCapacity, dict[int, PipelineTime | None]] = {}
        self.as_is: dict[tuple[tuple[tuple[int, int, int], ...], tuple[CellCapacity, ...]], tuple[PipelineTime, bool]]
        self.as_is = {}
        self.present = frozenset(replica.segments for replica in topology.replicas)
        for replica in topology.replicas:
            self._sort_in(replica)

    def _sort_in(self, replica: Replica) -> None:
        """A replica is healthy when all its cells live and cutting it anew would gain less than 1%, or is no option."""
        cells = list(dict.fromkeys(segment.cell for segment in replica.segments))
        living = [cell for cell in cells if cell in self.places]
        if len(living) < len(cells) or not is_whole(replica, self.model.units):
            self.damaged.append(living)
            return
        spans = tuple((s.first, s.end, cells.index(s.cell)) for s in replica.segments)
        key = (spans, tuple(self.places[cell] for cell in cells))
        if key not in self.as_is:
            now = self._time_as_is(replica, cells)
            better = self.line(cells)
            settled = better is None or now.each * 99 <= better.time.each * 100
            self.as_is[key] = now, settled or not self.options.cuts
        now, settled = self.as_is[key]
        fits = self._fits_as_is(replica)
        if settled and fits:
            self.healthy.append(_Line(replica.segments, now))
            return
        self.damaged.append(living)
        if fits:
            self.slow.append(_Line(replica.segments, now))

    def _fits_as_is(self, replica: Replica) -> bool:
        """Return whether the replica's reduced cells have memory for the units that they hold."""
        held = zip(replica.segments, self.model.in_flight(len(replica.segments)), strict=True)
        small = [(segment, count) for segment, count in held if segment.cell in self.small]
        return self._fit([segment for segment, _ in small], [count for _, count in small])

    def _time_as_is(self, replica: Replica, cells: Sequence[int]) -> PipelineTime:
        """Closed form for a replica as it stands; interleaving divides the bubble by the chunks."""
        spans = [self.model.stage_time(s.first, s.end, self.places[s.cell]) for s in replica.segments]
        work = dict.fromkeys(cells, 0)
        for segment, time in zip(replica.segments, spans, strict=True):
            work[segment.cell] += time
        hop = self.model.transfer if len(spans) > 1 else 0
        slowest = max(work.values())
        ratio = self.model.fill[-1] * PPM // max(1, self.model.work[-1])
        fill = (sum(work.values()) - slowest) * len(cells) // len(spans) * ratio // PPM
        return PipelineTime(fill + (2 * (len(spans) - 1) - 1) * hop, slowest + hop)

    def line(self, cells: Sequence[int]) -> _Line | None:
        """``cells`` in this order as one pipeline, or None when memory forbids it."""
        places = tuple(self.places[cell] for cell in cells)
        holds = tuple(self.holds.get(cell, ()) for cell in cells)
        key = (places, holds)
        if key not in self.cuts:
            cuts = cut_pipeline(self.model, places)
            if cuts is not None:
                slowest = max(self.model.stage_time(a, b, p) for a, b, p in zip(cuts, cuts[1:], places, strict=False))
                cuts = nearest_cuts(self.model, places, slowest, holds) or cuts
            self.cuts[key] = cuts
        found = self.cuts[key]
        if found is None:
            return None
        segments = tuple(Segment(cell, a, b) for cell, a, b in zip(cells, found, found[1:], strict=False) if b > a)
        return _Line(segments, pipeline_time(self.model, places, found))

    def shape(self, lines: Sequence[_Line], kind: str) -> Shape:
        times = [line.time for line in lines]
        quotas, time = share_out(self.total, times)
        if self.options.even_quotas:
            quotas = apportion(self.total, [1] * len(lines))
            time = max(line.of(quota) for line, quota in zip(times, quotas, strict=True))
        pipelines = tuple(Pipeline(line.segments, quota) for line, quota in zip(lines, quotas, strict=True))
        return Shape(pipelines, time, kind)

    def recut(self) -> list[_Line]:
        """Healthy lines as they are, damaged ones cut anew by themselves (dropped where memory forbids)."""
        again = (self.line(cells) for cells in self.damaged if cells)
        return self.healthy + [line for line in again if line is not None]

    def few_microbatches(self) -> bool:
        """True if pipelines compute fewer micro-batches than they could hold: memory then depends on quotas."""
        return self.total * self.longest < (self.longest - 1) * len(self.places)

    def fits_memory(self, shape: Shape) -> bool:
        """True if every cell of a pipeline that is cut anew fits with the micro-batches that it really computes."""
        for pipeline in (one for one in shape.pipelines if one.segments not in self.present):
            stages = len(pipeline.segments)
            most = [stages if self.model.late_weights else stages - stage for stage in range(stages)]
            if not self._fit(pipeline.segments, [min(pipeline.quota, count) for count in most]):
                return False
        return True

    def _fit(self, segments: Sequence[Segment], in_flight: Sequence[int]) -> bool:
        """Return whether each cell has the memory for all its segments, with so many micro-batches in each."""
        need: dict[int, int] = {}
        for segment, count in zip(segments, in_flight, strict=True):
            held = self.model.stage_bytes(segment.first, segment.end, count)
            need[segment.cell] = need.get(segment.cell, 0) + held
        return all(held <= self.places[cell].memory_bytes for cell, held in need.items())

    def dropped(self) -> Shape:
        """Damaged lines compute nothing; their living cells still hold what they hold. Nothing moves."""
        return self._resting(self.shape(self.healthy, "drop"), self.damaged)

    def staying(self) -> Shape:
        """Every whole pipeline computes as it is, slow ones fewer micro-batches; the cells of others rest."""
        lines = self.healthy + self.slow
        computing = {segment.cell for line in lines for segment in line.segments}
        rest = [[cell for cell in cells if cell not in computing] for cells in self.damaged]
        return self._resting(self.shape(lines, "stay"), rest)

    def _resting(self, shape: Shape, resting: Iterable[Sequence[int]]) -> Shape:
        """``shape`` with cells that hold their units and compute nothing."""
        held = (tuple(Segment(cell, a, b) for cell in cells for a, b in self.holds[cell]) for cells in resting)
        return replace(shape, pipelines=shape.pipelines + tuple(Pipeline(some, 0) for some in held if some))

    def alike(self) -> Iterable[list[_Line]]:
        """All living cells in pipelines of one length, for each length worth trying."""
        cells = [s.cell for line in self.healthy for s in line.segments]
        cells += [cell for damaged in self.damaged for cell in damaged] + self.idle
        cells = list(dict.fromkeys(cells))
        nominal = len(self.healthy) + len(self.damaged)
        for count in range(nominal, 0, -1):
            length = min(len(cells) // count, self.model.units)
            lines = self.form(cells, [length] * count) if length else None
            if lines is not None:
                yield lines
                return

    def pools(self, best: int) -> Iterable[list[_Line]]:
        """Dissolve damaged lines, idle cells and ``k`` healthy lines; re-form them against deadline ``best``."""
        loose = [cell for damaged in self.damaged for cell in damaged] + self.idle
        for count in range(min(len(self.healthy), self.options.pool_replicas) + 1):
            kept = self.healthy[: len(self.healthy) - count]
            cells = loose + [s.cell for line in self.healthy[len(kept) :] for s in line.segments]
            if len(cells) > self.options.pool_cells:
                return
            for lines, reached in self._fill(kept, list(dict.fromkeys(cells)), best) if cells else ():
                yield lines
                best = best if self.options.every_pool else min(best, reached)

    def _fill(self, kept: list[_Line], cells: list[int], best: int) -> Iterable[tuple[list[_Line], int]]:
        table = self.lengths(cells)
        deadline = best
        while table:
            rest = sum(line.time.fits(deadline - 1) for line in kept)
            lengths, fits = knapsack(len(cells), {p: time.fits(deadline - 1) for p, time in table.items()})
            if rest + fits < self.total or not lengths:
                return
            times = [line.time for line in kept] + [table[p] for p in lengths]
            _, reached = share_out(self.total, times)
            lines = self.form(cells, lengths)
            if lines is not None:
                yield kept + lines, reached
            if reached >= deadline:
                return
            deadline = reached

    def lengths(self, cells: Sequence[int]) -> dict[int, PipelineTime]:
        """Pipeline lengths worth having over average cells of the pool: each faster than all shorter ones."""
        speed = sum(self.places[cell].speed_ppm for cell in cells) // len(cells)
        place = CellCapacity(speed, min(self.places[cell].memory_bytes for cell in cells))
        known = self.even.setdefault(place, {})
        found: dict[int, PipelineTime] = {}
        fastest: int | None = None
        for length in range(1, min(len(cells), self.model.units) + 1):
            if length not in known:
                known[length] = self._even_time(place, length)
            time = known[length]
            if time is None:
                continue
            if fastest is None or time.each < fastest:
                found[length] = time
                fastest = time.each
        return found

    def _even_time(self, place: CellCapacity, length: int) -> PipelineTime | None:
        """A pipeline of ``length`` cells alike, None when memory forbids it."""
        places = (place,) * length
        cuts = cut_pipeline(self.model, places)
        return None if cuts is None else pipeline_time(self.model, places, cuts)

    def form(self, cells: Sequence[int], lengths: Sequence[int]) -> list[_Line] | None:
        """Pipelines of ``lengths`` over ``cells``; a cell goes where the units are that it holds already."""
        lines = [self.line(seated) for seated in seats(cells, lengths, self.ranks)]
        return [line for line in lines if line] if all(lines) else None


def ranks(cells: Iterable[int], holds: Mapping[int, tuple[Range, ...]], units: int) -> dict[int, int]:
    """Order of ``cells`` by where in the model the units they hold lie on average; those that hold none: halfway."""
    middle = {
        cell: sum(a + b for a, b in holds[cell]) * PPM // (2 * len(holds[cell]) * units) if cell in holds else PPM // 2
        for cell in cells
    }
    return {cell: rank for rank, cell in enumerate(sorted(middle, key=lambda cell: (middle[cell], cell)))}


def seats(cells: Sequence[int], lengths: Sequence[int], order: Mapping[int, int]) -> list[list[int]]:
    """Cells of pipelines of ``lengths``, each near the units it holds already; cells too many are left out."""
    ordered = sorted(cells, key=order.__getitem__)[: sum(lengths)]
    slots = sorted(
        ((2 * stage + 1) * PPM // (2 * length), number, stage)
        for number, length in enumerate(lengths)
        for stage in range(length)
    )
    placed: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for (_, number, stage), cell in zip(slots, ordered, strict=False):
        placed[number].append((stage, cell))
    return [[cell for _, cell in sorted(pipeline)] for pipeline in placed]


def knapsack(capacity: int, values: dict[int, int]) -> tuple[list[int], int]:
    """Return the lengths (any number of each) of total at most ``capacity`` with the largest value, and that value."""
    longest = min(capacity, max(values, default=0))
    lengths = _plan.knapsack(capacity, [max(0, values.get(length, 0)) for length in range(longest + 1)])
    return lengths, sum(values[length] for length in lengths)


def candidate_shapes(topology: Topology, profile: Profile, options: GraphOptions | None = None) -> list[Shape]:
    """Shapes for the living cells, the fastest first (ties: the one that moves less, by generator order).

    Raises :class:`PlanError` when no shape fits the cells' memory.
    """
    options = options or GraphOptions()
    search = _Search(topology, profile, options)
    shapes = _generate(search, options)
    if search.few_microbatches():
        fitting = [shape for shape in shapes if search.fits_memory(shape)]
        # Where cells differ in speed one pipeline may compute far more than its share of the micro-batches.
        careful = [] if fitting == shapes else [_Search(topology, profile, options, margin=search.total)]
        for other in (_Search(topology, profile, options, margin=-1), *careful):
            fitting += [shape for shape in _generate(other, options) if other.fits_memory(shape)]
        shapes = fitting
    if not shapes:
        raise PlanError("no shape of the living cells fits their memory")
    return sorted(shapes, key=lambda shape: shape.time_ns)


def _generate(search: _Search, options: GraphOptions) -> list[Shape]:
    """Shapes of every generator switched on."""
    shapes: list[Shape] = []
    if (options.recut or not (options.cuts or search.damaged)) and (lines := search.recut()):
        shapes.append(search.shape(lines, "recut" if search.damaged else "keep"))
    if options.drop and search.healthy and search.damaged:
        shapes.append(search.dropped())
    if options.stay and search.small and (search.healthy or search.slow):
        shapes.append(search.staying())
    if options.alike:
        shapes.extend(search.shape(lines, "alike") for lines in search.alike())
    if options.pool:
        worst = min((shape.time_ns for shape in shapes), default=_serial_time(search))
        shapes.extend(search.shape(lines, "pool") for lines in search.pools(worst))
    return shapes


def _serial_time(search: _Search) -> int:
    """An upper bound when nothing else is known: one slow pipeline computes everything."""
    slowest = min(place.speed_ppm for place in search.places.values())
    return (search.total + 1) * (
        search.model.work[-1] * PPM // slowest + search.model.transfer * 2 * search.model.units
    )


def pipeline_bound(topology: Topology, profile: Profile, split_backward: bool = False) -> int:
    """Least step time (ns), by the closed form, of any set of 1F1B (or ZB-H1) pipelines under the cells' memory.

    For a deadline, an unbounded knapsack over pipeline lengths (each with its
    minimax cut) gives the most micro-batches that any set of pipelines can finish;
    bisection gives the least sufficient deadline. Unequal cells are taken at their
    mean speed and smallest memory. The closed form is somewhat pessimistic for uneven
    stages: ``bound.schedule_bound`` holds for any schedule. Where units are
    now is ignored. Raises :class:`PlanError` if nothing fits.
    """
    search = _Search(topology, profile, GraphOptions(split_backward=split_backward))
    search.model, search.even = search.model.optimistic(), {}
    cells = list(search.places)
    table = search.lengths(cells)
    if not table:
        raise PlanError("no shape of the living cells fits their memory")
    low, high = 0, max(time.of(search.total) for time in table.values())
    while low < high:
        middle = (low + high) // 2
        _, fits = knapsack(len(cells), {length: time.fits(middle) for length, time in table.items()})
        if fits >= search.total:
            high = middle
        else:
            low = middle + 1
    return low


def work_bound(topology: Topology, profile: Profile) -> int:
    """Step time (ns) if all living cells were busy all the time: no schedule can do better."""
    work = sum(unit.forward_ns + unit.backward_ns for unit in profile.units) * topology.grid.global_batch_size
    return -(-work * PPM // sum(cell.rate_ppm for cell in topology.cells))
