"""Evaluation of a shape: its plan, its hash, and the time of its tables.

Idea: shapes are compared by the time of their tables, not by a closed form. The pipelines of a shape are independent
of each other, and in a plain one the same few stages repeat. So its tables are timed natively
(``csrc/plan/pipeline.cpp``), in the orders of :func:`shape_plan`, without being written out. A shape is chosen before a
single piece exists.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megatron.elastic import _plan
from megatron.elastic.plan.cost import PPM, held_bytes, unit_sums
from megatron.elastic.plan.dataflow import Share, deal, microbatch_rows
from megatron.elastic.plan.model import Plan, Profile, Replica, Segment, Topology
from megatron.elastic.plan.planner import assemble
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.search.bound import Reach
from megatron.elastic.plan.search.graph import Shape
from megatron.elastic.plan.search.partition import Model
from megatron.elastic.plan.search.tuning import move_quota
from megatron.elastic.plan.topology import is_whole, living_replicas

__all__ = ["ShapeTimer", "shape_hash", "shape_plan"]


def shape_plan(
    topology: Topology, shape: Shape, profile: Profile, split_backward: bool = False, only: Sequence[int] | None = None
) -> Plan:
    """The plan of a shape; ``only`` restricts it to some pipelines (they are independent of each other).

    Micro-batches are dealt smoothly by quota, so that any prefix of the step is balanced.
    """
    quotas = [pipeline.quota for pipeline in shape.pipelines]
    homes: list[list[int]] = [[] for _ in quotas]
    for microbatch, number in enumerate(deal(sum(quotas), quotas)):
        homes[number].append(microbatch)
    wanted = range(len(quotas)) if only is None else only
    shares = [
        Share(segment.cell, segment.first, segment.end, microbatch_rows(topology.grid, microbatch), wave)
        for number in wanted
        for wave, microbatch in enumerate(homes[number])
        for segment in shape.pipelines[number].segments
    ]
    moved = replace(topology, replicas=shape.replicas())
    return assemble(moved, profile, shares, split_backward, (shape.kind,))


def shape_hash(shape: Shape) -> str:
    """SHA-256 (hex) of holders and quotas, which processes compare before they expand a shape."""
    packed = array("q")
    for pipeline in shape.pipelines:
        packed.extend((pipeline.quota, len(pipeline.segments)))
        for segment in pipeline.segments:
            packed.extend((segment.cell, segment.first, segment.end))
    if sys.byteorder == "big":
        packed.byteswap()
    return hashlib.sha256(b"elastic-shape-1" + packed.tobytes()).hexdigest()


class ShapeTimer:
    """Times shapes by their tables; pipelines alike are timed once."""

    def __init__(self, topology: Topology, profile: Profile, split_backward: bool) -> None:
        self.topology, self.profile, self.split = topology, profile, split_backward
        self.speed = {cell.id: (cell.rate_ppm, cell.memory_bytes) for cell in topology.cells}
        self.known: dict[tuple[object, ...], int] = {}
        self.reach = Reach(topology, profile, split_backward)
        units = profile.units
        self.sums = (
            unit_sums(unit.forward_ns for unit in units),
            unit_sums(unit.backward_ns for unit in units),
            unit_sums(unit.weight_grad_ns for unit in units),
        )
        self.activations = unit_sums(unit.activation_bytes for unit in units)
        self.models: dict[int, Model] = {}

    def best(self, shapes: Iterable[Shape], count: int) -> list[Shape]:
        """The ``count`` fastest by their tables, fastest first; made only where the bound leaves a chance."""
        found: list[Shape] = []
        for shape in shapes:
            if len(found) == count and self.least(shape) >= found[-1].time_ns:
                continue
            found = sorted((*found, self.timed(shape)), key=lambda shape: shape.time_ns)[:count]
        return found

    def least(self, shape: Shape) -> int:
        """Lower bound on any tables of the shape's pipelines, ns."""
        spans = {(s.first, s.end, pipeline.quota) for pipeline in shape.pipelines for s in pipeline.segments}
        return max((self.reach.least(*span) for span in spans if span[2]), default=0)

    def times(self, shape: Shape) -> list[int]:
        """Time of each pipeline, ns (0: it computes nothing)."""
        found = []
        for number, pipeline in enumerate(shape.pipelines):
            seats: dict[int, int] = {}  # of two stages on one cell another time than of two cells
            key = (
                pipeline.quota,
                *(
                    (s.first, s.end, seats.setdefault(s.cell, len(seats)), self.speed[s.cell])
                    for s in pipeline.segments
                ),
            )
            if key not in self.known:
                self.known[key] = self._time(shape, number) if pipeline.quota else 0
            found.append(self.known[key])
        return found

    def _held(self, shape: Shape) -> Callable[[Segment], int]:
        """Bytes that the cell of a segment holds besides activations."""
        shares = self.topology.grid.data_parallel_size
        if not all(is_whole(Replica(pipeline.segments), len(self.profile.units)) for pipeline in shape.pipelines):
            moved = replace(self.topology, replicas=shape.replicas())
            fixed = held_bytes(living_replicas(moved), self.profile, moved.tied, shares)
            return lambda segment: fixed.get(segment.cell, 0)
        holders = max(shares, len(shape.pipelines))
        if holders not in self.models:
            rows = self.topology.grid.micro_batch_size
            self.models[holders] = Model(self.profile, rows, holders, self.topology.tied)
        model = self.models[holders]
        return lambda segment: model.stage_bytes(segment.first, segment.end, 0)

    def _time(self, shape: Shape, number: int) -> int:
        """Of one pipeline: natively where each cell has one stage, else from its tables."""
        pipeline = shape.pipelines[number]
        if len({s.cell for s in pipeline.segments}) < len(pipeline.segments):
            plan = shape_plan(self.topology, shape, self.profile, self.split, only=[number])
            return plan_time(plan, self.profile)
        rows, held = self.topology.grid.micro_batch_size, self._held(shape)
        stages = []
        for s in pipeline.segments:
            speed, memory = self.speed[s.cell]
            forward, backward, weight = (-(-(sums[s.end] - sums[s.first]) * rows * PPM // speed) for sums in self.sums)
            capacity = (memory - held(s)) // max(1, self.activations[s.end] - self.activations[s.first])
            stages.append((forward, backward, weight, self._hop(s.end), capacity))
        return _plan.pipeline_time(stages, pipeline.quota, rows, self.split)

    def _hop(self, end: int) -> int:
        """Transfer of a micro-batch behind unit ``end - 1``, ns."""
        size = self.profile.units[end - 1].boundary_bytes * self.topology.grid.micro_batch_size
        return self.profile.latency_ns + -(-size * 1_000_000_000 // self.profile.link_bytes_per_s)

    def timed(self, shape: Shape) -> Shape:
        """The shape with the time of its own tables."""
        return replace(shape, time_ns=max(self.times(shape)))

    def settled(self, shape: Shape) -> Shape:
        """Micro-batches moved from the slowest pipeline to others as long as that is faster."""
        times = self.times(shape)
        while True:
            slowest = times.index(max(times))
            best, best_times = shape, times
            for target in range(len(times)):
                if target == slowest or shape.pipelines[slowest].quota < 2:
                    continue
                moved = move_quota(shape, slowest, target)
                after = self.times(moved)
                if sorted(after, reverse=True) < sorted(best_times, reverse=True):
                    best, best_times = moved, after
            if best is shape:
                return replace(shape, time_ns=max(times))
            shape, times = best, best_times
