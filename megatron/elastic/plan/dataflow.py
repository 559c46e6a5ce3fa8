"""The dataflow axis: which rows of the global batch run on which cell.

Idea: a step is a set of pieces (cell, unit range, rows) such that every row
passes every unit exactly once. Reroute and resize are two generators of that
one representation. *Reroute* (ReCycle, arXiv 2405.14009) hands whole nominal
micro-batches of a lost cell to living cells that hold the same units. *Resize*
(ElasWave, arXiv 2510.00606) cuts the rows of each wave anew, so that every
living cell of the stage gets almost the same number of rows per wave.

Invariants: pieces with the same unit range partition the rows they carry; a
piece's backward runs where its forward ran (there is one piece for both);
nothing depends on anything but the arguments.

Mixing: with ``mix_microbatches=False`` a piece never holds rows of two nominal micro-batches. The loss of a nominal
micro-batch is then a sum over whole pieces, and dropout and loss functions see one micro-batch at a time. But a cell
that took rows over runs more and smaller kernels. With ``True`` a cell runs all rows of a wave, its own and those taken
over, as one larger piece, with fewer kernels and transfers. The loss must then weigh rows by :func:`row_groups`, and
statistics over a micro-batch (auxiliary losses of experts) are taken over other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron.elastic.plan.model import Edge, Grid, Piece, Topology

__all__ = [
    "PlanError",
    "RowGroup",
    "Share",
    "apportion",
    "deal",
    "home_rows",
    "microbatch_rows",
    "microbatches",
    "number_pieces",
    "piece_edges",
    "reroute",
    "resize",
    "row_groups",
    "split_rows",
]


class PlanError(ValueError):
    """No plan of the wanted kind exists; the text says which units or rows are at fault."""


@dataclass(frozen=True)
class Share:
    """Rows of one piece before pieces get their numbers; ``order`` is when the nominal schedule would run it."""

    cell: int
    first: int
    end: int
    rows: tuple[int, ...]
    order: int


@dataclass(frozen=True)
class RowGroup:
    """Positions inside a piece whose rows belong to one nominal micro-batch."""

    microbatch: int
    positions: tuple[int, ...]


Rows = tuple[int, ...]
Homes = Sequence[Sequence[Rows]]
"""By replica: the rows of each piece it starts from, in the order it runs them."""


def microbatches(grid: Grid) -> int:
    """Number of nominal micro-batches in the global batch.

    Raises :class:`PlanError` when the global batch is not a multiple of MBS x DP.
    """
    wave = grid.micro_batch_size * grid.data_parallel_size
    if grid.global_batch_size % wave or grid.global_batch_size <= 0:
        raise PlanError(
            f"--global-batch-size {grid.global_batch_size} is not a multiple of "
            f"--micro-batch-size × data-parallel size = {wave}"
        )
    return grid.global_batch_size // grid.micro_batch_size


def microbatch_rows(grid: Grid, microbatch: int) -> tuple[int, ...]:
    """Rows of nominal micro-batch ``microbatch``, ascending."""
    first = microbatch * grid.micro_batch_size
    return tuple(range(first, first + grid.micro_batch_size))


def row_groups(grid: Grid, piece: Piece) -> tuple[RowGroup, ...]:
    """Rows of ``piece`` by nominal micro-batch, ascending; one group unless micro-batches were mixed."""
    groups: dict[int, list[int]] = {}
    for position, row in enumerate(piece.rows):
        groups.setdefault(grid.nominal_microbatch(row), []).append(position)
    return tuple(RowGroup(microbatch, tuple(groups[microbatch])) for microbatch in sorted(groups))


def apportion(total: int, weights: Sequence[int], rotation: int = 0) -> tuple[int, ...]:
    """Split ``total`` by ``weights`` (largest remainder; ties go round from ``rotation``).

    The result sums to ``total``; each part is the exact share rounded down or up.
    """
    whole = sum(weights)
    if whole <= 0:
        raise PlanError("apportionment needs a positive weight")
    parts = [total * weight // whole for weight in weights]
    remainders = [total * weight % whole for weight in weights]
    count = len(weights)
    order = sorted(range(count), key=lambda i: (-remainders[i], (i - rotation) % count))
    for index in order[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


def deal(count: int, quotas: Sequence[int], rotation: int = 0) -> tuple[int, ...]:
    """The receiver of each item ``0 … count-1``: smooth, so that each prefix is split almost like ``quotas``.

    ``sum(quotas) == count``. The ``j``-th item of a holder with quota ``q`` stands
    at ``(2 j + 1) / (2 q)`` of the way (ties go round from ``rotation``);
    O(count log count).
    """
    if sum(quotas) != count:
        raise PlanError(f"quotas {tuple(quotas)} do not sum to {count}")
    holders = len(quotas)
    places = [
        (((2 * j + 1) << 60) // (2 * quota), (holder - rotation) % holders, holder)
        for holder, quota in enumerate(quotas)
        for j in range(quota)
    ]
    return tuple(holder for _, _, holder in sorted(places))


def home_rows(topology: Topology, weights: Sequence[int] | None = None) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Rows of each replica's nominal micro-batches, in the order the replica runs them.

    As many replicas as nominal data-parallel ranks and no ``weights``: Megatron's
    grid, micro-batch ``q`` on replica ``q % DP``. Otherwise micro-batches are
    apportioned by ``weights`` over the whole step and dealt out smoothly.
    """
    total = microbatches(topology.grid)
    count = len(topology.replicas)
    rows = [microbatch_rows(topology.grid, microbatch) for microbatch in range(total)]
    if weights is None and count == topology.grid.data_parallel_size:
        return tuple(tuple(rows[replica::count]) for replica in range(count))
    quotas = apportion(total, weights if weights is not None else [1] * count)
    homes: list[list[tuple[int, ...]]] = [[] for _ in range(count)]
    for microbatch, replica in enumerate(deal(total, quotas)):
        homes[replica].append(rows[microbatch])
    return tuple(map(tuple, homes))


def split_rows(grid: Grid, quotas: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Homes with exactly ``quotas`` rows each: whole micro-batches dealt out smoothly, the last ones cut.

    No part holds rows of two micro-batches. Raises :class:`PlanError` unless quotas sum to the global batch.
    """
    if sum(quotas) != grid.global_batch_size:
        raise PlanError(f"quotas {tuple(quotas)} do not sum to {grid.global_batch_size} rows")
    size = grid.micro_batch_size
    whole = [quota // size for quota in quotas]
    homes: list[list[tuple[int, ...]]] = [[] for _ in quotas]
    for microbatch, replica in enumerate(deal(sum(whole), whole)):
        homes[replica].append(microbatch_rows(grid, microbatch))
    at = sum(whole) * size
    for replica, quota in enumerate(quotas):
        end = at + quota % size
        while at < end:
            cut = min(end, (at // size + 1) * size)
            homes[replica].append(tuple(range(at, cut)))
            at = cut
    return tuple(map(tuple, homes))


@dataclass
class _Holder:
    """A living cell's claim on a unit range, while rows are dealt."""

    cell: int
    speed: int
    load: int = 0


def _holders(topology: Topology, first: int, end: int) -> list[tuple[int, int, list[int]]]:
    """``[first, end)`` cut so that each part has the same living holders: (first, end, cells)."""
    alive = {cell.id for cell in topology.cells}
    spans = [(s.first, s.end, s.cell) for r in topology.replicas for s in r.segments if s.cell in alive]
    cuts = {first, end} | {edge for a, b, _ in spans for edge in (a, b) if first < edge < end}
    marks = sorted(cuts)
    parts = []
    for a, b in pairwise(marks):
        cells = sorted({cell for x, y, cell in spans if x <= a and b <= y})
        if not cells:
            raise PlanError(f"units [{a}, {b}) have no living holder")
        parts.append((a, b, cells))
    return parts


def _own_shares(topology: Topology, homes: Homes) -> tuple[list[Share], list[Share]]:
    """Shares of the plan before the loss: those of living cells, and orphans of dead ones."""
    alive = {cell.id for cell in topology.cells}
    kept: list[Share] = []
    orphans: list[Share] = []
    for replica, owned in zip(topology.replicas, homes, strict=True):
        for wave, rows in enumerate(owned):
            for segment in replica.segments:
                share = Share(segment.cell, segment.first, segment.end, rows, wave)
                (kept if segment.cell in alive else orphans).append(share)
    return kept, orphans


def _least_loaded(claims: dict[int, _Holder], cells: Sequence[int], work: int, rotation: int) -> int:
    """Holder that would finish first with ``work`` more (exact integer comparison), ties go round."""
    count = len(cells)
    ranked = (
        ((claims[cell].load + work) * 1_000_000 // claims[cell].speed, (index - rotation) % count, cell)
        for index, cell in enumerate(cells)
    )
    return min(ranked)[2]


class _Dealer:
    """Deals the rows of lost cells wave by wave: own work of a wave first, then the rows lost in it.

    Loads grow with the step, so every prefix of the step is balanced, not only its end.
    """

    def __init__(self, topology: Topology, unit_cost: Sequence[int], orphans: Sequence[Share]) -> None:
        self.claims = {cell.id: _Holder(cell.id, cell.rate_ppm) for cell in topology.cells}
        self.prefix = list(accumulate(unit_cost, initial=0))
        self.parts = {span: _holders(topology, *span) for span in sorted({(o.first, o.end) for o in orphans})}
        self.turn = 0

    def own(self, share: Share) -> None:
        """Count the work that a living cell computes anyway."""
        self.claims[share.cell].load += self.work(share.first, share.end, len(share.rows))

    def work(self, first: int, end: int, rows: int) -> int:
        """Cost of ``rows`` through units ``[first, end)`` at nominal speed."""
        return rows * (self.prefix[end] - self.prefix[first])

    def give(self, cells: Sequence[int], work: int) -> int:
        """The holder that would be done first with ``work`` more; ties go round."""
        cell = _least_loaded(self.claims, cells, work, self.turn)
        self.claims[cell].load += work
        self.turn += 1
        return cell


def _waves(kept: Sequence[Share], orphans: Sequence[Share]) -> Iterable[tuple[bool, Share]]:
    """(is orphan, share), wave by wave, a wave's own shares before its orphans."""
    marked = [(False, share) for share in kept] + [(True, share) for share in orphans]
    return sorted(marked, key=lambda m: (m[1].order, m[0], m[1].rows, m[1].first))


Dealt = list[tuple[int, Rows]]
Cut = Callable[[_Dealer, Sequence[int], Rows, int, int], Dealt]
"""(dealer, holders, rows, first unit, end unit) → rows by holder."""


def _dealt(topology: Topology, unit_cost: Sequence[int], homes: Homes, cut: Cut) -> list[Share]:
    """Own shares as they were, and those of lost cells as ``cut`` deals them, wave by wave."""
    kept, orphans = _own_shares(topology, homes)
    dealer = _Dealer(topology, unit_cost, orphans)
    shares = list(kept)
    for orphan, share in _waves(kept, orphans):
        if not orphan:
            dealer.own(share)
            continue
        for first, end, cells in dealer.parts[share.first, share.end]:
            dealt = cut(dealer, cells, share.rows, first, end)
            shares += [Share(cell, first, end, rows, share.order) for cell, rows in dealt]
    return shares


def _whole(dealer: _Dealer, cells: Sequence[int], rows: Rows, first: int, end: int) -> Dealt:
    """All rows to one holder."""
    return [(dealer.give(cells, dealer.work(first, end, len(rows))), rows)]


def _row_by_row(dealer: _Dealer, cells: Sequence[int], rows: Rows, first: int, end: int) -> Dealt:
    """Each row to the holder that would finish first; a holder's rows are adjacent."""
    counts = dict.fromkeys(cells, 0)
    for _ in rows:
        counts[dealer.give(cells, dealer.work(first, end, 1))] += 1
    ends = list(accumulate(counts.values()))
    return [(cell, rows[stop - counts[cell] : stop]) for cell, stop in zip(cells, ends, strict=True) if counts[cell]]


def reroute(topology: Topology, unit_cost: Sequence[int], homes: Homes) -> list[Share]:
    """Whole nominal micro-batches of lost cells go to the living holder that would finish them first.

    Every other share stays where it was. ``unit_cost[u]`` weighs unit ``u`` (ns a row).
    Raises :class:`PlanError` when units have no living holder.
    """
    return _dealt(topology, unit_cost, homes, _whole)


def resize(topology: Topology, unit_cost: Sequence[int], homes: Homes, mix_microbatches: bool = False) -> list[Share]:
    """Rows of lost cells are cut over all living holders, wave by wave, balanced over the whole step.

    With ``mix_microbatches`` a cell's own and taken-over rows of a wave form one piece.
    Raises :class:`PlanError` when units have no living holder.
    """
    shares = _dealt(topology, unit_cost, homes, _row_by_row)
    return _mixed(shares) if mix_microbatches else shares


def _mixed(shares: Iterable[Share]) -> list[Share]:
    """Shares of one cell, unit range and wave as one."""
    merged: dict[tuple[int, int, int, int], list[int]] = {}
    for share in shares:
        merged.setdefault((share.order, share.first, share.end, share.cell), []).extend(share.rows)
    return [
        Share(cell, first, end, tuple(sorted(rows)), order)
        for (order, first, end, cell), rows in sorted(merged.items())
    ]


def number_pieces(shares: Iterable[Share]) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """Pieces with ids ``0 … n-1`` (in order of wave, rows, units) and the wave of each."""
    ordered = sorted(shares, key=lambda s: (s.order, s.rows[0], s.first, s.cell, s.rows))
    pieces = tuple(Piece(number, s.cell, s.first, s.end, s.rows) for number, s in enumerate(ordered))
    return pieces, tuple(share.order for share in ordered)


def piece_edges(pieces: Sequence[Piece]) -> tuple[Edge, ...]:
    """Which rows each piece needs from which piece that ends where it begins.

    Ordered by (target, source). Edges between pieces of one cell are listed too:
    the executor keeps the tensor, tables hold no transfer for them.
    Raises :class:`PlanError` when a row has no source.
    """
    at: dict[tuple[int, int], tuple[int, int]] = {}
    whole: dict[tuple[int, tuple[int, ...]], int] = {}
    for piece in pieces:
        whole[piece.end, piece.rows] = piece.id
        for position, row in enumerate(piece.rows):
            if at.setdefault((piece.end, row), (piece.id, position)) != (piece.id, position):
                raise PlanError(f"row {row} leaves units ending at {piece.end} twice")
    edges: list[Edge] = []
    for piece in pieces:
        if piece.first == 0:
            continue
        alike = whole.get((piece.first, piece.rows))
        if alike is not None:
            every = tuple(range(len(piece.rows)))
            edges.append(Edge(alike, piece.id, piece.rows, every, every))
            continue
        found: dict[int, tuple[list[int], list[int], list[int]]] = {}
        for position, row in enumerate(piece.rows):
            source = at.get((piece.first, row))
            if source is None:
                raise PlanError(f"row {row} enters unit {piece.first} from nowhere")
            rows, source_at, target_at = found.setdefault(source[0], ([], [], []))
            rows.append(row)
            source_at.append(source[1])
            target_at.append(position)
        for number in sorted(found):
            rows, source_at, target_at = found[number]
            edges.append(Edge(number, piece.id, tuple(rows), tuple(source_at), tuple(target_at)))
    return tuple(edges)
