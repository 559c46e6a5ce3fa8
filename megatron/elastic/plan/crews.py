"""Crews: cells that share the experts of their layers and exchange tokens in every forward and backward.

Idea: a crew is the living part of an expert-parallel group of the launch, at one stage. Its cells exchange tokens
inside a layer, so they must run their pieces in lockstep: the same unit ranges, forwards and backwards in the same
order. A step is therefore planned over crews, as if each were one cell, and over *batches* of as many micro-batches as
a crew computes at a time. Then each piece of a crew becomes one piece for each of its cells: a micro-batch, or a
*ghost* without rows, which only takes part in the exchange. A crew with fewer cells than micro-batches in a batch takes
several turns. Where crews have lost cells, the width of a batch is one of the crews' sizes: the one with the shortest
step.

Invariant: micro-batches stay whole. The order in which the crews' tables run is an order for the cells' tables too,
since an edge between two pieces of cells is part of an edge between their crews' pieces. So if the tables of the crews
end, those of the cells end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from megatron.elastic.plan.dataflow import PlanError, microbatch_rows, microbatches, piece_edges
from megatron.elastic.plan.model import Cell, Grid, Op, Piece, Plan, Profile, Replica, Topology
from megatron.elastic.plan.schedule.table import Step, index_edges, tables_from_orders
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.topology import living_replicas

__all__ = ["condensed", "crewed", "crews_of", "expanded"]

_COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})


def crewed(choose: Callable[[Topology, Profile], Plan]) -> Callable[[Topology, Profile], Plan]:
    """Return the choice of plans that ``choose`` makes over crews, where a topology has any."""

    def chosen(topology: Topology, profile: Profile) -> Plan:
        if topology.crew_size == 1:
            return choose(topology, profile)
        widths = sorted({topology.crew_size, *map(len, filter(None, crews_of(topology).values()))}, reverse=True)
        plans = [(choose(condensed(topology, width), profile), width) for width in widths]
        best, width = min(plans, key=lambda found: plan_time(found[0], profile))
        return expanded(best, topology, width)

    return chosen


def crews_of(topology: Topology) -> Mapping[int, tuple[Cell, ...]]:
    """Return crew → its living cells in the order of their replicas. A crew is named by its first replica's cell.

    Raises :class:`PlanError` if the replicas of a group are not cut alike.
    """
    alive = {cell.id: cell for cell in topology.cells}
    crews: dict[int, tuple[Cell, ...]] = {}
    for group in _groups(topology):
        cuts = {tuple((s.first, s.end) for s in replica.segments) for replica in group}
        if len(cuts) > 1:
            raise PlanError("replicas that share experts are cut differently")
        for seat in zip(*(replica.segments for replica in group), strict=True):
            crews[seat[0].cell] = tuple(alive[s.cell] for s in seat if s.cell in alive)
    return crews


def condensed(topology: Topology, width: int) -> Topology:
    """Return the topology of which each crew is a cell, and each group of replicas that share experts a replica.

    Its micro-batches are batches of ``width`` micro-batches, the last ones smaller or empty; each counts as one
    micro-batch of rows. A crew takes as many turns for one as it has too few cells, each as long as its slowest cell.
    """
    cells = tuple(
        Cell(
            number,
            tuple(rank for cell in living for rank in cell.ranks),
            living[0].node,
            min(cell.speed_ppm for cell in living),
            min(cell.memory_bytes for cell in living) // -(-width // len(living)),
            min(cell.nominal_ppm for cell in living) // -(-width // len(living)),
        )
        for number, living in sorted(crews_of(topology).items())
        if living
    )
    grid, groups = topology.grid, len(_groups(topology))
    waves = -(-microbatches(grid) // (width * groups))
    return replace(
        topology,
        grid=Grid(waves * groups * grid.micro_batch_size, grid.micro_batch_size, groups),
        cells=cells,
        replicas=tuple(group[0] for group in _groups(topology)),
        crew_size=1,
    )


def expanded(plan: Plan, topology: Topology, width: int) -> Plan:
    """Return the plan of the cells of ``topology`` that follows from the ``plan`` of its crews for ``width``."""
    crews = crews_of(topology)
    pieces: list[Piece] = []
    own: dict[int, tuple[Piece, ...]] = {}
    for piece in plan.pieces:
        rows = _real_rows(piece, topology.grid, width)
        own[piece.id] = tuple(_own_pieces(piece, rows, crews[piece.cell], len(pieces)))
        pieces.extend(own[piece.id])
    orders: dict[int, list[Step]] = {}
    for _, table in plan.tables:
        for action in table:
            if action.op in _COMPUTE:
                for piece in own[action.piece]:
                    orders.setdefault(piece.cell, []).append((action.op, piece.id))
    edges = piece_edges([piece for piece in pieces if piece.rows])
    return replace(
        plan,
        grid=topology.grid,
        cells=topology.cells,
        replicas=living_replicas(topology),
        pieces=tuple(pieces),
        edges=edges,
        tables=tables_from_orders(orders, index_edges(pieces, edges)),
        parked=topology.parked,
        crews=tuple(tuple(cell.id for cell in crew) for crew in crews.values() if len(crew) > 1),
    )


def _real_rows(piece: Piece, grid: Grid, width: int) -> list[tuple[int, ...]]:
    """Return the rows of each micro-batch in the batches of a crew's piece."""
    batches = sorted({grid.nominal_microbatch(row) for row in piece.rows})
    last = microbatches(grid)
    found = [number for batch in batches for number in range(batch * width, min((batch + 1) * width, last))]
    return [microbatch_rows(grid, number) for number in found]


def _own_pieces(piece: Piece, rows: Sequence[tuple[int, ...]], crew: Sequence[Cell], number: int) -> Iterator[Piece]:
    """Yield the cells' pieces of a crew's piece, turn by turn, one a cell; they are numbered from ``number`` on."""
    ghosts: list[tuple[int, ...]] = [()] * (-len(rows) % len(crew))
    for at, mine in enumerate([*rows, *ghosts]):
        yield Piece(number + at, crew[at % len(crew)].id, piece.first, piece.end, mine)


def _groups(topology: Topology) -> list[tuple[Replica, ...]]:
    """Return the replicas that share experts, group by group. Raises :class:`PlanError` if one is not whole."""
    size, replicas = topology.crew_size, topology.replicas
    if len(replicas) % size:
        raise PlanError(f"{len(replicas)} replicas cannot share experts in groups of {size}")
    return [replicas[first : first + size] for first in range(0, len(replicas), size)]
