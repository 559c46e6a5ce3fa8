"""The assignment of units to cells.

At launch it is Megatron's own cut. Afterwards it changes only together with the placement
of state, at a step boundary, on all ranks at once. It determines the planner's topology,
the unit groups, and the units in a rank's arena.

A cell keeps its number from launch. A listed cell that is not alive has lost its
segments; a living cell that is not listed waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.plan.model import Cell, Replica, Segment, Topology

__all__ = ["Assignment"]


@dataclass(frozen=True)
class Assignment:
    """Pipelines over the cells of ``launch_topology``; together they may leave cells out."""

    launch_topology: LaunchTopology
    replicas: tuple[Replica, ...]

    @classmethod
    def at_launch(cls, launch_topology: LaunchTopology) -> Assignment:
        """Return Megatron's own cut."""
        replicas = tuple(
            Replica(
                tuple(
                    Segment(launch_topology.cell(replica, chunk % launch_topology.pipeline).id, first, end)
                    for chunk, (first, end) in enumerate(launch_topology.chunks)
                )
            )
            for replica in range(launch_topology.data)
        )
        return cls(launch_topology, replicas)

    @property
    def is_nominal(self) -> bool:
        """True if every cell holds the units of the launch."""
        return self == Assignment.at_launch(self.launch_topology)

    @cached_property
    def cells(self) -> Mapping[int, Cell]:
        """Every cell of the launch topology, extra ones included, by number."""
        return {cell.id: cell for cell in self.launch_topology.cells}

    @cached_property
    def _units(self) -> Mapping[int, tuple[int, ...]]:
        """Cell → units it holds, ascending, the tied unit included."""
        held: dict[int, set[int]] = {}
        ends = {0, self.launch_topology.compute_units - 1}
        for replica in self.replicas:
            for segment in replica.segments:
                units = held.setdefault(segment.cell, set())
                units.update(range(segment.first, segment.end))
                if self.launch_topology.tied_unit is not None and units & ends:
                    units.add(self.launch_topology.tied_unit)
        return {cell: tuple(sorted(units)) for cell, units in held.items()}

    def units_of(self, rank: int) -> tuple[int, ...]:
        """Return the units whose parameters ``rank`` holds, ascending."""
        return self._units.get(self.launch_topology.cell_of(rank).id, ())

    def gained(self, before: Assignment) -> dict[int, frozenset[int]]:
        """Return rank → units that it holds here but not under ``before``; ranks without such units are left out.

        The weight tied between the ends of the model is the embedding's where the rank holds that, else the output
        layer's. A rank that gains or loses the embedding therefore needs the tied unit anew.
        """
        found = dict[int, frozenset[int]]()
        for rank in (rank for cell in self.cells.values() for rank in cell.ranks):
            now, then = frozenset(self.units_of(rank)), frozenset(before.units_of(rank))
            moved = {self.launch_topology.tied_unit} if (0 in now) != (0 in then) else set()
            units = (now - then) | (now & moved)
            if units:
                found[rank] = units
        return found

    def state_groups(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return (unit, shard) → ranks that hold it, living or not, those nearer the start of their pipeline first.

        All ranks of a cell hold the common part of its units. Units without parameters of a kind have groups too.
        """
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        common = self.launch_topology.common
        for replica in self.replicas:
            for segment in replica.segments:
                for unit in self._units[segment.cell]:
                    for shard, rank in enumerate(self.cells[segment.cell].ranks):
                        groups.setdefault((unit, shard), []).append((segment.first, rank))
                        if common is not None:
                            groups.setdefault((unit, common), []).append((segment.first, rank))
        return {
            key: tuple(dict.fromkeys(rank for _, rank in sorted(holders, key=lambda holder: holder[0])))
            for key, holders in sorted(groups.items())
        }

    def topology(self, living: Collection[int]) -> Topology:
        """Return the topology of the ``living`` ranks: whole cells compute, the other ranks are parked."""
        whole = tuple(self.cells[number] for number in self.whole(living))
        computing = {rank for cell in whole for rank in cell.ranks}
        parked = tuple(rank for rank in sorted(living) if rank not in computing)
        launch_topology = self.launch_topology
        tied = () if launch_topology.tied_unit is None else ((0, launch_topology.compute_units - 1),)
        return Topology(launch_topology.grid, launch_topology.compute_units, whole, self.replicas, tied, parked)

    def whole(self, living: Collection[int]) -> tuple[int, ...]:
        """Return the cells of which every rank is in ``living``, ascending."""
        return tuple(number for number, cell in self.cells.items() if all(rank in living for rank in cell.ranks))

    @property
    def cut(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Unit ranges of each pipeline, without the cells that compute them."""
        return tuple(tuple((s.first, s.end) for s in replica.segments) for replica in self.replicas)

    def broken(self, living: Collection[int]) -> tuple[int, ...]:
        """Return the cells that hold units but are not whole, ascending."""
        whole = frozenset(self.whole(living))
        return tuple(cell for cell in sorted(self._units) if cell not in whole)

    def waiting(self, living: Collection[int]) -> tuple[int, ...]:
        """Return the whole cells that hold no unit, ascending."""
        return tuple(cell for cell in self.whole(living) if cell not in self._units)

    def seated(self, living: Collection[int]) -> Assignment:
        """Return the same cut with waiting cells in place of broken ones, as far as there are waiting cells."""
        taken = dict(zip(self.broken(living), self.waiting(living), strict=False))
        if not taken:
            return self
        return Assignment(
            self.launch_topology,
            tuple(
                Replica(tuple(replace(s, cell=taken.get(s.cell, s.cell)) for s in replica.segments))
                for replica in self.replicas
            ),
        )

    def uncovered(self, living: Collection[int]) -> tuple[int, ...]:
        """Return the units that no whole living cell holds, ascending."""
        held = {unit for cell in self.topology(living).cells for unit in self._units.get(cell.id, ())}
        return tuple(unit for unit in range(self.launch_topology.compute_units) if unit not in held)

    def digest(self) -> str:
        """Return a hash to compare between processes."""
        spans = [[(s.cell, s.first, s.end) for s in replica.segments] for replica in self.replicas]
        return hashlib.sha256(repr(spans).encode()).hexdigest()[:32]
