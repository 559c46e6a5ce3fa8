"""The tensor axis: cells that have lost ranks live on with fewer, or are parked, and slow cells share pipelines.

Idea: A *reduced* cell has fewer ranks than at launch. It is slower and has less memory for its units. It takes part
in a topology like any slow cell. To park it is to count it as lost: peers of its stage then compute its rows. Which is
faster depends on sizes, on the number of micro-batches and on memory, so both are planned and timed.

A pipeline is as slow as its slowest cell. So several reduced cells cost least in the same pipeline. Replicas that are
cut alike may exchange cells of a stage: each cell keeps its units, and nothing moves. Nonuniform tensor parallelism
(arXiv 2504.06095) packs damaged domains in the same way, at a restart.

Pure functions of topologies; without a reduced cell there is one option, the topology itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from megatron.elastic.plan.cost import PPM
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Cell, Plan, Profile, Replica, Segment, Topology
from megatron.elastic.plan.planner import Draft
from megatron.elastic.plan.schedule.validate import memory_peaks
from megatron.elastic.plan.topology import living_replicas

__all__ = [
    "crowded",
    "fastest_draft",
    "is_reduced",
    "packed",
    "parked",
    "raised",
    "reduced_cells",
    "spread",
    "tensor_options",
]

Pattern = tuple[tuple[int, int, int], ...]
"""(seat, first unit, end unit) of each segment of a replica; seats are its cells in order."""
Seats = Mapping[int, tuple[int, ...]]
"""Number of a replica → its cells, in the order of the seats."""


def is_reduced(cell: Cell) -> bool:
    """Return whether the cell has fewer ranks than at launch."""
    return cell.nominal_ppm < PPM


def reduced_cells(topology: Topology) -> tuple[int, ...]:
    """Return the numbers of the cells with fewer ranks than at launch."""
    return tuple(cell.id for cell in topology.cells if is_reduced(cell))


def parked(topology: Topology, cells: Collection[int]) -> Topology:
    """Return the topology in which ``cells`` do not compute: their segments stay listed, their ranks are parked."""
    resting = [cell for cell in topology.cells if cell.id in cells]
    if not resting:
        return topology
    ranks = sorted({*topology.parked, *(rank for cell in resting for rank in cell.ranks)})
    left = tuple(cell for cell in topology.cells if cell.id not in cells)
    return replace(topology, cells=left, parked=tuple(ranks))


def packed(topology: Topology, seats_change: bool = False) -> Topology:
    """Return the topology whose slow and lost cells share as few pipelines as possible.

    Replicas cut alike exchange cells of the same seat, so that every cell keeps its units. The replica with the slowest
    cell keeps its place and gets the slowest cell of each seat, and so on. With ``seats_change`` any cell takes any
    seat, as at a restart.
    """
    rate = {cell.id: cell.rate_ppm for cell in topology.cells}

    def deal(seats: Seats) -> dict[int, list[int]]:
        order = sorted(seats, key=lambda number: (sorted(rate.get(cell, 0) for cell in seats[number]), number))
        columns = [sorted(column, key=lambda cell: rate.get(cell, 0)) for column in _columns(order, seats)]
        if seats_change:
            every = sorted((cell for number in order for cell in seats[number]), key=lambda cell: rate.get(cell, 0))
            columns = [every[seat :: len(columns)] for seat in range(len(columns))]
        return {number: [column[place] for column in columns] for place, number in enumerate(order)}

    return _dealt(topology, deal)


def spread(topology: Topology) -> Topology:
    """Return the topology whose slow and lost cells are spread over pipelines as evenly as possible.

    It is :func:`packed`'s counterpart for the graph axis: a pipeline with one slow cell hides it by another cut, one
    with many cannot. Cells change pipelines within their seat; seat by seat the slowest cell goes to the pipeline that
    lacks least so far.
    """
    rate = {cell.id: cell.rate_ppm for cell in topology.cells}

    def deal(seats: Seats) -> dict[int, list[int]]:
        lacking, placed = dict.fromkeys(seats, 0), {number: list[int]() for number in seats}
        for column in _columns(tuple(seats), seats):
            for number, cell in _evenly(dict(zip(seats, column, strict=True)), rate, lacking).items():
                placed[number].append(cell)
                lacking[number] += max(0, PPM - rate.get(cell, 0))
        return placed

    return _dealt(topology, deal)


def _dealt(topology: Topology, deal: Callable[[Seats], Mapping[int, Sequence[int]]]) -> Topology:
    """Return the topology in which ``deal`` has given the cells of the replicas that are cut alike to their seats."""
    alike: dict[Pattern, list[int]] = {}
    for number, replica in enumerate(topology.replicas):
        alike.setdefault(_pattern(replica), []).append(number)
    replicas = list(topology.replicas)
    for pattern, numbers in alike.items():
        seats = {number: tuple(dict.fromkeys(s.cell for s in replicas[number].segments)) for number in numbers}
        for number, cells in deal(seats).items():
            replicas[number] = Replica(tuple(Segment(cells[seat], first, end) for seat, first, end in pattern))
    return replace(topology, replicas=tuple(replicas))


def _evenly(seated: dict[int, int], rate: dict[int, int], lacking: dict[int, int]) -> dict[int, int]:
    """Pipeline → cell of one seat; a cell that is not slow changes only with a slow one."""
    slow = sorted((cell for cell in seated.values() if rate.get(cell, 0) < PPM), key=lambda cell: rate.get(cell, 0))
    home = {cell: number for number, cell in seated.items()}
    free = sorted(seated, key=lambda number: (lacking[number], number))
    found: dict[int, int] = {}
    for cell in slow:
        least = [number for number in free if lacking[number] == lacking[free[0]]]
        number = home[cell] if home[cell] in least else free[0]
        free.remove(number)
        found[number] = cell
    left = [number for number in free if seated[number] in slow]
    for number, cell in seated.items():
        if cell not in slow:
            found[number if number in free else left.pop(0)] = cell
    return found


def _columns(order: Sequence[int], seats: Seats) -> Iterator[list[int]]:
    """Yield the cells of each seat, replica by replica in ``order``."""
    for seat in range(len(seats[order[0]])):
        yield [seats[number][seat] for number in order]


def _pattern(replica: Replica) -> Pattern:
    seats: dict[int, int] = {}
    return tuple((seats.setdefault(s.cell, len(seats)), s.first, s.end) for s in replica.segments)


def tensor_options(topology: Topology, cut: bool = False) -> tuple[Topology, ...]:
    """Return the topologies among which the axis chooses, the one in which all reduced cells compute first.

    Reduced cells are parked from the slowest on. Each option is there with replicas as they are, packed, and, where
    they may be ``cut`` anew, spread.
    """
    rates = sorted({cell.nominal_ppm for cell in topology.cells if is_reduced(cell)})
    if not rates:
        return (topology,)
    found = [topology]
    for rate in rates:
        found.append(parked(topology, [cell.id for cell in topology.cells if cell.nominal_ppm <= rate]))
    ways = (packed, spread) if cut else (packed,)
    every = [option for one in found if one.cells for option in (one, *(way(one) for way in ways))]
    return tuple(dict.fromkeys(every))


def crowded(plan: Plan, profile: Profile, tied: Sequence[tuple[int, int]] = ()) -> tuple[int, ...]:
    """Return the reduced cells that compute in ``plan`` and lack the memory for it."""
    busy = {piece.cell for piece in plan.pieces}
    some = [cell for cell in plan.cells if is_reduced(cell) and cell.id in busy]
    need = memory_peaks(plan, profile, tied) if some else {}
    return tuple(cell.id for cell in some if need[cell.id] > cell.memory_bytes)


def fastest_draft(topology: Topology, profile: Profile, draft: Callable[[Topology], Draft]) -> Draft:
    """Return the fastest of the drafts of the options that fit memory. All of them list ``topology``'s cells.

    Raises :class:`PlanError` when there is none.
    """
    options = tensor_options(topology)
    if len(options) == 1:
        return draft(topology)
    found: list[Draft] = []
    refusals: list[PlanError] = []
    for option in options:
        try:
            one = draft(option)
        except PlanError as error:
            refusals.append(error)
            continue
        if without := crowded(one.beside(reduced_cells(topology)), profile, topology.tied):
            refusals.append(PlanError(f"cells {list(without)} lack the memory to go on with fewer ranks"))
        else:
            found.append(one)
    if not found:
        raise refusals[0]
    best = min(found, key=lambda one: one.time_ns)
    bare = replace(best.bare, cells=topology.cells, replicas=living_replicas(topology), parked=topology.parked)
    return replace(best, bare=bare)


def raised(topology: Topology, gain_ppm: int) -> Topology:
    """Return the topology whose reduced cells run at raised clocks, up to ``gain_ppm`` times their nominal speed.

    A reduced cell is raised until it keeps up with a cell of the launch's size. A faster one would only wait. In
    arXiv 2504.06095 the power of lost devices is given to the others of their domain.
    """
    if gain_ppm < PPM:
        raise ValueError(f"a raised clock gains at least nothing, not {gain_ppm} ppm")
    cells = tuple(
        replace(cell, speed_ppm=cell.speed_ppm * min(gain_ppm, -(-PPM * PPM // cell.nominal_ppm)) // PPM)
        if is_reduced(cell)
        else cell
        for cell in topology.cells
    )
    return replace(topology, cells=cells)
