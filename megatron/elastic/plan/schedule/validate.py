"""Checks of any plan, from any source.

Idea: believe nothing a generator says. Coverage is recomputed from pieces,
edges from rows, and tables are *run* with asynchronous sends (a send never
blocks; a receive blocks until its send was issued). Sends that never block make
this run confluent: if it ends, every interleaving ends, so one run proves the
absence of deadlock.

Checked
- Each row passes each unit exactly once; if the batch shrank, a row may pass no unit at all.
- Edges connect exactly the rows that their pieces share.
- Each piece has one forward, then one backward: whole, or the input part and then the weight part.
- Each transfer is sent and received once, next to its piece.
- The cells of a crew compute pieces of the same units in the same order.
- The tables finish, where a computation of a crew begins when all its cells have come to it.
- A cell never holds more rows than its memory allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.elastic.plan.cost import held_bytes, unit_sums
from megatron.elastic.plan.model import Action, Op, Piece, Plan, Profile

__all__ = ["InvalidPlan", "TableRun", "held_rows_peak", "memory_peaks", "run_tables", "validate_plan"]

COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})


class InvalidPlan(ValueError):
    """The plan breaks a rule; the text names rule, piece, row or cell."""


@dataclass(frozen=True)
class TableRun:
    """One execution of all tables: (cell, action) in an order that respects every dependency."""

    steps: tuple[tuple[int, Action], ...]


def validate_plan(plan: Plan, units: int, profile: Profile | None = None) -> TableRun:
    """Raise :class:`InvalidPlan` unless every rule of the module docstring holds.

    ``profile`` adds the memory rule (parameters, optimizer state and held
    activations within ``Cell.memory_bytes``).
    """
    _check_ids(plan, units)
    _check_coverage(plan, units)
    _check_edges(plan)
    _check_actions(plan)
    _check_crews(plan)
    run = run_tables(plan)
    if profile is not None:
        peaks = memory_peaks(plan, profile)
        for cell in plan.cells:
            if peaks.get(cell.id, 0) > cell.memory_bytes:
                raise InvalidPlan(f"cell {cell.id} needs {peaks[cell.id]} bytes, has {cell.memory_bytes}")
    return run


def _check_ids(plan: Plan, units: int) -> None:
    alive = {cell.id for cell in plan.cells}
    if len(alive) != len(plan.cells):
        raise InvalidPlan("two cells have the same id")
    ranks = [rank for cell in plan.cells for rank in cell.ranks]
    if len(set(ranks)) != len(ranks) or set(ranks) & set(plan.parked):
        raise InvalidPlan("a rank belongs to two cells, or to a cell and is parked")
    in_crews = {cell for crew in plan.crews for cell in crew}
    holds = {(s.cell, unit) for replica in plan.replicas for s in replica.segments for unit in range(s.first, s.end)}
    for number, piece in enumerate(plan.pieces):
        if piece.id != number:
            raise InvalidPlan(f"piece {piece.id} is at position {number}")
        if piece.cell not in alive:
            raise InvalidPlan(f"piece {number} is on cell {piece.cell}, which is not alive")
        ghost = not piece.rows and piece.cell in in_crews
        if not 0 <= piece.first < piece.end <= units or len(set(piece.rows)) != max(len(piece.rows), 1 - ghost):
            raise InvalidPlan(f"piece {number} has an empty or broken unit range or row list")
        if any((piece.cell, unit) not in holds for unit in range(piece.first, piece.end)):
            raise InvalidPlan(f"piece {number} needs units that cell {piece.cell} does not hold")
    cells = [cell for cell, _ in plan.tables]
    if cells != sorted(set(cells)) or not set(cells) <= alive:
        raise InvalidPlan("tables are not ascending by living cell")


def _check_coverage(plan: Plan, units: int) -> None:
    """Per row: unit ranges sorted by start must tile ``[0, units)``."""
    spans: list[list[tuple[int, int]]] = [[] for _ in range(plan.grid.global_batch_size)]
    for piece in plan.pieces:
        for row in piece.rows:
            if not 0 <= row < len(spans):
                raise InvalidPlan(f"piece {piece.id} holds row {row}, outside the global batch")
            spans[row].append((piece.first, piece.end))
    left_out = frozenset(plan.skipped)
    for row, pieces in enumerate(spans):
        if row in left_out:
            if pieces:
                raise InvalidPlan(f"row {row} is computed although the plan leaves it out")
            continue
        at = 0
        for first, end in sorted(pieces):
            if first != at:
                raise InvalidPlan(f"row {row} passes unit {min(first, at)} {'twice' if first < at else 'never'}")
            at = end
        if at != units:
            raise InvalidPlan(f"row {row} never passes unit {at}")


def _check_edges(plan: Plan) -> None:
    """Rows entering a piece come from exactly one place each, and positions agree."""
    entering: dict[int, list[int]] = {piece.id: [] for piece in plan.pieces}
    leaving: dict[int, list[int]] = {piece.id: [] for piece in plan.pieces}
    for number, edge in enumerate(plan.edges):
        source, target = plan.pieces[edge.source], plan.pieces[edge.target]
        if source.end != target.first:
            raise InvalidPlan(f"edge {number} joins pieces whose units do not meet")
        at_source = tuple(source.rows[i] for i in edge.source_at)
        at_target = tuple(target.rows[i] for i in edge.target_at)
        if not edge.rows or at_source != edge.rows or at_target != edge.rows:
            raise InvalidPlan(f"edge {number} names other rows than its pieces")
        entering[edge.target].extend(edge.rows)
        leaving[edge.source].extend(edge.rows)
    last = max((piece.end for piece in plan.pieces), default=0)
    for piece in plan.pieces:
        if sorted(entering[piece.id]) != (sorted(piece.rows) if piece.first else []):
            raise InvalidPlan(f"rows entering piece {piece.id} are not its rows once each")
        if sorted(leaving[piece.id]) != (sorted(piece.rows) if piece.end != last else []):
            raise InvalidPlan(f"rows leaving piece {piece.id} are not its rows once each")


def _check_actions(plan: Plan) -> None:
    """Every compute and transfer action exactly once, on the right cell, in the right order."""
    seen: dict[tuple[Op, int, int], int] = {}
    for cell, table in plan.tables:
        for position, action in enumerate(table):
            key = (action.op, action.piece, action.edge)
            if key in seen:
                raise InvalidPlan(f"{action} occurs twice")
            seen[key] = position
            if plan.pieces[action.piece].cell != cell:
                raise InvalidPlan(f"{action} is in the table of cell {cell}, its piece is elsewhere")
    for piece in plan.pieces:
        _check_compute(piece, seen)
    wanted = sum(len(_ops(plan, number)) for number in range(len(plan.edges)))
    for number in range(len(plan.edges)):
        for op, piece_id, before, anchor in _ops(plan, number):
            at = seen.get((op, piece_id, number))
            anchors = [seen[key] for o in anchor if (key := (o, piece_id, -1)) in seen]
            if at is None or (at > anchors[0] if before else at < anchors[0]):
                raise InvalidPlan(f"{op.value} of edge {number} is missing or on the wrong side of piece {piece_id}")
    transfers = sum(1 for op, _, _ in seen if op not in COMPUTE)
    if transfers != wanted:
        raise InvalidPlan(f"{transfers} transfer actions, {wanted} wanted")


def _check_crews(plan: Plan) -> None:
    """The cells of a crew exchange tokens in each computation, so these must be alike."""
    for crew in plan.crews:
        orders = {
            tuple((a.op, plan.pieces[a.piece].first, plan.pieces[a.piece].end) for a in plan.table(cell) if a.edge < 0)
            for cell in crew
        }
        if len(orders) > 1:
            raise InvalidPlan(f"the cells of crew {crew} are not in lockstep")


def _check_compute(piece: Piece, seen: dict[tuple[Op, int, int], int]) -> None:
    at = {op: seen[op, piece.id, -1] for op in COMPUTE if (op, piece.id, -1) in seen}
    if set(at) == {Op.FORWARD, Op.BACKWARD}:
        good = at[Op.FORWARD] < at[Op.BACKWARD]
    elif set(at) == {Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}:
        good = at[Op.FORWARD] < at[Op.BACKWARD_INPUT] < at[Op.BACKWARD_WEIGHT]
    else:
        raise InvalidPlan(f"piece {piece.id} has actions {sorted(op.value for op in at)}")
    if not good:
        raise InvalidPlan(f"piece {piece.id} runs its backward before its forward")


def _ops(plan: Plan, number: int) -> tuple[tuple[Op, int, bool, tuple[Op, ...]], ...]:
    """Transfers edge ``number`` needs: (op, piece, comes before its anchor, anchor ops)."""
    edge = plan.edges[number]
    if plan.pieces[edge.source].cell == plan.pieces[edge.target].cell:
        return ()
    forward, backward = (Op.FORWARD,), (Op.BACKWARD, Op.BACKWARD_INPUT)
    return (
        (Op.SEND_FORWARD, edge.source, False, forward),
        (Op.RECV_FORWARD, edge.target, True, forward),
        (Op.SEND_BACKWARD, edge.target, False, backward),
        (Op.RECV_BACKWARD, edge.source, True, backward),
    )


def run_tables(plan: Plan) -> TableRun:
    """Execute all tables with asynchronous sends. Raises :class:`InvalidPlan` on deadlock."""
    tables = dict(plan.tables)
    at = dict.fromkeys(tables, 0)
    sent: set[tuple[Op, int]] = set()
    done: set[tuple[bool, int]] = set()
    waiting: dict[tuple[Op, int], int] = {}
    local: list[list[int]] = [[] for _ in plan.pieces]
    onward: list[list[int]] = [[] for _ in plan.pieces]
    for edge in plan.edges:
        if plan.pieces[edge.source].cell == plan.pieces[edge.target].cell:
            local[edge.target].append(edge.source)
            onward[edge.source].append(edge.target)
    steps: list[tuple[int, Action]] = []
    ready, lockstep = list(tables), _Lockstep(plan)
    while ready:
        cell = ready.pop()
        for action in _advance(tables[cell], at, cell, sent, waiting, lockstep):
            _check_local(action, done, local, onward)
            steps.append((cell, action))
            if action.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
                key = (Op.RECV_FORWARD if action.op is Op.SEND_FORWARD else Op.RECV_BACKWARD, action.edge)
                sent.add(key)
                if key in waiting:
                    ready.append(waiting.pop(key))
        ready.extend(lockstep.woken())
    stuck = {cell: tables[cell][at[cell]] for cell in tables if at[cell] < len(tables[cell])}
    if stuck:
        raise InvalidPlan(f"deadlock: {dict(sorted(stuck.items())[:8])}")
    return TableRun(tuple(steps))


class _Lockstep:
    """The number of computations that each cell of a crew has begun: one begins when all its cells have come to it."""

    def __init__(self, plan: Plan) -> None:
        self._crew = {cell: crew for crew in plan.crews for cell in crew}
        self._come = dict.fromkeys(self._crew, 0)
        self._begun = dict.fromkeys(self._crew, 0)
        self._woken: list[int] = []

    def begins(self, cell: int) -> bool:
        """Return whether the next computation of ``cell`` begins now that the cell has come to it."""
        crew = self._crew.get(cell)
        if crew is None:
            return True
        self._come[cell] = self._begun[cell] + 1
        if any(self._come[other] < self._come[cell] for other in crew):
            return False
        self._begun[cell] += 1
        self._woken.extend(other for other in crew if other != cell)
        return True

    def woken(self) -> list[int]:
        """Return the cells that may go on since the last call."""
        woken, self._woken = self._woken, []
        return woken


def _advance(
    table: tuple[Action, ...],
    at: dict[int, int],
    cell: int,
    sent: set[tuple[Op, int]],
    waiting: dict[tuple[Op, int], int],
    lockstep: _Lockstep,
) -> Iterator[Action]:
    while at[cell] < len(table):
        action = table[at[cell]]
        if action.edge < 0 and not lockstep.begins(cell):
            return
        if action.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD) and (action.op, action.edge) not in sent:
            waiting[action.op, action.edge] = cell
            return
        at[cell] += 1
        yield action


def _check_local(action: Action, done: set[tuple[bool, int]], local: list[list[int]], onward: list[list[int]]) -> None:
    """Edges inside a cell have no transfer: program order alone must respect them."""
    if action.op is Op.FORWARD:
        if any((True, source) not in done for source in local[action.piece]):
            raise InvalidPlan(f"forward of piece {action.piece} before a piece of its own cell that feeds it")
        done.add((True, action.piece))
    elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        if any((False, target) not in done for target in onward[action.piece]):
            raise InvalidPlan(f"backward of piece {action.piece} before a piece of its own cell that feeds it")
        done.add((False, action.piece))


def held_rows_peak(plan: Plan, cell: int) -> int:
    """Most rows ``cell`` holds between forward and the end of backward (weight part included)."""
    peak = held = 0
    for action in plan.table(cell):
        if action.op is Op.FORWARD:
            held += len(plan.pieces[action.piece].rows)
            peak = max(peak, held)
        elif action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            held -= len(plan.pieces[action.piece].rows)
    return peak


def memory_peaks(plan: Plan, profile: Profile, tied: Sequence[tuple[int, int]] = ()) -> dict[int, int]:
    """Bytes each cell needs: parameters and optimizer state of the units it holds, plus held activations."""
    need = held_bytes(plan.replicas, profile, tied, plan.grid.data_parallel_size)
    sums = unit_sums(unit.activation_bytes for unit in profile.units)
    for cell, table in plan.tables:
        peak = held = 0
        for action in table:
            piece = plan.pieces[action.piece]
            size = (sums[piece.end] - sums[piece.first]) * len(piece.rows)
            if action.op is Op.FORWARD:
                held += size
                peak = max(peak, held)
            elif action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                held -= size
        need[cell] = need.get(cell, 0) + peak
    return need
