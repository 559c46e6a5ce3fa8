"""Schedule tables as data: the actions of each cell, in order.

Idea: a table is a list of actions per cell. It is made from a compute order, the sequence of forwards and backwards of
pieces. Each receive comes directly before the action that consumes it, each send directly after the action that
produced it. If sends never block the sender (isend), such tables deadlock only if order and data dependencies together
have a cycle. ``validate`` checks this by running them.

Sources: 1F1B is Megatron's non-interleaved schedule (Narayanan et al., arXiv
2104.04473): ``warm-up = stages - 1 - stage`` forwards, then one forward, one
backward, then the remaining backwards. Irregular plans get their order from
``listing``.

Conventions: ``Action.edge`` of a send or receive is the index of the edge. A
forward transfer goes edge.source → edge.target; a backward one carries the
gradient edge.target → edge.source. ``Action.piece`` is the piece on this
cell's side. Edges inside a cell have no transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.elastic.plan.model import Action, Edge, Op, Piece

__all__ = [
    "EdgeIndex",
    "Step",
    "build_table",
    "components",
    "index_edges",
    "is_pipeline",
    "one_f_one_b",
    "tables_from_orders",
    "zero_bubble_h1",
]

Step = tuple[Op, int]
"""A compute action: (FORWARD | BACKWARD | BACKWARD_INPUT | BACKWARD_WEIGHT, piece id)."""


@dataclass(frozen=True)
class EdgeIndex:
    """Edge indices by piece id: incoming and outgoing (local edges included)."""

    incoming: tuple[tuple[int, ...], ...]
    outgoing: tuple[tuple[int, ...], ...]
    local: tuple[bool, ...]
    """Per edge: source and target are on the same cell."""


def index_edges(pieces: Sequence[Piece], edges: Sequence[Edge]) -> EdgeIndex:
    """Adjacency of a plan (piece ids are positions in ``pieces``)."""
    incoming: list[list[int]] = [[] for _ in pieces]
    outgoing: list[list[int]] = [[] for _ in pieces]
    for number, edge in enumerate(edges):
        incoming[edge.target].append(number)
        outgoing[edge.source].append(number)
    local = tuple(pieces[edge.source].cell == pieces[edge.target].cell for edge in edges)
    return EdgeIndex(tuple(map(tuple, incoming)), tuple(map(tuple, outgoing)), local)


def build_table(order: Iterable[Step], index: EdgeIndex) -> tuple[Action, ...]:
    """Compute order of one cell → its table, with transfers around each action."""
    actions: list[Action] = []
    for op, piece in order:
        incoming = [e for e in index.incoming[piece] if not index.local[e]]
        outgoing = [e for e in index.outgoing[piece] if not index.local[e]]
        if op is Op.FORWARD:
            actions.extend(Action(Op.RECV_FORWARD, piece, e) for e in incoming)
            actions.append(Action(op, piece))
            actions.extend(Action(Op.SEND_FORWARD, piece, e) for e in outgoing)
        elif op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            actions.extend(Action(Op.RECV_BACKWARD, piece, e) for e in outgoing)
            actions.append(Action(op, piece))
            actions.extend(Action(Op.SEND_BACKWARD, piece, e) for e in incoming)
        else:
            actions.append(Action(op, piece))
    return tuple(actions)


def one_f_one_b(pieces: Sequence[int], stage: int, stages: int) -> list[Step]:
    """Megatron's 1F1B order of one stage; ``pieces`` are its micro-batches in order."""
    warm_up = min(stages - 1 - stage, len(pieces))
    order: list[Step] = [(Op.FORWARD, piece) for piece in pieces[:warm_up]]
    for done, piece in enumerate(pieces[warm_up:]):
        order.append((Op.FORWARD, piece))
        order.append((Op.BACKWARD, pieces[done]))
    order.extend((Op.BACKWARD, piece) for piece in pieces[len(pieces) - warm_up :])
    return order


def zero_bubble_h1(pieces: Sequence[int], stage: int, stages: int, late: int | None = None) -> list[Step]:
    """ZB-H1 (Qi et al., arXiv 2401.10241, section 2.1): 1F1B with weight gradients ``late`` micro-batches behind.

    With ``late = stage`` (the default) every stage holds as much as 1F1B's first
    one (``stages`` micro-batches) and the bubble is ``(stages - 1) (F + BI - BW)``.
    Where memory forbids that a stage may be less late; forwards and input
    gradients keep 1F1B's order, so that stages may differ.
    """
    count = len(pieces)
    late = stage if late is None else late
    warm_up = min(stages - 1 - stage, count)
    order: list[Step] = [(Op.FORWARD, piece) for piece in pieces[:warm_up]]
    for done in range(count):
        if done + warm_up < count:
            order.append((Op.FORWARD, pieces[done + warm_up]))
        order.append((Op.BACKWARD_INPUT, pieces[done]))
        if done >= late:
            order.append((Op.BACKWARD_WEIGHT, pieces[done - late]))
    order.extend((Op.BACKWARD_WEIGHT, piece) for piece in pieces[max(0, count - late) :])
    return order


def interleaved(chunks: Sequence[Sequence[int]], stage: int, stages: int) -> list[Step]:
    """Megatron's interleaved 1F1B order of one cell that holds ``len(chunks)`` model chunks.

    ``chunks[c]`` lists the cell's pieces of chunk ``c`` by micro-batch. Micro-batches
    go in groups of ``stages`` through all chunks (Narayanan et al., arXiv 2104.04473,
    section 2.2); warm-up is ``2 (stages - stage - 1) + (chunks - 1) stages`` forwards.
    Raises ``ValueError`` unless the number of micro-batches is a multiple of ``stages``.
    """
    count, depth = len(chunks[0]), len(chunks)
    if count % stages:
        raise ValueError(f"{count} micro-batches are not a multiple of {stages} stages")
    total = count * depth

    def piece(virtual: int, backward: bool) -> int:
        group, within = divmod(virtual, stages * depth)
        chunk, offset = divmod(within, stages)
        return chunks[depth - 1 - chunk if backward else chunk][group * stages + offset]

    warm_up = min(2 * (stages - stage - 1) + (depth - 1) * stages, total)
    order: list[Step] = [(Op.FORWARD, piece(k, False)) for k in range(warm_up)]
    for k in range(total - warm_up):
        order.append((Op.FORWARD, piece(k + warm_up, False)))
        order.append((Op.BACKWARD, piece(k, True)))
    order.extend((Op.BACKWARD, piece(k, True)) for k in range(total - warm_up, total))
    return order


def components(pieces: Sequence[Piece], edges: Sequence[Edge]) -> list[list[int]]:
    """Piece ids in groups that share neither a cell nor an edge: each can be scheduled by itself.

    Ascending, and groups by their first.
    """
    cell_of = [piece.cell for piece in pieces]
    parent = {cell: cell for cell in cell_of}

    def root(cell: int) -> int:
        while parent[cell] != cell:
            parent[cell] = parent[parent[cell]]
            cell = parent[cell]
        return cell

    for one, other in {(cell_of[edge.source], cell_of[edge.target]) for edge in edges}:
        parent[root(one)] = root(other)
    groups: dict[int, list[int]] = {}
    for number, cell in enumerate(cell_of):
        groups.setdefault(root(cell), []).append(number)
    return list(groups.values())


def is_pipeline(group: Sequence[int], pieces: Sequence[Piece]) -> list[tuple[int, list[int]]] | None:
    """``[(cell, its pieces in order)]`` by stage when ``group`` is one plain pipeline, else None.

    Plain: every cell runs one unit range, ranges follow each other, and all
    cells run the same row tuples in the same order.
    """
    by_cell: dict[int, list[int]] = {}
    for number in group:
        by_cell.setdefault(pieces[number].cell, []).append(number)
    spans: dict[tuple[int, int], int] = {}
    for cell, numbers in by_cell.items():
        span = {(pieces[n].first, pieces[n].end) for n in numbers}
        if len(span) != 1 or (only := span.pop()) in spans:
            return None
        spans[only] = cell
    stages = [(spans[span], by_cell[spans[span]]) for span in sorted(spans)]
    marks = sorted(spans)
    if any(a[1] != b[0] for a, b in pairwise(marks)):
        return None
    rows = [pieces[n].rows for n in stages[0][1]]
    if any([pieces[n].rows for n in numbers] != rows for _, numbers in stages[1:]):
        return None
    return stages


def is_interleaved(group: Sequence[int], pieces: Sequence[Piece]) -> list[tuple[int, list[list[int]]]] | None:
    """``[(cell, its chunks)]`` by stage when ``group`` is one regular interleaved pipeline, else None.

    Regular: the chain of unit ranges visits the same cells in the same order
    ``chunks`` times, all with the same rows, their number a multiple of the stages.
    """
    chain: dict[tuple[int, int], list[int]] = {}
    for number in group:
        chain.setdefault((pieces[number].first, pieces[number].end), []).append(number)
    spans = sorted(chain)
    if any(a[1] != b[0] for a, b in pairwise(spans)):
        return None
    cells = [{pieces[n].cell for n in chain[span]} for span in spans]
    stages = len({cell for found in cells for cell in found})
    if any(len(found) != 1 for found in cells) or len(spans) % stages or len(spans) == stages:
        return None
    by_stage = [next(iter(found)) for found in cells]
    rows = [pieces[n].rows for n in chain[spans[0]]]
    if by_stage != by_stage[:stages] * (len(spans) // stages) or len(set(by_stage[:stages])) != stages:
        return None
    if len(rows) % stages or any([pieces[n].rows for n in chain[span]] != rows for span in spans[1:]):
        return None
    return [(by_stage[at], [chain[span] for span in spans[at::stages]]) for at in range(stages)]


def tables_from_orders(
    orders: Mapping[int, Iterable[Step]], index: EdgeIndex
) -> tuple[tuple[int, tuple[Action, ...]], ...]:
    """Tables of all cells, ascending by cell id."""
    return tuple((cell, build_table(orders[cell], index)) for cell in sorted(orders))
