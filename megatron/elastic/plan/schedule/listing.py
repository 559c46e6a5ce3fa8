"""List scheduling: tables for plans that fit no fixed pattern.

Idea: run the plan forwards in simulated time. An idle cell starts the best ready action: a forward if the cap allows
one more, else a backward, else a deferred weight gradient (ZB-H1's use of bubbles: Qi et al., arXiv 2401.10241).
Earlier waves come first. In a regular pipeline that is 1F1B. If one cell serves two pipelines, the other preference
(backwards first) tends to run forwards and backwards in batches; callers can choose either. The order in which actions
started is the table. Since each action started after its inputs had arrived, tables made this way cannot deadlock.

A forward may start only while the cell holds fewer rows than its ``cap``; that
bounds memory as 1F1B does. Where row ranges cross (a piece waits for rows of a piece that the cap holds back)
a cap may be too small to make progress. Then the earliest waiting forward starts anyway, and
``Listing.forced`` counts it.

Everything is integer arithmetic on ordered structures: deterministic. The simulation itself is native
(``csrc/plan/listing.cpp``): a decision runs hundreds of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.elastic import _plan
from megatron.elastic.plan.cost import Costs
from megatron.elastic.plan.model import Edge, Op, Piece
from megatron.elastic.plan.schedule.table import EdgeIndex, Step

__all__ = ["Listing", "Scheduler"]

_OPS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
"""As numbered in ``csrc/plan/listing.hpp``."""


class Listing:
    """A schedule that was found: the time it took in ns, and how often a cap had to give way."""

    def __init__(self, found: _plan.Listing, cells: Sequence[int], group: Sequence[int]) -> None:
        self.makespan, self.forced = found.makespan, found.forced
        self.cells = cells
        self._found, self._group = found, group

    def orders(self) -> dict[int, list[Step]]:
        """Compute order of each cell."""
        group = self._group
        return {
            cell: [(_OPS[op], group[piece]) for op, piece in order]
            for cell, order in zip(self.cells, self._found.orders(), strict=True)
        }


class Scheduler:
    """Schedules the pieces ``group`` (closed under edges) under any caps."""

    def __init__(
        self,
        group: Sequence[int],
        pieces: Sequence[Piece],
        edges: Sequence[Edge],
        index: EdgeIndex,
        waves: Sequence[int],
        costs: Costs,
    ) -> None:
        self.group = sorted(group)
        self.cells = sorted({pieces[n].cell for n in group})
        seat = {cell: at for at, cell in enumerate(self.cells)}
        place = {number: at for at, number in enumerate(self.group)}
        self._native = _plan.Group(
            [
                (seat[pieces[n].cell], waves[n], len(pieces[n].rows), cost.forward, cost.backward, cost.weight)
                for n in self.group
                for cost in (costs.pieces[n],)
            ],
            [(place[edges[e].source], place[n], costs.edges[e]) for n in self.group for e in index.incoming[n]],
            len(self.cells),
        )

    def run(self, caps: Mapping[int, int], split_backward: bool = False, forward_first: bool = True) -> Listing:
        """``caps[cell]``: rows held at once."""
        found = self._native.schedule([caps[cell] for cell in self.cells], split_backward, forward_first)
        return Listing(found, self.cells, self.group)
