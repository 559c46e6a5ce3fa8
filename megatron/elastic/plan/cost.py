"""Costs of pieces and edges on given cells: integers only.

Idea: every consumer (list scheduler, simulator, planner) reads the same table
of nanoseconds, so that they cannot disagree. Ceiling division throughout: a
piece never costs less than its exact time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.elastic.plan.model import Cell, Edge, Piece, Profile, Replica

__all__ = ["Costs", "PieceCost", "held_bytes", "piece_costs", "plan_costs", "unit_sums"]

PPM = 1_000_000


@dataclass(frozen=True)
class PieceCost:
    """Times of one piece on its cell, in ns. ``backward`` is the whole; ``weight`` the part that may be deferred."""

    forward: int
    backward: int
    weight: int
    activation_bytes: int


@dataclass(frozen=True)
class Costs:
    """``pieces[piece id]`` and ``edges[edge index]`` (ns a transfer, the same both ways; 0 within a cell)."""

    pieces: Sequence[PieceCost] | Mapping[int, PieceCost]
    edges: tuple[int, ...]


def unit_sums(values: Iterable[int]) -> list[int]:
    """Prefix sums: ``sums[end] - sums[first]`` is the total of units ``[first, end)``."""
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def plan_costs(pieces: Sequence[Piece], edges: Sequence[Edge], cells: Sequence[Cell], profile: Profile) -> Costs:
    """Times of all pieces and transfers under ``profile`` and the cells' speeds."""
    return Costs(piece_costs(pieces, cells, profile), tuple(_transfer(edge, pieces, profile) for edge in edges))


def piece_costs(pieces: Iterable[Piece], cells: Iterable[Cell], profile: Profile) -> tuple[PieceCost, ...]:
    """Times of ``pieces``, in their order, under ``profile`` and the speeds of ``cells``."""
    speed = {cell.id: cell.rate_ppm for cell in cells}
    forward = unit_sums(unit.forward_ns for unit in profile.units)
    backward = unit_sums(unit.backward_ns for unit in profile.units)
    weight = unit_sums(unit.weight_grad_ns for unit in profile.units)
    held = unit_sums(unit.activation_bytes for unit in profile.units)

    def scaled(sums: list[int], piece: Piece) -> int:
        return -(-(sums[piece.end] - sums[piece.first]) * len(piece.rows) * PPM // speed[piece.cell])

    known: dict[tuple[int, int, int, int], PieceCost] = {}
    found = []
    for piece in pieces:
        key = piece.cell, piece.first, piece.end, len(piece.rows)
        cost = known.get(key)
        if cost is None:
            size = (held[piece.end] - held[piece.first]) * len(piece.rows)
            cost = known[key] = PieceCost(scaled(forward, piece), scaled(backward, piece), scaled(weight, piece), size)
        found.append(cost)
    return tuple(found)


def _transfer(edge: Edge, pieces: Sequence[Piece], profile: Profile) -> int:
    source, target = pieces[edge.source], pieces[edge.target]
    if source.cell == target.cell:
        return 0
    size = profile.units[source.end - 1].boundary_bytes * len(edge.rows)
    return profile.latency_ns + -(-size * 1_000_000_000 // profile.link_bytes_per_s)


def held_bytes(
    replicas: Iterable[Replica], profile: Profile, tied: Sequence[tuple[int, int]] = (), shares: int = 1
) -> dict[int, int]:
    """Device bytes of parameters and optimizer state per cell.

    Optimizer state counts divided by the number of cells that hold the unit (ZeRO-1 over the unit group), but by no
    less than ``shares``, the nominal data-parallel size. Blocks that a survivor was promoted to own move from host
    memory to the device only where that has space, so they need none. Tied units share a weight: a cell with both holds
    it once, and all their holders share its state. The weight is the smaller unit: the other one has more beside it.
    """
    holders: dict[int, set[int]] = {}
    for replica in replicas:
        for segment in replica.segments:
            for unit in range(segment.first, segment.end):
                holders.setdefault(unit, set()).add(segment.cell)
    units = {unit: (profile.units[unit].param_bytes, profile.resident_bytes(profile.units[unit])) for unit in holders}
    parts = []
    for pair in tied:
        users = [unit for unit in pair if unit in holders]
        weight, state = (min((units[unit][at] for unit in users), default=0) for at in range(2))
        parts.append((weight, state, {cell for unit in users for cell in holders[unit]}))
        units |= {unit: (units[unit][0] - weight, units[unit][1] - state) for unit in users}
    parts += [(*units[unit], cells) for unit, cells in holders.items()]
    need: dict[int, int] = {}
    for weight, state, cells in parts:
        each = weight + -(-state // max(len(cells), shares))
        for cell in cells:
            need[cell] = need.get(cell, 0) + each
    return need
