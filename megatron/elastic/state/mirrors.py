"""The choice of mirrors for every block: other failure domains, declustered, existing copies first.

An owner's blocks are mirrored evenly over its *peers*, about S ranks (the scatter width). After its loss S survivors
already hold its blocks in equal shares (declustered placement after Holland and Gibson, "Parity declustering", ASPLOS
1992). :mod:`peers` chooses the peers.

Order of preference for one mirror, given the owner and the mirrors chosen so far:

- 1: the rank shares as few failure domains as possible with any of those copies. So owner and k mirrors are in k + 1
  distinct racks if there are as many, and in k + 1 distinct nodes if there are as many;
- 2: a rank that computes the unit: after a loss of the owner it goes on without a transfer;
- 3: a rank that has the block already: no transfer is needed;
- 4: one of the owner's peers, with the fewest of its blocks in this unit;
- 5: fewest mirrors in this unit, then in all units, then nearest.

Invariant: 1 and 2 hold for every block in every placement chosen here; no later move worsens them.
A copy outside the owner's peers is tolerated, because moving it costs a transfer. It is the
first to be moved when a peer has too few blocks. At the end ranks that compute the same units
are balanced in the number of their mirrors, within :data:`LEVEL_TOLERANCE`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.peers import Candidates, Tree
from megatron.elastic.state.placement import Rules, UnitGroup, classes_of

__all__ = ["LEVEL_TOLERANCE", "choose_mirrors"]

LEVEL_TOLERANCE = 0.02
"""Share of mirrors by which ranks with the same units may differ before blocks are transferred for it."""
_ROUNDS = 8
"""Largest number of alternations between balancing over each owner's peers and over all ranks: each may upset the
other."""


def choose_mirrors(
    groups: Sequence[UnitGroup],
    rules: Rules,
    owners: Mapping[BlockKey, int],
    held: Mapping[BlockKey, tuple[int, ...]],
) -> dict[BlockKey, tuple[int, ...]]:
    """Return the mirrors of every block of ``groups``; ``held``: block → ranks that have it already."""
    total: dict[int, int] = {}
    living = Tree(sorted(rules.domains), rules)
    candidates: dict[tuple[int, ...], Candidates] = {}
    for group in groups:
        if group.holders not in candidates:
            candidates[group.holders] = Candidates(group.holders, rules, living)
    tables = [_Table(group, candidates[group.holders], owners, held, total) for group in groups]
    for table in tables:
        for key in table.mirrors:
            for _ in range(rules.mirrors):
                if not table.add_best(key):
                    break
        table.spread()
    for _ in range(_ROUNDS):
        if not _level(tables, total) or not sum(table.spread() for table in tables):
            break
    return {key: ranks for table in tables for key, ranks in table.mirrors.items()}


def _level(tables: Sequence[_Table], total: Mapping[int, int]) -> bool:
    """Balance mirrors of ranks that compute the same units, within :data:`LEVEL_TOLERANCE`; return if any moved."""
    moved = False
    for signature, ranks in classes_of([table.home for table in tables]).items():
        mine = [tables[i] for i in signature]
        while _level_one(mine, ranks, total):
            moved = True
    return moved


def _level_one(tables: Sequence[_Table], ranks: Sequence[int], total: Mapping[int, int]) -> bool:
    """Move one mirror from a rank with more to one with fewer; return False if no move is worth it."""
    ranked = sorted(ranks, key=lambda r: (-total.get(r, 0), r))
    allowed = max(1.0, LEVEL_TOLERANCE * sum(total.get(r, 0) for r in ranks) / len(ranks))
    least = total.get(ranked[-1], 0)
    for high in takewhile(lambda r: total.get(r, 0) - least > allowed, ranked):
        lows = [low for low in reversed(ranked) if total.get(high, 0) - total.get(low, 0) > allowed]
        able = _able(tables, high, frozenset(lows))
        for low in (low for low in lows if low in able):
            for table in sorted(able[low], key=lambda t: t.load.get(low, 0) - t.load.get(high, 0)):
                if table.shift(high, low):
                    return True
    return False


def _able(tables: Sequence[_Table], high: int, lows: frozenset[int]) -> dict[int, list[_Table]]:
    """Return low → the tables in which some owner's mirrors stay as balanced with one moved from ``high`` to it."""
    able: dict[int, list[_Table]] = {}
    for table in tables:
        for low in table.takers(high, lows):
            able.setdefault(low, []).append(table)
    return able


class _Table:
    """Mirrors of one unit group during the search."""

    def __init__(
        self,
        group: UnitGroup,
        candidates: Candidates,
        owners: Mapping[BlockKey, int],
        held: Mapping[BlockKey, tuple[int, ...]],
        total: dict[int, int],
    ) -> None:
        self.owners, self.held, self.total = owners, held, total
        self.home = candidates.home
        self.mirrors: dict[BlockKey, tuple[int, ...]] = {block.key: () for block in group.blocks}
        self.load: dict[int, int] = {}
        self._candidates, self._cost, self._place = candidates, candidates.cost, candidates.place
        self._count_of: dict[int, Counter[int]] = {
            owner: Counter() for owner in sorted({owners[key] for key in self.mirrors})
        }
        """Owner → rank → number of the owner's mirrors there."""
        self._on: dict[int, dict[int, set[BlockKey]]] = {}
        """Results of :meth:`_at`."""

    def _at(self, rank: int) -> dict[int, set[BlockKey]]:
        """Return owner → the owner's blocks with a mirror on ``rank``: made for the few ranks that moves look at.

        Only moves change it, so it is made when all mirrors have been chosen.
        """
        found = self._on.get(rank)
        if found is None:
            found = self._on[rank] = {}
            for key, ranks in self.mirrors.items():
                if rank in ranks:
                    found.setdefault(self.owners[key], set()).add(key)
        return found

    def add_best(self, key: BlockKey) -> bool:
        """Append the best further mirror of ``key``; return False if no rank is left."""
        owner, taken, held = self.owners[key], self.mirrors[key], self.held[key]
        # At the least cost one that has the block is better than any other.
        near: Collection[int] = () if taken else self._candidates.nearest(owner, held)
        best = next(iter(near)) if len(near) == 1 else self._best(key, near)
        if best is None:
            return False
        self._count(owner, best, 1)
        self.mirrors[key] = (*taken, best)
        return True

    def _best(self, key: BlockKey, near: Collection[int]) -> int | None:
        """Return the best rank for a further mirror of ``key``; ``near``: the best ones, as far as they are known."""
        owner, taken, held = self.owners[key], self.mirrors[key], self.held[key]
        order, least = self._candidates.order(owner), self._candidates.least(owner)

        def preference(rank: int) -> tuple[int, ...]:
            outside, place = self._place(owner, rank) or (1, rank)
            return (
                self._cost(owner, rank, taken),
                0 if rank in held else 1,
                outside,
                self._count_of[owner][rank],
                self.load.get(rank, 0),
                self.total.get(rank, 0),
                place,
            )

        copies = [rank for rank in held if rank not in taken and self._place(owner, rank)]
        near = near or [rank for rank in copies if self._cost(owner, rank, taken) == least]
        best = min(near or {*self._candidates.peers(owner), *copies}.difference(taken), key=preference, default=None)
        # A rank that is no peer and has no copy is chosen only if it costs less than all peers and ranks with a copy.
        if best is None or self._cost(owner, best, taken) > least:
            best = min((rank for rank in order if rank not in taken), key=preference, default=None)
        return best

    def _count(self, owner: int, rank: int, change: int) -> None:
        self._count_of[owner][rank] += change
        self.load[rank] = self.load.get(rank, 0) + change
        self.total[rank] = self.total.get(rank, 0) + change

    def _move(self, key: BlockKey, high: int, low: int) -> None:
        """Move the mirror of ``key`` from ``high`` to ``low``."""
        owner = self.owners[key]
        there, here = self._at(high), self._at(low)
        there[owner].remove(key)
        here.setdefault(owner, set()).add(key)
        self._count(owner, high, -1)
        self._count(owner, low, 1)
        self.mirrors[key] = (*(rank for rank in self.mirrors[key] if rank != high), low)

    def _keys_at(self, rank: int, owner: int) -> Collection[BlockKey]:
        return self._at(rank).get(owner, ())

    def spread(self) -> bool:
        """Spread every owner's mirrors evenly over its peers (within one block); return whether any moved."""
        moved = False
        for owner in self._count_of:
            while self._spread_one(owner):
                moved = True
        return moved

    def _spread_one(self, owner: int) -> bool:
        """Move one of ``owner``'s blocks to a peer with too few, from the rank with most; return False if balanced."""
        most = max(self._count_of[owner].values(), default=0)
        if most < 2:
            return False
        counts = {r: n for r, n in self._count_of[owner].items() if n > 0}
        lacking = [r for r in self._candidates.peers(owner) if most - counts.get(r, 0) >= 2]
        place = {r: self._place(owner, r) or (1, r) for r in {*lacking, *counts}} if lacking else {}
        for low in sorted(lacking, key=lambda r: (counts.get(r, 0), self.total.get(r, 0), place[r][1])):
            few = counts.get(low, 0)
            donors = [r for r, n in counts.items() if n - few >= 2]
            for high in sorted(donors, key=lambda r: (-place[r][0], -counts[r], r)):
                for key in sorted(self._keys_at(high, owner)):
                    if self._movable(key, high, low):
                        self._move(key, high, low)
                        return True
        return False

    def takers(self, high: int, lows: frozenset[int]) -> set[int]:
        """Return the ``lows`` that could take a mirror from ``high`` without unbalancing its owner's mirrors."""
        found = set[int]()
        for owner, keys in self._at(high).items():
            if not keys:
                continue
            peers, counts = self._candidates.peers(owner), self._count_of[owner]
            if high in peers:  # from a peer a mirror goes to another peer alone: they are few
                found.update(low for low in lows & peers if counts[low] < counts[high])
            else:
                found.update(low for low in lows if low != owner and self._surplus(owner, high, low) < 0)
        return found

    def shift(self, high: int, low: int) -> bool:
        """Move one mirror from ``high`` to ``low``; return False if that would unbalance every owner's mirrors."""
        able = []
        for owner, keys in self._at(high).items():
            surplus = self._surplus(owner, high, low) if keys and owner != low else 0
            if surplus < 0:
                able += [(low not in self.held[key], surplus, key) for key in keys if self._movable(key, high, low)]
        if not able:
            return False
        _, _, best = min(able)
        self._move(best, high, low)
        return True

    def _surplus(self, owner: int, high: int, low: int) -> int:
        """Return a number below 0 if ``owner``'s mirrors stay as balanced with one moved from ``high`` to ``low``."""
        there, place = self._place(owner, high), self._place(owner, low)
        if place is None or there is None or place[0] > there[0]:
            return 0
        counts = self._count_of[owner]
        if place[0] < there[0]:  # back to a peer, as long as none has less
            return counts[low] - min(counts[peer] for peer in self._candidates.peers(owner)) - 1
        return counts[low] - counts[high]

    def _movable(self, key: BlockKey, high: int, low: int) -> bool:
        """Return whether the mirror of ``key`` may move from ``high`` to ``low`` at no higher cost."""
        taken, owner = self.mirrors[key], self.owners[key]
        if high not in taken or low in taken:
            return False
        rest = tuple(r for r in taken if r != high)
        return self._cost(owner, low, rest) <= self._cost(owner, high, rest)
