"""From shapes to plans: the steady plan, its moves, and their pay-back.

Idea: after a change there are two answers. The *instant* one moves nothing:
rows of lost cells go to peers, or damaged pipelines rest and the others take
their micro-batches. The *steady* one is the best shape once units have moved
(state's add, promote, drop), streamed in the background while the instant one
runs. A shape is worth its migration when, over the expected time to the next
change, more steps get done: ``mig / T_now + (horizon - mig) / T_new`` against
``horizon / T_now``.

With reduced cells both answers are the best over the options of the tensor axis (``plan/tensor.py``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Replica, Segment, Topology
from megatron.elastic.plan.planner import Dataflow, Draft, draft_instant
from megatron.elastic.plan.search.graph import GraphOptions, Shape, candidate_shapes
from megatron.elastic.plan.search.shapes import ShapeTimer, shape_hash, shape_plan
from megatron.elastic.plan.search.tuning import bound_shapes, few_microbatches
from megatron.elastic.plan.tensor import crowded, parked, reduced_cells, tensor_options

__all__ = [
    "DecisionOptions",
    "Move",
    "SteadyDecision",
    "decide",
    "migration_ns",
    "shape_hash",
    "shape_plan",
    "steady_plan",
    "transition",
]

MAX_SOURCES = 16
MAX_SHAPES = 4
MAX_SETTLED = 3
HOUR_NS = 3_600_000_000_000
_STILL = ("drop", "stay")
"""Kinds of shapes for which no unit moves."""


@dataclass(frozen=True)
class Move:
    """``cell`` must come to hold ``unit``; any of ``sources`` holds it now (none: only mirrors of its state do)."""

    cell: int
    unit: int
    sources: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class DecisionOptions:
    """Axes that the planner may use (ablations switch them off)."""

    graph: GraphOptions | None = field(default_factory=GraphOptions)
    """None: units never move."""
    reroute: bool = True
    resize: bool = True
    tensor: bool = True
    """Cells that have lost ranks may compute with fewer; False: their other ranks are parked."""
    split_backward: bool = False
    mix_microbatches: bool = False
    horizon_ns: int = HOUR_NS
    """Expected time to the next change of membership."""
    horizon_steps: int | None = None
    """Steps left in the run, where that is known."""
    max_pieces: int = 2_000
    """Above this many pieces rerouting is not tried and shapes are ranked by the closed form alone: with so many
    replicas, resting the damaged one costs little."""


@dataclass(frozen=True)
class SteadyDecision:
    """Instant answer and, if it pays back, the steady one. Times in ns a step."""

    at_once: Draft | Shape | None
    instant_ns: int
    steady: Shape | None
    steady_ns: int
    moves: tuple[Move, ...]
    migration_ns: int

    @property
    def instant(self) -> Plan | Shape | None:
        """The plan that moves no unit; tables of a rerouted plan are written at the first access."""
        return self.at_once.plan if isinstance(self.at_once, Draft) else self.at_once


def steady_plan(topology: Topology, profile: Profile, options: DecisionOptions | None = None) -> Plan:
    """The fastest plan of pipelines the living cells can run once units have moved (no pay-back considered).

    Raises :class:`PlanError` when no shape of the living cells fits their memory.
    """
    options = options or DecisionOptions()
    shapes = _all_shapes(_variants(topology, options), profile, options)
    if not shapes:
        raise PlanError("no shape of the living cells fits their memory")
    return shape_plan(topology, shapes[0], profile, options.split_backward)


def transition(
    before: Iterable[Replica], after: Iterable[Replica], profile: Profile, alive: Iterable[int]
) -> tuple[Move, ...]:
    """Units that cells of ``after`` lack, ascending by (cell, unit). Dead holders are no sources.

    Bytes are parameters plus the new holder's share of optimizer state. At most
    ``MAX_SOURCES`` sources are named a unit, and they differ from mover to mover.
    """
    living = set(alive)
    now = _spans(segment for replica in before for segment in replica.segments if segment.cell in living)
    then = _spans(segment for replica in after for segment in replica.segments)
    lacking = [
        (cell, unit)
        for cell in sorted(cell for cell, spans in then.items() if now.get(cell) != spans)
        for unit in _units(then[cell])
        if not any(a <= unit < b for a, b in now.get(cell, ()))
    ]
    wanted = sorted({unit for _, unit in lacking})
    sources = _holders(now, wanted)
    owners = _holders(then, wanted)
    moves = []
    for number, (cell, unit) in enumerate(lacking):
        state = profile.units[unit].state_bytes // len(owners[unit])
        some = _some(sources[unit], number)
        moves.append(Move(cell, unit, some, profile.units[unit].param_bytes + state))
    return tuple(moves)


def _spans(segments: Iterable[Segment]) -> dict[int, tuple[tuple[int, int], ...]]:
    """Unit ranges by cell."""
    spans: dict[int, tuple[tuple[int, int], ...]] = {}
    for segment in segments:
        spans[segment.cell] = (*spans.get(segment.cell, ()), (segment.first, segment.end))
    return spans


def _units(spans: Iterable[tuple[int, int]]) -> list[int]:
    return sorted({unit for a, b in spans for unit in range(a, b)})


def _holders(spans: dict[int, tuple[tuple[int, int], ...]], units: Sequence[int]) -> dict[int, list[int]]:
    """Cells that hold each of ``units``."""
    found: dict[int, list[int]] = {unit: [] for unit in units}
    by_range: dict[tuple[int, int], list[int]] = {}
    for cell, ranges in spans.items():
        for span in ranges:
            by_range.setdefault(span, []).append(cell)
    for (a, b), cells in by_range.items():
        for unit in units[bisect_left(units, a) : bisect_left(units, b)]:
            found[unit].extend(cells)
    return {unit: sorted(set(cells)) for unit, cells in found.items()}


def _some(cells: Sequence[int], start: int) -> tuple[int, ...]:
    """At most ``MAX_SOURCES`` of ``cells``, another window for each ``start``."""
    if len(cells) <= MAX_SOURCES:
        return tuple(cells)
    first = start * MAX_SOURCES % len(cells)
    return tuple(sorted((*cells[first : first + MAX_SOURCES], *cells[: max(0, first + MAX_SOURCES - len(cells))])))


def migration_ns(moves: Sequence[Move], profile: Profile) -> int:
    """Time of a migration: the busiest link end, each unit's sources sharing the sending."""
    load: dict[tuple[bool, int], int] = {}
    for move in moves:
        load[True, move.cell] = load.get((True, move.cell), 0) + move.bytes
        for source in move.sources:
            load[False, source] = load.get((False, source), 0) + -(-move.bytes // len(move.sources))
    return -(-max(load.values(), default=0) * 1_000_000_000 // profile.link_bytes_per_s)


def decide(topology: Topology, profile: Profile, options: DecisionOptions | None = None) -> SteadyDecision:
    """Instant and steady answer to the present topology.

    Raises :class:`PlanError` when neither exists: no unit group survives and no
    shape fits memory.
    """
    options = options or DecisionOptions()
    variants = _variants(topology, options)
    by_variant = [(variant, _shapes(variant, profile, options)) for variant in variants]
    instant, instant_ns = _fastest_instant(by_variant, profile, options)
    shapes = sorted((shape for _, some in by_variant for shape in some), key=lambda shape: shape.time_ns)
    best: Shape | None = None
    best_ns, best_moves, best_migration = instant_ns, tuple[Move, ...](), 0
    horizon = options.horizon_ns
    if options.horizon_steps is not None and instant_ns:
        horizon = min(horizon, options.horizon_steps * instant_ns)
    best_done = _steps(horizon, 0, instant_ns, instant_ns)
    for shape in shapes[:MAX_SHAPES] if options.graph is not None else ():
        if _steps(horizon, 0, instant_ns, shape.time_ns) <= best_done:
            break
        moves = transition(topology.replicas, shape.replicas(), profile, (cell.id for cell in topology.cells))
        migration = migration_ns(moves, profile)
        done = _steps(horizon, migration, instant_ns, shape.time_ns)
        if done > best_done:
            best, best_ns, best_moves, best_migration, best_done = shape, shape.time_ns, moves, migration, done
    if instant is None and best is None:
        raise PlanError("no living holder for some unit, and no shape of the living cells fits their memory")
    return SteadyDecision(instant, instant_ns, best, best_ns, best_moves, best_migration)


def _variants(topology: Topology, options: DecisionOptions) -> tuple[Topology, ...]:
    """Options of the tensor axis: which reduced cells compute, and which cells share a pipeline.

    Raises :class:`PlanError` when no cell computes.
    """
    cut = options.graph is not None
    found = tensor_options(topology, cut) if options.tensor else (parked(topology, reduced_cells(topology)),)
    if not found[0].cells:
        raise PlanError("every tensor-parallel group has lost a rank: no cell can compute")
    return found


def _all_shapes(variants: Iterable[Topology], profile: Profile, options: DecisionOptions) -> list[Shape]:
    found = [shape for variant in variants for shape in _shapes(variant, profile, options)]
    return sorted(found, key=lambda shape: shape.time_ns)


def _fastest_instant(
    by_variant: Iterable[tuple[Topology, Sequence[Shape]]], profile: Profile, options: DecisionOptions
) -> tuple[Draft | Shape | None, int]:
    """Return the fastest answer over the options that moves nothing, and its time (0: there is none)."""
    found = [_instant(variant, profile, options, shapes) for variant, shapes in by_variant]
    able = [(answer, time) for answer, time in found if answer is not None]
    return min(able, key=lambda one: one[1], default=(None, 0))


def _shapes(topology: Topology, profile: Profile, options: DecisionOptions) -> list[Shape]:
    """Shapes to consider, fastest first; without the graph axis only those that move nothing."""
    wanted = options.graph or GraphOptions(alike=False, recut=False, pool=False, drop=True)
    shapes: list[Shape] = []
    by_tables = _piece_count(topology) <= options.max_pieces
    wanted = replace(wanted, every_pool=by_tables)
    for split, late in ((True, True), (True, False), (False, False)) if options.split_backward else ((False, False),):
        if not by_tables and (shapes or (split and not late)):
            continue  # only tables can tell whether an optimistic estimate holds
        try:
            shapes += candidate_shapes(topology, profile, replace(wanted, split_backward=split, late_weights=late))
        except PlanError:
            continue
    shapes.sort(key=lambda shape: shape.time_ns)
    if not by_tables:
        return shapes
    shapes = list(dict.fromkeys(shapes))
    near = [shape for number, shape in enumerate(shapes) if number < 2 * MAX_SHAPES or shape.kind in _STILL]
    timer = ShapeTimer(topology, profile, options.split_backward)
    timed = timer.best((shape for shape in near if shape.kind not in _STILL), MAX_SHAPES)
    timed += [timer.timed(shape) for shape in near if shape.kind in _STILL]
    if wanted.pool and options.split_backward and not wanted.even_quotas and few_microbatches(topology):
        tried = timer.best(bound_shapes(topology, profile, True), MAX_SETTLED)
        timed += [timer.settled(shape) for shape in tried]
    return sorted(timed, key=lambda shape: shape.time_ns)


def _instant(
    topology: Topology, profile: Profile, options: DecisionOptions, shapes: Sequence[Shape]
) -> tuple[Draft | Shape | None, int]:
    """The fastest answer that moves nothing, and its time (0: there is none)."""
    found: list[tuple[int, int, Draft | Shape]] = []
    for shape in shapes:
        if shape.kind in _STILL or (shape.kind == "keep" and all(pipeline.quota for pipeline in shape.pipelines)):
            found.append((shape.time_ns, 0, shape))
    if _piece_count(topology) <= options.max_pieces:
        flows: list[Dataflow] = []
        if options.reroute:
            flows.append("reroute")
        if options.resize and (topology.grid.micro_batch_size > 1 or not flows):
            flows.append("resize")
        for number, flow in enumerate(flows, start=1):
            try:
                draft = draft_instant(topology, profile, flow, options.mix_microbatches, options.split_backward)
            except PlanError:
                continue
            reduced = reduced_cells(topology)
            if reduced and crowded(draft.beside(reduced), profile, topology.tied):
                continue
            found.append((draft.time_ns, number, draft))
    if not found:
        return None, 0
    time, _, best = min(found, key=lambda item: item[:2])
    return best, time


def _piece_count(topology: Topology) -> int:
    """Nominal number of pieces of a step."""
    segments = sum(len(replica.segments) for replica in topology.replicas)
    grid = topology.grid
    return segments * grid.global_batch_size // max(1, grid.micro_batch_size * len(topology.replicas))


def _steps(horizon: int, migration: int, now: int, new: int) -> int:
    """Millionths of steps done within ``horizon`` when the first ``migration`` ns run at ``now`` (0: stalled)."""
    if not new:
        return 0
    migration = min(migration, horizon)
    waiting = migration * 1_000_000 // now if now else 0
    return waiting + (horizon - migration) * 1_000_000 // new
