"""List scheduling: tables for plans that fit no fixed pattern.

Idea: run the plan forwards in simulated time; whenever a cell is idle it starts
the best ready action: a forward while the cap leaves room, else a backward,
else a deferred weight gradient (ZB-H1's use of bubbles: Qi et al., arXiv
2401.10241), earlier waves first. In a regular pipeline that is 1F1B. Where one
cell serves two pipelines, the other preference (backwards first) tends to run
forwards and backwards in batches; both can be asked for. The order in which
actions started is the table. Since each action started after its inputs had
arrived, tables made this way cannot deadlock.

A forward may start only while the cell holds fewer rows than its ``cap``; that
bounds memory as 1F1B does. Where row ranges cross (a piece waits for rows of a
piece that the cap holds back) a cap may be too small to make progress: then
the earliest waiting forward is let in, and ``Listing.forced`` counts it.

Everything is integer arithmetic on ordered structures: deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.elastic.plan.cost import Costs
from megatron.elastic.plan.model import Edge, Op, Piece
from megatron.elastic.plan.schedule import EdgeIndex, Step

__all__ = ["Listing", "list_schedule"]


@dataclass(frozen=True)
class Listing:
    """Compute order per cell, the time it took in ns, and how often a cap had to give way."""

    orders: dict[int, list[Step]]
    makespan: int
    forced: int


@dataclass
class _CellState:
    """One cell during list scheduling; queues hold (wave, piece id)."""

    free_at: int = 0
    held: int = 0
    forwards: list[tuple[int, int]] = field(default_factory=list)
    backwards: list[tuple[int, int]] = field(default_factory=list)
    weights: list[tuple[int, int]] = field(default_factory=list)
    order: list[Step] = field(default_factory=list)


class _Scheduler:
    def __init__(
        self,
        group: Sequence[int],
        pieces: Sequence[Piece],
        edges: Sequence[Edge],
        index: EdgeIndex,
        waves: Sequence[int],
        costs: Costs,
        caps: Mapping[int, int],
        split_backward: bool,
        forward_first: bool,
    ) -> None:
        self.pieces, self.edges, self.index = pieces, edges, index
        self.waves, self.costs, self.caps, self.split = waves, costs, caps, split_backward
        self.forward_first = forward_first
        self.cells = {cell: _CellState() for cell in sorted({pieces[n].cell for n in group})}
        self.inputs = {n: len(index.incoming[n]) for n in group}
        self.grads = {n: len(index.outgoing[n]) + 1 for n in group}
        self.events: list[tuple[int, int, int]] = []
        self.left = len(group) * (3 if split_backward else 2)
        self.now = self.forced = 0
        for n in group:
            if not self.inputs[n]:
                heapq.heappush(self.cells[pieces[n].cell].forwards, (waves[n], n))

    def run(self) -> Listing:
        touched = set(self.cells)
        while True:
            for cell in sorted(touched):
                self._dispatch(cell)
            if not self.events:
                if not self.left:
                    break
                touched = {self._force()}
                continue
            self.now = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] == self.now:
                touched.add(self._arrive(*heapq.heappop(self.events)[1:]))
        orders = {cell: state.order for cell, state in self.cells.items()}
        return Listing(orders, max((s.free_at for s in self.cells.values()), default=0), self.forced)

    def _arrive(self, kind: int, number: int) -> int:
        """An input (0), a gradient (1) or the end of an action (2: cell id) at ``now``; returns the cell to look at."""
        if kind == 2:
            return number
        waiting = self.inputs if kind == 0 else self.grads
        waiting[number] -= 1
        state = self.cells[self.pieces[number].cell]
        if not waiting[number]:
            heapq.heappush(state.forwards if kind == 0 else state.backwards, (self.waves[number], number))
        return self.pieces[number].cell

    def _dispatch(self, cell: int, force: bool = False) -> None:
        state = self.cells[cell]
        if state.free_at > self.now:
            return
        forward = bool(state.forwards) and (force or self._fits(cell, state))
        if state.backwards and not (forward and self.forward_first):
            self._start_backward(cell, state, heapq.heappop(state.backwards)[1])
        elif forward:
            self._start_forward(cell, state, heapq.heappop(state.forwards)[1])
        elif state.weights:
            number = heapq.heappop(state.weights)[1]
            state.held -= len(self.pieces[number].rows)
            self._occupy(cell, state, (Op.BACKWARD_WEIGHT, number), self.costs.pieces[number].weight)

    def _fits(self, cell: int, state: _CellState) -> bool:
        return not state.held or state.held + len(self.pieces[state.forwards[0][1]].rows) <= self.caps[cell]

    def _force(self) -> int:
        """Nothing can move: let the earliest waiting forward in."""
        waiting = [(state.forwards[0], cell) for cell, state in self.cells.items() if state.forwards]
        if not waiting:
            raise AssertionError("pieces depend on each other in a circle")
        cell = min(waiting)[1]
        self.forced += 1
        self._dispatch(cell, force=True)
        return cell

    def _start_forward(self, cell: int, state: _CellState, number: int) -> None:
        state.held += len(self.pieces[number].rows)
        end = self._occupy(cell, state, (Op.FORWARD, number), self.costs.pieces[number].forward)
        heapq.heappush(self.events, (end, 1, number))
        for edge in self.index.outgoing[number]:
            heapq.heappush(self.events, (end + self.costs.edges[edge], 0, self.edges[edge].target))

    def _start_backward(self, cell: int, state: _CellState, number: int) -> None:
        cost = self.costs.pieces[number]
        if self.split:
            end = self._occupy(cell, state, (Op.BACKWARD_INPUT, number), cost.backward - cost.weight)
            heapq.heappush(state.weights, (self.waves[number], number))
        else:
            state.held -= len(self.pieces[number].rows)
            end = self._occupy(cell, state, (Op.BACKWARD, number), cost.backward)
        for edge in self.index.incoming[number]:
            heapq.heappush(self.events, (end + self.costs.edges[edge], 1, self.edges[edge].source))

    def _occupy(self, cell: int, state: _CellState, step: Step, duration: int) -> int:
        state.order.append(step)
        state.free_at = self.now + duration
        self.left -= 1
        heapq.heappush(self.events, (state.free_at, 2, cell))
        return state.free_at


def list_schedule(
    group: Sequence[int],
    pieces: Sequence[Piece],
    edges: Sequence[Edge],
    index: EdgeIndex,
    waves: Sequence[int],
    costs: Costs,
    caps: Mapping[int, int],
    split_backward: bool = False,
    forward_first: bool = True,
) -> Listing:
    """Orders for the pieces ``group`` (closed under edges). ``caps[cell]``: rows held at once."""
    return _Scheduler(group, pieces, edges, index, waves, costs, caps, split_backward, forward_first).run()
