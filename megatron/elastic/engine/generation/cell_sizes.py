"""Cells that go on with fewer ranks than they should have (nonuniform tensor parallelism, arXiv 2504.06095).

A cell that has lost ranks is *formed* of its living ones, in the order of the launch, as many of them as the model can
be cut over. Living ranks that are in no cell then enlarge the smallest of the formed cells, also one that has no rank
left. Two cells that have three ranks each, of a model that is cut by two, leave two ranks for a third cell. A rank
joins the cell that is nearest by rank number, since such ranks are likely to share a node. No cell gets more ranks than
the sizes in force give it. Any others are parked.

With context parallelism a cell is formed of whole tensor-parallel groups, each with a part of the sequence. A rank
keeps its place in such a group, and so its shards: ranks of broken groups form whole ones, one rank a place.

When all its ranks are there again a cell has those that the sizes in force give it. The result follows from these
sizes, the units of the cells and the living ranks alone, not from how cells were formed before. So all ranks of a
generation, newcomers among them, find the same cells.

A cell computes as fast as its rank with the largest part of a unit. That part also decides its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.plan.model import Topology
from megatron.elastic.plan.profile import PPM

__all__ = ["CellSizes"]


@dataclass(frozen=True)
class CellSizes:
    """The numbers of ranks that a cell may have, and the nominal speed with each."""

    launch: int
    """The number of ranks of a cell at launch."""
    speed_ppm: Mapping[int, int]
    """Number of ranks → nominal speed relative to a cell of ``launch`` ranks."""
    team: int = 1
    """Number of ranks that are in a cell together: a tensor-parallel group, with context parallelism."""

    @classmethod
    def of(cls, largest_part: Callable[[int], int | None], launch: int, most: int = 0, team: int = 1) -> CellSizes:
        """Return the sizes up to ``most`` that a model can be cut into (:meth:`ModelInterface.largest_part`).

        ``most`` is at least ``launch``, the size that is always there.
        """
        whole = largest_part(launch)
        parts = {launch: whole or PPM}
        others = (size for size in range(1, max(launch, most) + 1) if size != launch)
        parts.update((size, part) for size in others if (part := largest_part(size)) is not None)
        return cls(launch, {size: parts[launch] * PPM // part for size, part in parts.items()}, team)

    @property
    def smaller(self) -> tuple[int, ...]:
        """The sizes below the launch's, ascending."""
        return tuple(sorted(size for size in self.speed_ppm if size < self.launch))

    def topology(self, assignment: Assignment, living: Collection[int]) -> Topology:
        """Return the topology of ``living`` with the nominal speeds of its cells.

        They are relative to a cell of the sizes in force, so that no cell of that size counts as one that has lost
        ranks.
        """
        topology = assignment.topology(living)
        regular = self.speed_ppm.get(assignment.base.cell_size, PPM)
        cells = (
            replace(cell, nominal_ppm=max(1, self.speed_ppm.get(len(cell.ranks), regular) * PPM // regular))
            for cell in topology.cells
        )
        return replace(topology, cells=tuple(cells))

    def room(self, count: int) -> int:
        """Return the memory of a cell of ``count`` ranks for units, relative to one of the launch, in ppm.

        A rank of fewer needs as much more memory as its part of a unit is larger. A rank of more holds whole shards,
        although it computes with parts of them, so it needs no less than at launch.
        """
        return min(PPM, self.speed_ppm.get(count, PPM))

    def living_on(
        self, assignment: Assignment, living: Collection[int], least: Mapping[int, int] | None = None
    ) -> Assignment:
        """Return ``assignment`` with waiting cells in place of lost ones, and the other damaged cells formed anew.

        ``least``: number of ranks that a cell needs at least, by cell; with fewer it is not formed.
        """
        seated = replace(assignment.undamaged(), formed=()).seated(living)
        most = assignment.base.cell_size
        damaged, needed = seated.broken(living), dict(least or {})
        alive = {
            number: self._teams(rank for rank in seated.cells[number].ranks if rank in living) for number in damaged
        }
        formed = {
            number: alive[number][: self._fitting(len(alive[number]) * self.team, needed.get(number, 1)) // self.team]
            for number in damaged
        }
        whole = seated.whole(living)
        free = set(living) - {rank for number in whole for rank in seated.cells[number].ranks}
        free -= {rank for teams in formed.values() for team in teams for rank in team}
        while True:
            waiting = self._teams(sorted(free))
            larger = {
                number: self._above(len(teams) * self.team, needed.get(number, 1), most) // self.team
                for number, teams in formed.items()
            }
            able = [number for number, size in larger.items() if size and size - len(formed[number]) <= len(waiting)]
            if not able:
                break
            smallest = min(able, key=lambda number: (len(formed[number]), number))
            launched = seated.cells[smallest].ranks
            near = sorted(waiting, key=lambda team: (team[0] not in launched, abs(team[0] - launched[0]), team))
            taken = near[: larger[smallest] - len(formed[smallest])]
            formed[smallest] += taken
            free -= {rank for team in taken for rank in team}
        # A cell that lent ranks to others is dissolved; one that has lost all its ranks waits for them.
        used = {rank for teams in formed.values() for team in teams for rank in team}
        present = {
            number: tuple(rank for team in formed.get(number, ()) for rank in team)
            for number, cell in seated.cells.items()
            if formed.get(number) or (number not in whole and used.intersection(cell.ranks))
        }
        return replace(seated, formed=tuple(present.items()))

    def _teams(self, ranks: Iterable[int]) -> list[tuple[int, ...]]:
        """Return the teams that ``ranks`` form, in their order: those of the launch, then others, one rank a place."""
        left = list(ranks)
        launched = dict.fromkeys(rank // self.team for rank in left)
        whole = [tuple(range(number * self.team, (number + 1) * self.team)) for number in launched]
        teams = [team for team in whole if set(team) <= set(left)]
        left = [rank for rank in left if all(rank not in team for team in teams)]
        places = [[rank for rank in left if rank % self.team == place] for place in range(self.team)]
        return [*teams, *zip(*places, strict=False)]

    def _fitting(self, most: int, least: int) -> int:
        """Return the largest size from ``least`` to ``most``, or 0."""
        return max((size for size in self.speed_ppm if least <= size <= most), default=0)

    def _above(self, size: int, least: int, most: int) -> int:
        """Return the smallest size above ``size``, from ``least`` to ``most``; 0 if there is none."""
        return min((other for other in self.speed_ppm if size < other <= most and other >= least), default=0)
