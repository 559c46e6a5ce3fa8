"""The answer that several systems share: a replica that lost a cell rests, the others take its micro-batches."""

from __future__ import annotations

from dataclasses import replace

from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Profile, Topology
from megatron.elastic.plan.policies.base import STOPPED, PolicyOutcome, damaged_replicas
from megatron.elastic.plan.search.graph import GraphOptions, Shape, candidate_shapes

__all__ = ["without_damaged"]

_STILL = GraphOptions(alike=False, recut=False, pool=False, drop=True)


def without_damaged(topology: Topology, profile: Profile) -> PolicyOutcome:
    """Whole replicas compute the whole batch; :data:`STOPPED` when there is none."""
    if len(damaged_replicas(topology)) == len(topology.replicas):
        return STOPPED
    whole = [shape for shape in _shapes(topology, profile) if shape.kind in ("drop", "keep")]
    if not whole:
        return STOPPED
    shape = whole[0]
    return PolicyOutcome(shape, shape.time_ns, topology.grid.global_batch_size, instant=shape, instant_ns=shape.time_ns)


def _shapes(topology: Topology, profile: Profile) -> list[Shape]:
    even = replace(
        topology, cells=tuple(replace(cell, speed_ppm=1_000_000, nominal_ppm=1_000_000) for cell in topology.cells)
    )
    try:
        return candidate_shapes(even, profile, _STILL)
    except PlanError:
        return []
