"""Crews: cells that share the experts of their layers and exchange tokens in every forward and backward.

Idea: a crew is the living part of an expert-parallel group of the launch, at one stage. Its cells exchange tokens
inside a layer, so they must run their pieces in lockstep: the same unit ranges, forwards and backwards in the same
order. A step is therefore planned over crews, as if each were one cell that computes as many micro-batches at a time as
it has cells. Then each piece of a crew becomes one piece for each of its cells: a micro-batch, or a *ghost* without
rows, which only takes part in the exchange. A crew with fewer cells than micro-batches in a piece takes several turns.

Invariant: micro-batches stay whole. The order in which the crews' tables run is an order for the cells' tables too,
since an edge between two pieces of cells is part of an edge between their crews' pieces. So if the tables of the crews
end, those of the cells end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from megatron.elastic.plan.dataflow import PlanError, piece_edges
from megatron.elastic.plan.model import Cell, Grid, Op, Piece, Plan, Profile, Replica, Topology
from megatron.elastic.plan.schedule.table import Step, index_edges, tables_from_orders
from megatron.elastic.plan.topology import living_replicas

__all__ = ["condensed", "crewed", "crews_of", "expanded"]

_COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})


def crewed(choose: Callable[[Topology, Profile], Plan]) -> Callable[[Topology, Profile], Plan]:
    """Return the choice of plans that ``choose`` makes over crews, where a topology has any."""

    def chosen(topology: Topology, profile: Profile) -> Plan:
        if topology.crew_size == 1:
            return choose(topology, profile)
        return expanded(choose(condensed(topology), profile), topology)

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


def condensed(topology: Topology) -> Topology:
    """Return the topology of which each crew is a cell, and each group of replicas that share experts a replica.

    A crew computes its cells' number of rows in the time in which its slowest cell computes one.
    """
    cells = tuple(
        Cell(
            number,
            tuple(rank for cell in living for rank in cell.ranks),
            living[0].node,
            min(cell.speed_ppm for cell in living),
            sum(cell.memory_bytes for cell in living),
            sum(cell.nominal_ppm for cell in living),
        )
        for number, living in sorted(crews_of(topology).items())
        if living
    )
    grid, size = topology.grid, topology.crew_size
    return replace(
        topology,
        grid=Grid(grid.global_batch_size, grid.micro_batch_size * size, grid.data_parallel_size // size),
        cells=cells,
        replicas=tuple(group[0] for group in _groups(topology)),
        crew_size=1,
    )


def expanded(plan: Plan, topology: Topology) -> Plan:
    """Return the plan of the cells of ``topology`` that follows from the ``plan`` of its crews."""
    crews = crews_of(topology)
    pieces: list[Piece] = []
    own: dict[int, tuple[Piece, ...]] = {}
    for piece in plan.pieces:
        own[piece.id] = tuple(_own_pieces(piece, crews[piece.cell], topology.grid, len(pieces)))
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


def _own_pieces(piece: Piece, crew: Sequence[Cell], grid: Grid, number: int) -> Iterator[Piece]:
    """Yield the cells' pieces of a crew's piece, turn by turn, one a cell; they are numbered from ``number`` on."""
    batches: dict[int, list[int]] = {}
    for row in piece.rows:
        batches.setdefault(grid.nominal_microbatch(row), []).append(row)
    rows = [tuple(batches[batch]) for batch in sorted(batches)]
    ghosts: list[tuple[int, ...]] = [()] * (-len(rows) % len(crew))
    for at, mine in enumerate([*rows, *ghosts]):
        yield Piece(number + at, crew[at % len(crew)].id, piece.first, piece.end, mine)


def _groups(topology: Topology) -> list[tuple[Replica, ...]]:
    """Return the replicas that share experts, group by group. Raises :class:`PlanError` if one is not whole."""
    size, replicas = topology.crew_size, topology.replicas
    if len(replicas) % size:
        raise PlanError(f"{len(replicas)} replicas cannot share experts in groups of {size}")
    return [replicas[first : first + size] for first in range(0, len(replicas), size)]
