"""Cells that go on with fewer ranks than at launch (nonuniform tensor parallelism, arXiv 2504.06095).

A cell that has lost ranks is *formed* of its living ones, in the order of the launch, as many of them as the model can
be cut over; any others are parked. When all its ranks are there again it has the ranks of the launch. The result
follows from the launch, the units of the cells and the living ranks alone, not from how cells were formed before.
So all ranks of a generation, newcomers among them, find the same cells.

A cell computes as fast as its rank with the largest part of a unit. That part also decides its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.plan.model import Topology

__all__ = ["CellSizes"]

_PPM = 1_000_000


@dataclass(frozen=True)
class CellSizes:
    """The numbers of ranks that a cell may have, and the nominal speed with each."""

    launch: int
    """The tensor-parallel size at launch."""
    speed_ppm: Mapping[int, int]
    """Number of ranks → nominal speed relative to a cell of ``launch`` ranks."""

    @classmethod
    def of(cls, largest_part: Callable[[int], int | None], launch: int) -> CellSizes:
        """Return the sizes up to ``launch`` that a model can be cut into (:meth:`ModelInterface.largest_part`)."""
        whole = largest_part(launch)
        parts = {launch: whole or _PPM}
        parts.update((size, part) for size in range(1, launch) if (part := largest_part(size)) is not None)
        return cls(launch, {size: parts[launch] * _PPM // part for size, part in parts.items()})

    @property
    def smaller(self) -> tuple[int, ...]:
        """The sizes below the launch's, ascending."""
        return tuple(sorted(size for size in self.speed_ppm if size < self.launch))

    def sized(self, topology: Topology) -> Topology:
        """Return the topology with the nominal speeds of its cells."""
        return replace(
            topology,
            cells=tuple(
                replace(cell, nominal_ppm=self.speed_ppm.get(len(cell.ranks), _PPM)) for cell in topology.cells
            ),
        )

    def living_on(self, assignment: Assignment, living: Collection[int]) -> Assignment:
        """Return ``assignment`` with waiting cells in place of lost ones, and the other damaged cells formed anew."""
        seated = replace(assignment, formed=()).seated(living)
        formed = []
        for number in seated.broken(living):
            alive = tuple(rank for rank in seated.cells[number].ranks if rank in living)
            size = max((size for size in self.smaller if size <= len(alive)), default=0)
            if size:
                formed.append((number, alive[:size]))
        return replace(seated, formed=tuple(formed))
