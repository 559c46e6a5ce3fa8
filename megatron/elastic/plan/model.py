"""Plans as plain, immutable, hashable data.

Nothing here plans. Planner inputs are integers (nanoseconds, bytes), so that every process
gets the same plan from the same record; processes compare :attr:`Plan.digest`.

Rows: the global batch of a step is rows ``0 … GBS-1`` in the order in which Megatron's nominal grid consumes them.
Nominal micro-batch ``q = row // MBS`` belongs to data-parallel rank ``q % DP`` as its ``q // DP``-th. The plan speaks
of rows only; the data source maps rows to samples.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

__all__ = [
    "Action",
    "Cell",
    "Edge",
    "Grid",
    "Op",
    "Piece",
    "Plan",
    "Profile",
    "Replica",
    "Segment",
    "Topology",
    "UnitCost",
]


@dataclass(frozen=True)
class Grid:
    """The nominal sample grid, fixed at launch."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int

    def nominal_microbatch(self, row: int) -> int:
        """Which nominal micro-batch a row of the global batch belongs to."""
        return row // self.micro_batch_size


@dataclass(frozen=True)
class UnitCost:
    """Cost of one unit for one sample row, on a cell of speed 1."""

    forward_ns: int
    backward_ns: int
    """Whole backward; input- and weight-gradient parts below."""
    weight_grad_ns: int
    param_bytes: int
    state_bytes: int
    activation_bytes: int
    """Held from forward to backward, per row."""
    boundary_bytes: int
    """Sent to the next unit's cell, per row."""


@dataclass(frozen=True)
class Cell:
    """A tensor-parallel group at one place. ``ranks`` in TP order; ``speed_ppm`` relative to nominal."""

    id: int
    ranks: tuple[int, ...]
    node: int = 0
    speed_ppm: int = 1_000_000
    memory_bytes: int = 1 << 62
    nominal_ppm: int = 1_000_000
    """Nominal speed of a cell of so many ranks, relative to the launch's number of ranks."""

    @property
    def rate_ppm(self) -> int:
        """Rows a time, relative to a cell of the launch's size without a slow rank; at least 1."""
        return max(1, self.speed_ppm * self.nominal_ppm // 1_000_000)


@dataclass(frozen=True)
class Segment:
    """Units ``[first, end)`` computed by ``cell`` as part of one replica."""

    cell: int
    first: int
    end: int


@dataclass(frozen=True)
class Replica:
    """Segments that together hold units ``0 … U-1`` once, in order: a pipeline."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Profile:
    """Measured costs, shared through the decision record."""

    units: tuple[UnitCost, ...]
    link_bytes_per_s: int = 10_000_000_000
    latency_ns: int = 20_000
    resident_ppm: int = 1_000_000
    """Share of optimizer state that lies in cells' memory; the rest lies in that of the host of an accelerator."""

    def resident_bytes(self, unit: UnitCost) -> int:
        """Return the bytes of a unit's optimizer state that lie in cells' memory."""
        return -(-unit.state_bytes * self.resident_ppm // 1_000_000)


@dataclass(frozen=True)
class Topology:
    """The living cells, and the units that each holds now.

    ``replicas`` are the pipelines as they stood before the change, with dead
    cells' segments still listed: a segment whose cell is not in ``cells`` is lost.
    """

    grid: Grid
    units: int
    cells: tuple[Cell, ...]
    replicas: tuple[Replica, ...]
    tied: tuple[tuple[int, int], ...] = ()
    """Pairs of units that share a weight (tied embeddings)."""
    parked: tuple[int, ...] = ()
    """Living ranks of broken tensor-parallel groups: members for state only."""
    crew_size: int = 1
    """Number of adjacent replicas that share the experts of their layers (:mod:`~megatron.elastic.plan.crews`)."""


@dataclass(frozen=True)
class Piece:
    """Rows that one cell runs through units ``[first, end)`` as one forward/backward; none: a ghost of its crew."""

    id: int
    cell: int
    first: int
    end: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Edge:
    """Rows of ``source`` (ending where ``target`` begins) that ``target`` needs.

    ``source_at``/``target_at`` are the positions of ``rows`` inside each piece.
    """

    source: int
    target: int
    rows: tuple[int, ...]
    source_at: tuple[int, ...]
    target_at: tuple[int, ...]


class Op(Enum):
    """One action of a rank in the schedule table."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "BI"
    BACKWARD_WEIGHT = "BW"
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"


@dataclass(frozen=True)
class Action:
    """One line of a cell's schedule. ``edge`` indexes ``Plan.edges`` for sends and receives, else -1."""

    op: Op
    piece: int
    edge: int = -1


@dataclass(frozen=True)
class Plan:
    """The plan of one generation. ``tables[cell id]`` is executed in order by every rank of the cell."""

    grid: Grid
    cells: tuple[Cell, ...]
    replicas: tuple[Replica, ...]
    pieces: tuple[Piece, ...]
    edges: tuple[Edge, ...]
    tables: tuple[tuple[int, tuple[Action, ...]], ...]
    """(cell id, actions), ascending by cell; idle (spare) cells are absent."""
    frequencies_khz: tuple[tuple[int, int], ...] = ()
    parked: tuple[int, ...] = ()
    """Ranks that are members for state only."""
    labels: tuple[str, ...] = field(default=())
    skipped: tuple[int, ...] = ()
    """Rows of the global batch that no cell computes, ascending: a policy that drops replicas lets the batch shrink."""
    crews: tuple[tuple[int, ...], ...] = ()
    """Cells that compute in lockstep, since they exchange tokens (:mod:`~megatron.elastic.plan.crews`)."""

    @property
    def rows(self) -> int:
        """Rows of the global batch that are computed."""
        return self.grid.global_batch_size - len(self.skipped)

    def table(self, cell: int) -> tuple[Action, ...]:
        """Actions of ``cell`` (empty when it has none)."""
        return dict(self.tables).get(cell, ())

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of a canonical encoding of everything in the plan; the same on any machine."""
        digest = hashlib.sha256(b"elastic-plan-1")

        def put(tag: str, numbers: Iterable[int]) -> None:
            packed = array("q", numbers)
            digest.update(f"{tag}{len(packed)}:".encode())
            if sys.byteorder == "big":
                packed.byteswap()
            digest.update(packed.tobytes())

        grid, edges = self.grid, self.edges
        put("grid", (grid.global_batch_size, grid.micro_batch_size, grid.data_parallel_size))
        put("cells", _flat((c.id, c.node, c.rate_ppm, c.memory_bytes, len(c.ranks), *c.ranks) for c in self.cells))
        put("replicas", _flat((len(r.segments), *_flat(_numbers(s) for s in r.segments)) for r in self.replicas))
        put("pieces", _flat((p.cell, p.first, p.end, len(p.rows), *p.rows) for p in self.pieces))
        put("edges", _flat((e.source, e.target, len(e.rows), *e.source_at, *e.target_at, *e.rows) for e in edges))
        code = {op: number for number, op in enumerate(Op)}
        put("tables", _flat((c, len(t), *_flat((code[a.op], a.piece, a.edge) for a in t)) for c, t in self.tables))
        put("khz", _flat(self.frequencies_khz))
        put("parked", self.parked)
        put("skipped", self.skipped)
        put("crews", _flat((len(crew), *crew) for crew in self.crews))
        digest.update("\0".join(self.labels).encode())
        return digest.hexdigest()


def _numbers(segment: Segment) -> tuple[int, int, int]:
    return segment.cell, segment.first, segment.end


def _flat(parts: Iterable[Sequence[int]]) -> Iterable[int]:
    for part in parts:
        yield from part
