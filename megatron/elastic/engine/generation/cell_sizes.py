"""Cells that go on with fewer ranks than they should have (nonuniform tensor parallelism, arXiv 2504.06095).

A cell that has lost ranks is *formed* of its living ones, in the order of the sizes in force, as many of them as the
model can be cut over. Living ranks that are in no cell then enlarge the smallest of the formed cells, also one that
has no rank left. Two cells that have three ranks each, of a model that is cut by two, leave two ranks for a third
cell. A rank joins the cell that is nearest by rank number, since such ranks are likely to share a node. No cell gets
more ranks than the sizes in force give it. Any others are parked.

With context parallelism a cell is formed of whole tensor-parallel groups, each with a part of the sequence. A rank
keeps its place in such a group, and so its shards: ranks of broken groups form whole ones, one rank a place.

When all its ranks are there again a cell has those that the sizes in force give it. The result follows from these
sizes, the units of the cells and the living ranks alone, not from how cells were formed before. So all ranks of a
generation, newcomers among them, find the same cells.

A cell computes as fast as its rank with the largest part of a unit. That part also decides its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.shape import CellCut, GridShape
from megatron.elastic.plan.model import Topology
from megatron.elastic.plan.profile import PPM

__all__ = ["CellSizes"]


@dataclass(frozen=True)
class CellSizes:
    """The cuts that a cell may have, and the nominal speed with each."""

    launch: CellCut
    """The cut of a cell at launch."""
    largest_part: Callable[[int, int], int | None]
    """Tensor-parallel ranks, parts of the sequence → largest part of a layer (:meth:`ModelInterface.largest_part`)."""
    only_whole: bool = False
    """True if a cell that has lost ranks waits for them: it has a home of experts for other cells too."""

    @classmethod
    def of(cls, largest_part: Callable[[int, int], int | None], launch: CellCut, only_whole: bool = False) -> CellSizes:
        """Return the cuts that ``largest_part`` knows, and the launch's. It is asked about each only once."""
        return cls(launch, cache(largest_part), only_whole)

    def speed(self, cut: CellCut) -> int | None:
        """Return the nominal speed of a cell relative to one of the launch, in ppm; ``None``: it cannot compute."""
        return self._relative(self.launch, cut)

    def _relative(self, base: CellCut, cut: CellCut) -> int | None:
        if base == cut:
            return PPM
        part = self.largest_part(*cut)
        return None if part is None else (self.largest_part(*base) or PPM) * PPM // part

    @property
    def smaller(self) -> tuple[int, ...]:
        """The numbers of ranks below the launch's with which a damaged cell of the launch goes on, ascending."""
        tensor, parts = self.launch
        if self.only_whole:
            return ()
        fewer = [CellCut(tensor, n) for n in range(1, parts)] if parts > 1 else [CellCut(n) for n in range(1, tensor)]
        return tuple(cut.tensor * cut.parts for cut in fewer if self.speed(cut) is not None)

    @property
    def only_launch(self) -> bool:
        """True if the model is computed by the launch's cut alone: none up to twice its size in one direction fits."""
        tensor, parts = self.launch
        cuts = {CellCut(n, parts) for n in range(1, 2 * tensor + 1)} | {
            CellCut(tensor, n) for n in range(1, 2 * parts + 1)
        }
        return all(cut == self.launch or self.speed(cut) is None for cut in cuts)

    def topology(self, assignment: Assignment, living: Collection[int]) -> Topology:
        """Return the topology of ``living`` with the nominal speeds of its cells.

        They are relative to a cell of the sizes in force, so that no cell of that size counts as one that has lost
        ranks.
        """
        topology, base = assignment.topology(living), assignment.base
        regular = self.speed(base.cut(base.cell_size)) or PPM
        cells = (
            replace(cell, nominal_ppm=max(1, (self.speed(base.cut(len(cell.ranks))) or regular) * PPM // regular))
            for cell in topology.cells
        )
        return replace(topology, cells=tuple(cells))

    def room(self, cut: CellCut) -> int:
        """Return the memory of a cell for units, relative to one of the launch, in ppm.

        A rank of fewer needs as much more memory as its part of a unit is larger. A rank of more tensor-parallel ones
        holds whole shards, although it computes with parts of them, so it needs no less than at launch. Weights are
        not cut with the sequence.
        """
        weights = self._relative(CellCut(self.launch.tensor), CellCut(cut.tensor))
        return min(PPM, self.speed(cut) or PPM, weights or PPM)

    def living_on(
        self, assignment: Assignment, living: Collection[int], least: Mapping[int, int] | None = None
    ) -> Assignment:
        """Return ``assignment`` with waiting cells in place of lost ones, and the other damaged cells formed anew.

        ``least``: number of ranks that a cell needs at least, by cell; with fewer it is not formed.
        """
        seated = assignment.undamaged().changed(formed=()).seated(living)
        base, sizes = assignment.base, self._counts(assignment.base)
        team, damaged, needed = base.team or 1, seated.broken(living), dict(least or {})
        alive = {
            number: _teams(base, [rank for rank in seated.cells[number].ranks if rank in living]) for number in damaged
        }
        formed = {
            number: alive[number][: _fitting(sizes, len(alive[number]) * team, needed.get(number, 1)) // team]
            for number in damaged
        }
        whole = seated.whole(living)
        free = set(living) - {rank for number in whole for rank in seated.cells[number].ranks}
        free -= {rank for teams in formed.values() for team in teams for rank in team}
        while True:
            waiting = _teams(base, sorted(free))
            larger = {
                number: _above(sizes, len(teams) * team, needed.get(number, 1)) // team
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
        return seated.changed(formed=tuple(present.items()))

    def _counts(self, base: GridShape) -> tuple[int, ...]:
        """Return the numbers of ranks that a cell of these sizes may have, ascending."""
        each = base.team or 1
        counts = range(each, base.cell_size + 1, each)
        return tuple(count for count in counts if count == base.cell_size or self.speed(base.cut(count)) is not None)


def _teams(base: GridShape, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the teams that ``ranks`` form, in their order: those of the sizes in force, then others, one rank a place.

    A team is a rank, or a whole tensor-parallel group where cells share the sequence. Ranks in no cell of the sizes
    have places by their numbers.
    """
    size = base.team or 1
    groups = [cell[first : first + size] for cell in base.ranks for first in range(0, len(cell), size)]
    place_of = {rank: place for group in groups for place, rank in enumerate(group)}
    known = {rank: group for group in groups for rank in group}
    whole = dict.fromkeys(known[rank] for rank in ranks if rank in known)
    teams = [team for team in whole if set(team) <= set(ranks)]
    used = {rank for team in teams for rank in team}
    left = [rank for rank in ranks if rank not in used]
    places = [[rank for rank in left if place_of.get(rank, rank % size) == place] for place in range(size)]
    return [*teams, *zip(*places, strict=False)]


def _fitting(sizes: Sequence[int], most: int, least: int) -> int:
    """Return the largest of ``sizes`` from ``least`` to ``most``, or 0."""
    return max((size for size in sizes if least <= size <= most), default=0)


def _above(sizes: Sequence[int], size: int, least: int) -> int:
    """Return the smallest of ``sizes`` above ``size``, from ``least`` on; 0 if there is none."""
    return min((other for other in sizes if other > size and other >= least), default=0)
