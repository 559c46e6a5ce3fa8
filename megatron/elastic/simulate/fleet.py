"""Throughput of a damaged fleet in closed form: what a trace simulation asks ten thousand times.

Idea: at fleet scale only counts matter: how many replicas lack how many cells,
and for rerouting, how many cells each stage lacks. Each class of replica has a
:class:`PipelineTime` from the very partition code that plans use; quotas are
whole micro-batches, so a step grows in quanta, as it does in plans. Every rate
is relative to the undamaged 1F1B step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron.elastic.plan.model import Profile
from megatron.elastic.plan.search.partition import CellCapacity, Model, PipelineTime, cut_pipeline, pipeline_time

__all__ = ["Fleet", "least_deadline"]


def least_deadline(total: int, classes: Mapping[PipelineTime, int]) -> int:
    """Least time in which ``classes`` (pipeline time → how many) finish ``total`` micro-batches."""
    best = min(classes, key=lambda time: time.each)
    low, high = 0, best.of(-(-total // classes[best]))
    while low < high:
        middle = (low + high) // 2
        if sum(count * time.fits(middle) for time, count in classes.items()) >= total:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True)
class Fleet:
    """``replicas`` equal pipelines of ``stages`` cells; each cell has ``headroom`` times the memory it needs."""

    replicas: int
    stages: int
    layers: int
    profile: Profile
    waves: int = 16
    headroom: float = 1.25
    split_backward: bool = False

    @property
    def cells(self) -> int:
        """All cells, idle ones excluded."""
        return self.replicas * self.stages

    @property
    def total(self) -> int:
        """Micro-batches a step."""
        return self.replicas * self.waves

    @cached_property
    def nominal(self) -> PipelineTime:
        """An undamaged replica under 1F1B."""
        model = Model(self.profile, 1, self.replicas)
        places = [CellCapacity()] * self.stages
        cuts = cut_pipeline(model, places)
        assert cuts is not None
        return pipeline_time(model, places, cuts)

    @cached_property
    def lengths(self) -> dict[int, PipelineTime]:
        """Pipeline length → time, for every length that fits memory (ZB-H1 where it does, if allowed)."""
        plain = Model(self.profile, 1, self.replicas)
        room = int(plain.stage_bytes(0, -(-self.layers // self.stages), self.stages) * self.headroom)
        found: dict[int, PipelineTime] = {}
        for split in (False, True) if self.split_backward else (False,):
            model = Model(self.profile, 1, self.replicas, split_backward=split)
            for length in range(1, self.stages + 1):
                places = [CellCapacity(memory_bytes=room)] * length
                cuts = cut_pipeline(model, places)
                if cuts is not None:
                    found[length] = pipeline_time(model, places, cuts)
        return found

    def undamaged_ns(self) -> int:
        """Step time before any loss."""
        return self.nominal.of(self.waves)

    def recut_ns(self, missing: Mapping[int, int], resting: int = 0) -> int:
        """``missing[k]`` replicas lack ``k`` cells and are cut anew; those too short pool their cells; 0: stopped."""
        classes: dict[PipelineTime, int] = {}
        loose = 0
        for lack, count in missing.items():
            length = self.stages - lack
            if length in self.lengths:
                time = self.lengths[length]
                classes[time] = classes.get(time, 0) + count
            else:
                loose += length * count
        if loose and self.lengths:
            shortest = min(self.lengths)
            if loose >= shortest:
                time = self.lengths[shortest]
                classes[time] = classes.get(time, 0) + loose // shortest
        healthy = self.replicas - sum(missing.values()) - resting
        if healthy > 0:
            time = self.lengths.get(self.stages, self.nominal)
            classes[time] = classes.get(time, 0) + healthy
        return least_deadline(self.total, classes) if classes else 0

    def dropped_ns(self, damaged: int) -> int:
        """Damaged replicas rest, the others take their micro-batches under 1F1B; 0: stopped."""
        left = self.replicas - damaged
        return least_deadline(self.total, {self.nominal: left}) if left > 0 else 0

    def rerouted_ns(self, lacking: int) -> int:
        """Ideal reroute: the stage that lacks most cells works through its rows without a pause; 0: stopped.

        The limit of ReCycle's staggered optimizer (``Outcome.ideal_ns``; what tables reach is between this and a
        step with a barrier): taken-over work costs nothing while it fits the bubbles of the undamaged step.
        """
        left = self.replicas - lacking
        if left <= 0:
            return 0
        busiest = -(-self.total // left) * self.nominal.each
        return max(busiest, self.undamaged_ns())
