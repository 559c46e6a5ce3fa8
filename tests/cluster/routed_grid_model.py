"""A model with experts whose cells have any tensor- and context-parallel sizes, and share experts in any sets.

A unit adds to that of :mod:`grid_model` an expert's product of a position (:mod:`routed_model`). In a tensor-parallel
group each rank routes some of the group's positions, as under Megatron's sequence parallelism, and the sums over the
group are those of all. State has an expert in the parts of the launch; a rank may have several of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.compute.model_interface import CellPlace, UnitParameter
from megatron.elastic.engine.compute.sequence_cut import Run, held_runs
from megatron.elastic.state.coverage import Overlap, Position
from megatron.elastic.state.layout import ParamSpec
from tests.cluster.cut_model import Mapped
from tests.cluster.grid_model import GridModel
from tests.cluster.model import WIDTH
from tests.cluster.routed_model import Routing

__all__ = ["RoutedGridModel"]


class RoutedGridModel(Routing, GridModel):
    """Implements :class:`ModelInterface` for layers with experts, in ``parts`` parts each at launch."""

    def __init__(self, units: int, held: Collection[int], place: CellPlace, fabric: Fabric, parts: int) -> None:
        super().__init__(units, held, place, fabric)
        self._parts = parts
        self._begin_routing(held)

    def hold(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """See :class:`ModelInterface`."""
        before = self._place
        super().hold(units, place)
        self._hold_experts(units, self._experts if _part_of(before) == _part_of(self._place) else {})

    def overlaps(self, spec: ParamSpec, place: CellPlace) -> tuple[Overlap, ...] | None:
        """See :class:`ModelInterface`."""
        if spec.expert is None:
            return super().overlaps(spec, place)
        part = _part_of(place)
        if part.count == self._parts:
            return None
        each, width = self._parts // part.count, WIDTH // self._parts
        tensor = len(self._launched.tensor_ranks)
        first = (tensor + 1 if tensor > 1 else 1) + spec.expert * self._parts + part.index * each
        remote, rows = ((0, WIDTH), (0, width)), (0, WIDTH)
        return tuple(Overlap(first + i, (rows, (i * width, (i + 1) * width)), remote) for i in range(each))

    def unit_parameters(self, unit: int) -> Sequence[UnitParameter]:
        """See :class:`ModelInterface`."""
        shape = (WIDTH, WIDTH // self._parts)
        found = [*super().unit_parameters(unit)]
        for expert, parameter in self._experts[unit].items():
            spec = ParamSpec(f"experts.{expert}", WIDTH * shape[1], shape, sharded=True, expert=expert)
            found.append(UnitParameter(spec, parameter, self.overlaps(spec, self._place)))
        return found

    @property
    def _routed_runs(self) -> tuple[Run, ...]:
        """The positions of its part that this rank routes: its slice, or all of them on the first rank."""
        at, runs = self._place.position, self._runs
        mine = held_runs(runs, at.index, at.count)
        return () if mine == runs and at.index else mine

    def _run(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        entered = Mapped.apply(x, lambda whole: whole.view_as(whole), self._added)
        return super()._run(unit, x) + Mapped.apply(self._routed(unit, entered), self._added, lambda grad: grad)


def _part_of(place: CellPlace) -> Position:
    """The part of its experts that a rank has at a place."""
    assert place.crew is not None
    return place.crew.part_of(place.ranks[place.index])
