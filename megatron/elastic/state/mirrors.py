"""Mirrors of every block: in other failure domains, declustered, existing copies first.

An owner's blocks are mirrored over its *peers*, about S ranks (the scatter width), evenly, so that at its death S
survivors already hold what is lost and each takes a like share (declustered placement after Holland and Gibson, "Parity
declustering", ASPLOS 1992). :mod:`peers` chooses them.

Order of preference for one mirror, given the owner and the mirrors chosen so far
1. failure domains: the rank shares as few of them as possible with any of those copies. So k mirrors lie in k + 1
   distinct racks where there are as many, and in k + 1 distinct nodes where there are as many;
2. a rank that computes the unit, since at the owner's death it goes on without moving a byte;
3. a rank that has the block already: costs nothing;
4. one of the owner's peers, with the fewest of its blocks in this unit;
5. fewest mirrors in this unit, then in all, then nearest.

Invariant: 1 and 2 hold for every block in every placement chosen here; no later move worsens them.
A copy outside the owner's peers is tolerated (moving it only for that would cost
bytes) and is the first to be moved when a peer has too little. At the end ranks that
compute the same units are brought within 2% of each other in what they mirror.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.peers import Candidates, Tree
from megatron.elastic.state.placement import Rules, UnitGroup

__all__ = ["LEVEL_TOLERANCE", "choose_mirrors"]

LEVEL_TOLERANCE = 0.02
"""Ranks with the same units may mirror this share more or less before bytes are moved for it."""
_ROUNDS = 8
"""How often what each owner's peers have and what ranks have in all are evened in turn: either may upset the other."""


def choose_mirrors(
    groups: Sequence[UnitGroup],
    rules: Rules,
    owners: Mapping[BlockKey, int],
    held: Mapping[BlockKey, tuple[int, ...]],
) -> dict[BlockKey, tuple[int, ...]]:
    """Mirrors of every block of ``groups``; ``held`` lists the ranks that have a block already."""
    total: dict[int, int] = {}
    everybody = Tree(sorted(rules.domains), rules)
    candidates: dict[tuple[int, ...], Candidates] = {}
    for group in groups:
        if group.holders not in candidates:
            candidates[group.holders] = Candidates(group.holders, rules, everybody)
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
    """Even what ranks that compute the same units mirror in all, within :data:`LEVEL_TOLERANCE`; whether any moved."""
    moved = False
    classes: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted({rank for table in tables for rank in table.home}):
        signature = tuple(i for i, table in enumerate(tables) if rank in table.home)
        classes.setdefault(signature, []).append(rank)
    for signature, ranks in classes.items():
        mine = [tables[i] for i in signature]
        while _level_one(mine, ranks, total):
            moved = True
    return moved


def _level_one(tables: Sequence[_Table], ranks: Sequence[int], total: Mapping[int, int]) -> bool:
    """One move from a rank that mirrors more to one that mirrors less; False when there is none worth it."""
    ranked = sorted(ranks, key=lambda r: (-total.get(r, 0), r))
    allowed = max(1.0, LEVEL_TOLERANCE * sum(total.get(r, 0) for r in ranks) / len(ranks))
    for high in ranked:
        for low in reversed(ranked):
            if total.get(high, 0) - total.get(low, 0) <= allowed:
                break
            for table in sorted(tables, key=lambda t: t.load.get(low, 0) - t.load.get(high, 0)):
                if table.shift(high, low):
                    return True
    return False


class _Table:
    """Mirrors of one unit group while they are being chosen."""

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
        self.pairs: dict[tuple[int, int], int] = {}
        self.load: dict[int, int] = {}
        self._cost, self._place = candidates.cost, candidates.place
        self.order = {owner: candidates.order(owner) for owner in sorted({owners[key] for key in self.mirrors})}
        self._peers = {owner: [r for r in order if order[r][0] == 0] for owner, order in self.order.items()}
        self._least = {o: min((self._cost(o, r, ()) for r in order), default=0) for o, order in self.order.items()}
        """Owner → no further mirror of a block of its costs less."""

    def add_best(self, key: BlockKey) -> bool:
        """Append the best further mirror of ``key``; False when no rank is left."""
        owner, taken, held = self.owners[key], self.mirrors[key], self.held[key]
        order = self.order[owner]

        def preference(rank: int) -> tuple[int, ...]:
            outside, place = self._place(owner, rank) or (1, rank)
            return (
                self._cost(owner, rank, taken),
                0 if rank in held else 1,
                outside,
                self.pairs.get((owner, rank), 0),
                self.load.get(rank, 0),
                self.total.get(rank, 0),
                place,
            )

        # A rank that is no peer and has no copy is chosen only where it costs less than all that are one or have one.
        near = {*self._peers[owner], *(rank for rank in held if self._place(owner, rank))}.difference(taken)
        best = min(near, key=preference, default=None)
        if best is None or preference(best)[0] > self._least[owner]:
            best = min((rank for rank in order if rank not in taken), key=preference, default=None)
        if best is None:
            return False
        self._count(key, best, 1)
        return True

    def _count(self, key: BlockKey, rank: int, sign: int) -> None:
        pair = (self.owners[key], rank)
        self.pairs[pair] = self.pairs.get(pair, 0) + sign
        self.load[rank] = self.load.get(rank, 0) + sign
        self.total[rank] = self.total.get(rank, 0) + sign
        rest = tuple(r for r in self.mirrors[key] if r != rank)
        self.mirrors[key] = (*rest, rank) if sign > 0 else rest

    def spread(self) -> bool:
        """Move mirrors until every owner's are spread evenly over its peers (within one block); whether any moved."""
        moved = False
        blocks: dict[int, list[BlockKey]] = {}
        for key in self.mirrors:
            blocks.setdefault(self.owners[key], []).append(key)
        for owner in sorted(blocks):
            while self._spread_one(owner, blocks[owner]):
                moved = True
        return moved

    def _spread_one(self, owner: int, keys: list[BlockKey]) -> bool:
        """One move to a peer with too few of ``owner``'s blocks, from the rank with most; False when even."""
        counts = {r: n for (o, r), n in self.pairs.items() if o == owner and n > 0}
        place = {r: self._place(owner, r) or (1, r) for r in {*self._peers[owner], *counts}}
        for low in sorted(self._peers[owner], key=lambda r: (counts.get(r, 0), self.total.get(r, 0), place[r][1])):
            few = counts.get(low, 0)
            donors = [r for r, n in counts.items() if n - few >= 2]
            for high in sorted(donors, key=lambda r: (-place[r][0], -counts[r], r)):
                for key in keys:
                    if self._movable(key, high, low):
                        self._count(key, high, -1)
                        self._count(key, low, 1)
                        return True
        return False

    def shift(self, high: int, low: int) -> bool:
        """Move one mirror from ``high`` to ``low``; False if no owner's would stay among its peers and as even."""
        surplus = {owner: self._surplus(owner, high, low) for owner in self.order if owner not in (high, low)}
        owners = {owner for owner, more in surplus.items() if more < 0}
        if not owners:
            return False
        keys = (key for key in self.mirrors if self.owners[key] in owners and self._movable(key, high, low))
        best = min(keys, key=lambda key: (low not in self.held[key], surplus[self.owners[key]]), default=None)
        if best is None:
            return False
        self._count(best, high, -1)
        self._count(best, low, 1)
        return True

    def _surplus(self, owner: int, high: int, low: int) -> int:
        """Below 0 where ``owner``'s blocks stay as even when ``low`` mirrors one of them in place of ``high``."""
        there, place = self._place(owner, high), self._place(owner, low)
        if place is None or there is None or place[0] > there[0]:
            return 0
        here = self.pairs.get((owner, low), 0)
        if place[0] < there[0]:  # back to a peer, as long as none has less
            return here - min(self.pairs.get((owner, peer), 0) for peer in self._peers[owner]) - 1
        return here - self.pairs.get((owner, high), 0)

    def _movable(self, key: BlockKey, high: int, low: int) -> bool:
        """Whether the mirror of ``key`` may go from ``high`` to ``low`` at no higher cost."""
        taken, owner = self.mirrors[key], self.owners[key]
        if high not in taken or low in taken:
            return False
        rest = tuple(r for r in taken if r != high)
        return self._cost(owner, low, rest) <= self._cost(owner, high, rest)
