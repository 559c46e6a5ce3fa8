"""Cutting the model over one pipeline's cells.

Idea: take the cells in order and let each one hold as many units as T and its memory allow. This decides exactly
whether every stage can finish a micro-batch within T, since a cell that starts later never reaches less far.
Bisection over T gives the minimax cut. A second pass picks, among all cuts within that T, the one that moves the
fewest bytes. Both are native (``csrc/plan/partition.cpp``).

A 1F1B pipeline with stage times ``t_s`` (forward and backward of one nominal
micro-batch) takes ``sum(t_s) + (n - 1) max(t_s)`` for ``n`` micro-batches plus
transfers: :class:`PipelineTime`. With a split backward a stage's fill and drain
shrink by twice its weight-gradient time (ZB-H1, arXiv 2401.10241). That is exact for even stages and somewhat
pessimistic for uneven ones with few micro-batches; it only ranks shapes
(``timing`` runs the tables).

Memory of stage ``s`` of ``p``: parameters, its share of optimizer state, and activations of the ``p - s`` micro-batches
that 1F1B holds there. With a split backward, whose weight gradients come late, these are ``p`` micro-batches. A stage
never holds more micro-batches than it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from megatron.elastic import _plan
from megatron.elastic.plan.cost import PPM, unit_sums
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Profile

__all__ = ["CellCapacity", "Model", "PipelineTime", "cut_pipeline", "nearest_cuts", "pipeline_time", "share_out"]


class CellCapacity(NamedTuple):
    """The properties of a cell that partitioning needs."""

    speed_ppm: int = PPM
    memory_bytes: int = 1 << 62


@dataclass(frozen=True)
class PipelineTime:
    """Step time of a pipeline for ``n >= 1`` nominal micro-batches, ns: the larger of two lines.

    ``fixed + n * each`` counts all work. With a split backward and fewer
    micro-batches than stages there are too few weight gradients to fill with; then
    the chain of forwards and input gradients, ``chain_fixed + n * chain_each``, rules.
    """

    fixed: int
    each: int
    chain_fixed: int = 0
    chain_each: int = 0

    def of(self, count: int) -> int:
        """Time for ``count`` micro-batches; an unused pipeline takes none."""
        if not count:
            return 0
        return max(self.fixed + count * self.each, self.chain_fixed + count * self.chain_each)

    def fits(self, time: int) -> int:
        """Most micro-batches within ``time``."""
        fits = (time - self.fixed) // self.each
        if self.chain_each:
            fits = min(fits, (time - self.chain_fixed) // self.chain_each)
        return max(0, fits)


def share_out(total: int, times: Sequence[PipelineTime]) -> tuple[tuple[int, ...], int]:
    """Quotas that minimise the slowest pipeline's time, and that time in ns.

    Raises :class:`PlanError` without pipelines.
    """
    if not times:
        raise PlanError("no pipeline is left to compute anything")
    classes: dict[PipelineTime, int] = {}
    for time in times:
        classes[time] = classes.get(time, 0) + 1
    low, high = 0, min(time.of(total) for time in classes)
    while low < high:
        middle = (low + high) // 2
        if sum(time.fits(middle) * count for time, count in classes.items()) >= total:
            high = middle
        else:
            low = middle + 1
    quotas = [time.fits(low) for time in times]
    excess = sum(quotas) - total
    for number in range(len(times) - 1, -1, -1):
        if excess and quotas[number] and times[number].of(quotas[number]) == low:
            quotas[number] -= 1
            excess -= 1
    return tuple(quotas), low


class Model:
    """Prefix sums over units for one micro-batch size; ``holders`` share each unit's optimizer state."""

    def __init__(
        self,
        profile: Profile,
        micro_batch_size: int,
        holders: int,
        tied: Sequence[tuple[int, int]] = (),
        split_backward: bool = False,
        share: tuple[int, int] | None = None,
    ) -> None:
        self.units = len(profile.units)
        self.split_backward = split_backward
        self.share = share
        self.late_weights = split_backward
        self.margin = 1
        self.micro_batch_size = micro_batch_size
        self.work = unit_sums((u.forward_ns + u.backward_ns) * micro_batch_size for u in profile.units)
        late = 2 if split_backward else 0
        self.fill = unit_sums(
            max(0, u.forward_ns + u.backward_ns - late * u.weight_grad_ns) * micro_batch_size for u in profile.units
        )
        self.chain = unit_sums(
            (u.forward_ns + u.backward_ns - u.weight_grad_ns) * micro_batch_size for u in profile.units
        )
        shares = max(1, holders)
        self.static = unit_sums(u.param_bytes - (-profile.resident_bytes(u) // shares) for u in profile.units)
        self.held = unit_sums(u.activation_bytes * micro_batch_size for u in profile.units)
        self.moved = unit_sums(u.param_bytes + u.state_bytes // max(1, holders) for u in profile.units)
        widest = max((u.boundary_bytes for u in profile.units), default=0) * micro_batch_size
        self.transfer = profile.latency_ns + -(-widest * 1_000_000_000 // profile.link_bytes_per_s)
        self.tied = tuple(tied)
        self.native = _plan.Partition(self.work, self.static, self.held, self.tied, self.moved)

    def stage_time(self, first: int, end: int, place: CellCapacity) -> int:
        """Forward and backward of one micro-batch through ``[first, end)``, ns."""
        return -(-(self.work[end] - self.work[first]) * PPM // place.speed_ppm)

    def stage_bytes(self, first: int, end: int, in_flight: int) -> int:
        """Memory of a stage that holds ``in_flight`` micro-batches; a tied weight counts once."""
        need = self.static[end] - self.static[first] + in_flight * (self.held[end] - self.held[first])
        for one, other in self.tied:
            if first <= one < end and first <= other < end:
                need -= min(self.static[unit + 1] - self.static[unit] for unit in (one, other))
        return need

    def in_flight(self, stages: int) -> list[int]:
        """Micro-batches each stage holds at most: fewer towards the end in 1F1B, ``stages`` everywhere in ZB-H1.

        Never more than the pipeline computes: with ``share = (micro-batches, cells)``
        of the step that is taken to be the pipeline's part of the cells, rounded up, and ``margin`` more.
        """
        most = stages
        if self.share is not None:
            most = min(stages, max(1, -(-self.share[0] * stages // self.share[1]) + self.margin))
        return [most] * stages if self.late_weights else [most] * (stages - most) + list(range(most, 0, -1))

    def optimistic(self) -> Model:
        """The same model for bounds: no more memory than any schedule of full speed needs, quotas rounded down."""
        other = copy(self)
        other.late_weights, other.margin = False, -1
        return other

    def seats(self, places: Sequence[CellCapacity]) -> list[tuple[int, int, int]]:
        """Speed, memory and micro-batches held of each place of a pipeline."""
        held = self.in_flight(len(places))
        return [(place.speed_ppm, place.memory_bytes, some) for place, some in zip(places, held, strict=True)]


def cut_pipeline(model: Model, places: Sequence[CellCapacity]) -> tuple[int, ...] | None:
    """Minimax cut of all units over ordered ``places`` (``len(places) + 1`` points), or None if memory forbids.

    Stages may be empty: such a cell has nothing to do.
    """
    cuts = model.native.cut(model.seats(places), model.transfer)
    return None if cuts is None else tuple(cuts)


def pipeline_time(model: Model, places: Sequence[CellCapacity], cuts: Sequence[int]) -> PipelineTime:
    """Closed form for a 1F1B pipeline; transfers add one latency a micro-batch and a round trip to fill and drain."""
    spans = [(a, b, place) for a, b, place in zip(cuts, cuts[1:], places, strict=False) if b > a]
    stages = [model.stage_time(a, b, place) for a, b, place in spans]
    fills = [(model.fill[b] - model.fill[a]) * PPM // place.speed_ppm for a, b, place in spans]
    hop = model.transfer if len(stages) > 1 else 0
    slowest = max(stages)
    fill = sum(fills) - fills[stages.index(slowest)]
    hops = (2 * (len(stages) - 1) - 1) * hop
    if not model.split_backward:
        return PipelineTime(fill + hops, slowest + hop)
    chains = [(model.chain[b] - model.chain[a]) * PPM // place.speed_ppm for a, b, place in spans]
    longest = max(chains)
    last_weight = stages[0] - chains[0]
    return PipelineTime(fill + hops, slowest + hop, sum(chains) - longest + last_weight + hops, longest + hop)


def nearest_cuts(
    model: Model, places: Sequence[CellCapacity], time: int, holds: Sequence[tuple[tuple[int, int], ...]]
) -> tuple[int, ...] | None:
    """Among cuts with every stage within ``time``: the one whose cells fetch the fewest bytes.

    ``holds[i]``: unit ranges cell ``i`` has now. Ties: shorter first stages.
    """
    cuts = model.native.nearest(model.seats(places), time, holds)
    return None if cuts is None else tuple(cuts)
