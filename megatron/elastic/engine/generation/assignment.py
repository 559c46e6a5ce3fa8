"""The assignment of units to cells.

At launch it is Megatron's own cut. Afterwards it changes only together with the placement
of state, at a step boundary, on all ranks at once. It determines the planner's topology,
the unit groups, and the units in a rank's arena.

A cell keeps its number for as long as the sizes in force are the same: those of the launch, or of a reshape
(:mod:`shape`). A listed cell that is not alive has lost its segments; a living cell that is not listed waits.

A cell has the ranks that these sizes give it unless the assignment *forms* it anew: of fewer ranks, or
of ranks of several cells. The ranks of a cell are ordered. A rank's place among them
says which part of each unit it computes, and so which shards of state it covers
(:mod:`~megatron.elastic.state.coverage`). State itself stays cut as at the launch.

Where ranks share the experts of their layers, each expert has a *home* in each crew: the cells at one place of
adjacent replicas (:mod:`~megatron.elastic.plan.crews`). While a cell of a crew is missing, its experts are dealt to the
others (:meth:`Assignment.crewed`), so homes are uneven, and every crew still has all experts. Homes may also follow the
measured load (:meth:`Assignment.balanced`): a cell then has as many experts as before, but other ones, or an expert has
*replicas*, a home in each of several cells.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

from megatron.elastic.engine.compute.buffers import HeldPart
from megatron.elastic.engine.compute.model_interface import CellPlace, Covered, Crew, only_at_launch
from megatron.elastic.engine.generation.expert_deal import ExpertDeal
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.shape import GridShape
from megatron.elastic.plan.expert_homes import Homes, Load, busiest, evened
from megatron.elastic.plan.expert_replicas import dealt, replicated, slots, worth
from megatron.elastic.plan.lazarus import homes_of
from megatron.elastic.plan.model import Cell, Replica, Topology
from megatron.elastic.state.coverage import Position
from megatron.elastic.state.layout import UnitShard

__all__ = ["Assignment", "ExpertPolicy"]

ExpertPolicy = Literal["homes", "replicas", "lazarus"]
"""How homes of experts follow the load (``--elastic-expert-balance``)."""


@dataclass(frozen=True)
class Assignment:
    """Pipelines over the cells of ``launch_topology``; together they may leave cells out."""

    launch_topology: LaunchTopology
    replicas: tuple[Replica, ...]
    formed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(cell, its ranks in order) of each cell with other ranks than in :attr:`base`, ascending; no ranks: dissolved."""
    shape: GridShape | None = None
    """The sizes in force since a reshape; None: the launch's."""
    rehomed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(cell, experts) of the cells of crews with other homes than :attr:`deal` gives, ascending; none: in no crew."""

    def __post_init__(self) -> None:
        if not self.formed:
            return
        cells, ranks = [cell for cell, _ in self.formed], [rank for _, mine in self.formed for rank in mine]
        elsewhere = {rank for number, cell in self.cells.items() if number not in cells for rank in cell.ranks}
        if cells != sorted(set(cells)) or not set(cells) <= self.cells.keys():
            raise ValueError(f"formed cells {cells}: each must be a cell of the sizes in force, once, ascending")
        if len(set(ranks)) != len(ranks) or elsewhere & set(ranks):
            raise ValueError(f"formed cells {self.formed}: a rank would be in two cells")

    @classmethod
    def at_launch(cls, launch_topology: LaunchTopology) -> Assignment:
        """Return Megatron's own cut."""
        return cls.regular(launch_topology, None)

    @classmethod
    def regular(cls, launch_topology: LaunchTopology, shape: GridShape | None) -> Assignment:
        """Return the cut of ``shape`` on its own cells (None: of the launch)."""
        return cls(launch_topology, (shape or GridShape.of_launch(launch_topology)).replicas(), shape=shape)

    @cached_property
    def base(self) -> GridShape:
        """The sizes in force."""
        return self.shape or GridShape.of_launch(self.launch_topology)

    @cached_property
    def deal(self) -> ExpertDeal:
        """The experts of each rank while none is missing."""
        launched = self.launch_topology.deal
        return launched if self.shape is None else self.shape.deal(launched)

    @cached_property
    def nominal(self) -> Assignment:
        """The cut of the sizes in force on their own cells, as it is while no rank is missing."""
        return Assignment.regular(self.launch_topology, self.shape)

    @property
    def is_nominal(self) -> bool:
        """True if every cell holds the units that the sizes in force give it."""
        return self == self.nominal

    @cached_property
    def cells(self) -> Mapping[int, Cell]:
        """Every cell of the sizes in force, waiting ones included, by number, with its present ranks."""
        formed = dict(self.formed)
        return {
            cell.id: replace(cell, ranks=formed[cell.id]) if cell.id in formed else cell for cell in self.base.cells
        }

    @cached_property
    def _places(self) -> Mapping[int, tuple[int, CellPlace]]:
        """Rank → its cell, and its place there; ranks of no cell are left out."""
        return {
            rank: (cell.id, CellPlace(cell.ranks, index, self._crew(cell.id, index), self.base.team))
            for cell in self.cells.values()
            for index, rank in enumerate(cell.ranks)
        }

    @cached_property
    def _crews(self) -> tuple[tuple[int, ...], ...]:
        """The cells of each crew, missing ones included, in the order of their replicas."""
        size, replicas = self.deal.crew_size, self.replicas
        if not self.deal.experts:
            return ()
        groups = [replicas[first : first + size] for first in range(0, len(replicas), size)]
        seats = (
            tuple(s.cell for s in seat) for group in groups for seat in zip(*(r.segments for r in group), strict=True)
        )
        return tuple(dict.fromkeys(seats))

    @cached_property
    def _experts(self) -> Mapping[int, tuple[int, ...]]:
        """Cell → the experts that it has of each of its layers; cells without units are left out."""
        return {cell: self.deal.at(at) for crew in self._crews for at, cell in enumerate(crew)} | dict(self.rehomed)

    def _crew(self, cell: int, index: int) -> Crew | None:
        """Return the crew of the ``index``-th rank of ``cell``. A cell that is not whole waits in that of no loss.

        Where a cell has all experts several times, its crews are parts of it.
        """
        parts = self._parts_of_crews.get(cell)
        return None if parts is None else parts[index // self.deal.ranks]

    @cached_property
    def _parts_of_crews(self) -> Mapping[int, tuple[Crew, ...]]:
        """Cell → the crew of its first :attr:`ExpertDeal.ranks` ranks, that of the next ones, and so on."""
        found: dict[int, tuple[Crew, ...]] = {}
        for cells in self._crews:
            experts = [self._experts[cell] for cell in cells]
            present = self._parts_of_crew(cells, experts)
            found |= {cell: present for cell, mine in zip(cells, experts, strict=True) if mine}
            if not all(experts):
                whole = self._parts_of_crew(cells, [self.deal.at(at) for at in range(len(cells))])
                found |= {cell: whole for cell, mine in zip(cells, experts, strict=True) if not mine}
        return found

    def _parts_of_crew(self, cells: Sequence[int], experts: Sequence[tuple[int, ...]]) -> tuple[Crew, ...]:
        deal, members = self.deal, [at for at, mine in enumerate(experts) if mine]
        ranks = [rank for at in members for rank in self.cells[cells[at]].ranks]
        homes = [mine for at in members for mine in deal.on_ranks(at, experts[at])]
        parts = [slice(first, first + deal.ranks) for first in range(0, deal.cell, deal.ranks)]
        return tuple(Crew(tuple(ranks[part]), tuple(homes[part]), deal.parts) for part in parts)

    def crewed(self, living: Collection[int]) -> Assignment:
        """Return the assignment in which the experts of missing cells have homes on the others of their crews.

        Those with another replica have it there: only the other ones are dealt. A crew without a missing cell has the
        homes that :meth:`undamaged` gives it. It follows from these, the cells and ``living`` alone.
        """
        before = self.undamaged()
        whole, homes = frozenset(before.whole(living)), dict(before.rehomed)
        for crew in before._crews:
            present = [cell for cell in crew if cell in whole]
            if not present or len(present) == len(crew):
                continue
            mine = {cell: before._experts[cell] for cell in present}
            kept = {expert for experts in mine.values() for expert in experts}
            lost = {expert for cell in crew for expert in before._experts[cell]} - kept
            more = self.deal.room(len(crew)).most - self.deal.room(len(crew)).least
            mine = dict(dealt(mine, lost, self.deal.experts + more * len(present)))
            homes |= {cell: mine.get(cell, ()) for cell in crew}
        return before.changed(rehomed=tuple(sorted(homes.items())))

    def undamaged(self) -> Assignment:
        """Return the assignment in which crews whose experts were dealt for a missing cell have those of the launch."""
        dealt = {cell for crew in self._crews if not all(self._experts[one] for one in crew) for cell in crew}
        return self.changed(rehomed=tuple((cell, mine) for cell, mine in self.rehomed if cell not in dealt))

    def changed(self, **fields: object) -> Assignment:
        """Return the assignment with these fields: itself, which has worked out its tables, if it has them already."""
        if all(getattr(self, name) == value for name, value in fields.items()):
            return self
        return replace(self, **fields)  # type: ignore[arg-type]

    def balanced(self, load: Mapping[int, Sequence[int]], policy: ExpertPolicy) -> Assignment:
        """Return the assignment in which the cells of each crew have about the same ``load``, or the present one.

        ``load``: unit → tokens of a step by expert. A crew's homes change only if its busiest rank has less to do then,
        or about as much with fewer replicas. Lazarus's replicas are to survive losses, so a crew without any takes them
        in any case. The experts of missing cells stay dealt.
        """
        found, searched = self, dict[object, Homes]()
        for crew in self._crews:
            loads, before = self._loads(crew, load), [self._experts[cell] for cell in crew]
            present = {at: mine for at, mine in enumerate(before) if mine}
            key = self.units_in(crew[0]), tuple(present.items())
            if key not in searched:
                searched[key] = self._homes_by(policy, loads, present)
            homes = [searched[key].get(at, ()) for at in range(len(crew))]
            then, now = self._busiest(crew, homes, loads), self._busiest(crew, before, loads)
            first = policy == "lazarus" and slots(present) == self.deal.experts
            if first or worth(then, now, slots(searched[key]) < slots(present)):
                found = found._rehomed(dict(zip(crew, homes, strict=True)))
        return found

    def _homes_by(self, policy: ExpertPolicy, loads: Load, present: Homes) -> Homes:
        """Return the homes that ``policy`` chooses for one crew, by its places; ``present`` for one without experts."""
        if not loads:
            return present
        if policy == "homes":
            return evened(loads, present)
        room = self.deal.room(len(present))
        return replicated(loads, present, room) if policy == "replicas" else homes_of(loads, present, room)

    def expert_replicas(self, unit: int) -> tuple[int, ...]:
        """Return the number of homes of each expert of ``unit`` in the crew that has most of them; empty: no crew."""
        found = list[int]()
        for crew in self._crews:
            if unit in self.units_in(crew[0]):
                count = Counter(expert for cell in crew for expert in self._experts[cell])
                mine = [count[expert] for expert in range(self.deal.experts)]
                found = max(found, mine, key=sum)
        return tuple(found)

    def _rehomed(self, homes: Mapping[int, tuple[int, ...]]) -> Assignment:
        """Return the assignment in which the cells of one crew have these experts."""
        regular = {cell: self.deal.at(at) for at, cell in enumerate(homes)}
        rehomed = {cell: mine for cell, mine in self.rehomed if cell not in homes}
        if homes != regular:
            rehomed.update(homes)
        return self.changed(rehomed=tuple(sorted(rehomed.items())))

    def imbalance(self, load: Mapping[int, Sequence[int]]) -> float:
        """Return the load of the busiest rank of a crew relative to that of a mean one; of the worst crew.

        The busiest rank of each layer counts, since the others wait for it. 1.0 is even, also without any load.
        """
        present = ((crew, [self._experts[cell] for cell in crew]) for crew in self._crews)
        return max((self._busiest(crew, mine, self._loads(crew, load)) for crew, mine in present), default=1.0)

    def _busiest(self, cells: Sequence[int], experts: Sequence[tuple[int, ...]], loads: Load) -> float:
        """Return :meth:`imbalance` of a crew whose cells have ``experts``, or of those that are parts of one cell."""
        found, total = 1.0, sum(map(sum, loads))
        for crew in self._parts_of_crew(cells, experts):
            homes = dict(enumerate(crew.homes))
            found = max(found, busiest(loads, homes) * len(homes) / total if total else 1.0)
        return found

    def _loads(self, crew: tuple[int, ...], load: Mapping[int, Sequence[int]]) -> Load:
        """Return the loads of the layers that a crew computes."""
        return [load[unit] for unit in self.units_in(crew[0]) if unit in load]

    def cell_of(self, rank: int) -> int | None:
        """Return the number of the cell that ``rank`` belongs to; ``None`` if it is in none."""
        place = self._places.get(rank)
        return None if place is None else place[0]

    def place(self, rank: int) -> CellPlace | None:
        """Return the place of ``rank`` in its cell; ``None`` if it is in none."""
        place = self._places.get(rank)
        return None if place is None else place[1]

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
        cell = self.cell_of(rank)
        return () if cell is None else self.units_in(cell)

    def units_in(self, cell: int) -> tuple[int, ...]:
        """Return the units that a cell holds, ascending."""
        return self._units.get(cell, ())

    def shards_at(self, unit: int, position: Position, covered: Covered) -> tuple[int, ...]:
        """Return the shards of ``unit`` that a rank at ``position`` covers, the common part included, ascending.

        Every rank computes with the replicated parameters. Of a launch at tensor-parallel size 1 shard 0 has them.
        """
        regular = position.count == self.launch_topology.tensor
        shards = (position.index,) if regular else covered(unit, position)
        common = self.launch_topology.common
        return tuple(sorted({*shards, 0 if common is None else common}))

    def held_by(self, rank: int, covered: Covered = only_at_launch) -> HeldPart:
        """Return the part of the model that ``rank`` holds."""
        units, place = self.units_of(rank), self.place(rank)
        if place is None:
            return HeldPart()
        experts, position = self._experts_of(rank), place.position
        spaces = tuple(
            (unit, shard) for unit in units for shard in (*self.shards_at(unit, position, covered), *experts)
        )
        return HeldPart(units, place, spaces)

    def _experts_of(self, rank: int) -> tuple[int, ...]:
        """Return the spaces of the experts of ``rank``, a member of a cell."""
        _, place = self._places[rank]
        return () if place.crew is None else self.launch_topology.expert_spaces(place.crew, rank)

    def gained(self, before: Assignment) -> dict[int, frozenset[int]]:
        """Return rank → units that it holds here but not under ``before``; ranks without such units are left out.

        The weight tied between the ends of the model is the embedding's where the rank holds that, else the output
        layer's. A rank that gains or loses the embedding therefore needs the tied unit anew. A rank whose place in
        its cell changes needs all its units anew.
        """
        found = dict[int, frozenset[int]]()
        for rank in (rank for cell in self.cells.values() for rank in cell.ranks):
            now, then = frozenset(self.units_of(rank)), frozenset(before.units_of(rank))
            if self.place(rank) != before.place(rank):
                then = frozenset()
            moved = {self.launch_topology.tied_unit} if (0 in now) != (0 in then) else set()
            units = (now - then) | (now & moved)
            if units:
                found[rank] = units
        return found

    def same_cells(self, before: Assignment, speeds: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Return those of ``speeds`` (cell, parts per million) whose cells have the same ranks as ``before``."""
        now, then = self.cells, before.cells
        return tuple((cell, ppm) for cell, ppm in speeds if cell in now and now[cell] == then.get(cell))

    def state_groups(self, covered: Covered = only_at_launch) -> Mapping[UnitShard, tuple[int, ...]]:
        """Return (unit, shard) → ranks that cover it, living or not, those nearer the start of their pipeline first.

        All ranks of a cell hold the common part of its units. Units without parameters of a kind have groups too.
        """
        if covered not in self._state_groups:
            self._state_groups[covered] = self._grouped(covered)
        return self._state_groups[covered]

    @cached_property
    def _state_groups(self) -> dict[Covered, Mapping[UnitShard, tuple[int, ...]]]:
        """Results of :meth:`state_groups`, by its argument: a recovery calls it twice."""
        return {}

    def _grouped(self, covered: Covered) -> Mapping[UnitShard, tuple[int, ...]]:
        groups = defaultdict[UnitShard, list[int]](list)
        spaces: dict[tuple[tuple[int, ...], Position], list[UnitShard]] = {}
        """(units, position) → what a rank there covers: cells of most pipelines are alike."""
        segments = sorted((s for replica in self.replicas for s in replica.segments), key=lambda s: s.first)
        for segment in segments:
            units = self._units[segment.cell]
            for rank in self.cells[segment.cell].ranks:
                _, place = self._places[rank]
                kind = units, place.position
                if kind not in spaces:
                    spaces[kind] = [(unit, shard) for unit in units for shard in self.shards_at(unit, kind[1], covered)]
                for space in spaces[kind]:
                    groups[space].append(rank)
                for unit, shard in product(units, self._experts_of(rank)):
                    groups[unit, shard].append(rank)
        return {key: tuple(dict.fromkeys(holders)) for key, holders in sorted(groups.items())}

    def topology(self, living: Collection[int]) -> Topology:
        """Return the topology of the ``living`` ranks: whole cells compute, the other ranks are parked."""
        whole = tuple(self.cells[number] for number in self.whole(living))
        computing = {rank for cell in whole for rank in cell.ranks}
        parked = tuple(rank for rank in sorted(living) if rank not in computing)
        launch_topology = self.launch_topology
        tied = () if launch_topology.tied_unit is None else ((0, launch_topology.compute_units - 1),)
        return Topology(
            launch_topology.grid,
            launch_topology.compute_units,
            whole,
            self.replicas,
            tied,
            parked,
            self.deal.crew_size,
        )

    def whole(self, living: Collection[int]) -> tuple[int, ...]:
        """Return the cells of which every rank is in ``living``, ascending; none dissolved or without a crew."""
        alive, apart = frozenset(living), {cell for cell, experts in self.rehomed if not experts}
        return tuple(
            number
            for number, cell in self.cells.items()
            if cell.ranks and number not in apart and alive.issuperset(cell.ranks)
        )

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
        return replace(
            self,
            replicas=tuple(
                Replica(tuple(replace(s, cell=taken.get(s.cell, s.cell)) for s in replica.segments))
                for replica in self.replicas
            ),
            rehomed=tuple(sorted((taken.get(cell, cell), mine) for cell, mine in self.rehomed)),
        )

    def uncovered(self, living: Collection[int]) -> tuple[int, ...]:
        """Return the units that no whole living cell holds, ascending."""
        held = {unit for cell in self.topology(living).cells for unit in self._units.get(cell.id, ())}
        return tuple(unit for unit in range(self.launch_topology.compute_units) if unit not in held)

    def digest(self) -> str:
        """Return a hash to compare between processes."""
        spans = [[(s.cell, s.first, s.end) for s in replica.segments] for replica in self.replicas]
        text = repr((spans, self.formed, self.shape) if self.formed or self.shape else spans)
        text += repr(self.rehomed) if self.rehomed else ""
        return hashlib.sha256(text.encode()).hexdigest()[:32]
