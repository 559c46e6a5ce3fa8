"""Where mirrors go: other failure domains, declustered, existing copies first.

An owner's blocks are mirrored over S peers of its unit group, evenly, so that at
its death S survivors already hold what is lost and each takes a like share
(declustered placement after Holland and Gibson, "Parity declustering", ASPLOS
1992). Peers are the S nearest on the ring of holders, on both sides: neighbours
are peers of each other, and a change of membership alters few peer sets.

Order of preference for one mirror
1. tier: in the group and another failure domain; in the group; another group in
   another domain; another group. The last of several mirrors leaves the owner's
   domain, if need be to another group.
2. a rank that has the block already: costs nothing;
3. one of the owner's peers, with the fewest of its blocks in this unit;
4. fewest mirrors in this unit, then in all, then nearest on the ring.

A copy outside the owner's peers is tolerated (moving it only for that would cost
bytes) and is the first to be moved when a peer has too little. At the end ranks that
compute the same units are brought within 2% of each other in what they mirror.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron.elastic.state.layout import BlockKey
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
    tables = [_Table(group, rules, owners, held, total) for group in groups]
    for table in tables:
        for key in table.mirrors:
            for position in range(rules.mirrors):
                if not table.add_best(key, position):
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
    for rank in sorted({rank for table in tables for rank in table.holders}):
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
        rules: Rules,
        owners: Mapping[BlockKey, int],
        held: Mapping[BlockKey, tuple[int, ...]],
        total: dict[int, int],
    ) -> None:
        self.rules, self.owners, self.held, self.total = rules, owners, held, total
        self.holders = group.holders
        self.home = frozenset(group.holders)
        self.mirrors: dict[BlockKey, tuple[int, ...]] = {block.key: () for block in group.blocks}
        self.pairs: dict[tuple[int, int], int] = {}
        self.load: dict[int, int] = {}
        self.order = {owner: self._ordered(owner) for owner in sorted({owners[key] for key in self.mirrors})}

    def _tier(self, owner: int, rank: int) -> int:
        away = self.rules.domains[rank] != self.rules.domains[owner]
        return (0 if rank in self.home else 2) + (0 if away else 1)

    def _eligible(self, owner: int) -> Iterable[int]:
        """The group itself, unless it is too small or all in the owner's domain while k > 1 asks for another."""
        domains, k = self.rules.domains, self.rules.mirrors
        near = all(domains[rank] == domains[owner] for rank in self.holders)
        if len(self.home - {owner}) < k or (near and k > 1):
            return domains
        return self.holders

    def _ordered(self, owner: int) -> dict[int, tuple[int, int]]:
        """Candidate rank → (0 for a peer or 1, place in the order of preference)."""
        ring, slots = len(self.holders), max(self.rules.domains) + 1
        at = self.holders.index(owner) if owner in self.home else 0
        places = {rank: i for i, rank in enumerate(self.holders)}

        def distance(rank: int) -> tuple[int, int]:
            if rank in self.home:
                ahead = (places[rank] - at) % ring
                return min(ahead, ring - ahead), ahead
            return (rank - owner) % slots, 0

        candidates = (r for r in self._eligible(owner) if r != owner)
        ranked = sorted(candidates, key=lambda r: (self._tier(owner, r), distance(r), r))
        best = [r for r in ranked if self._tier(owner, r) == self._tier(owner, ranked[0])] if ranked else []
        wanted = max(self.rules.scatter_width, self.rules.mirrors)
        pool = best if len(best) >= self.rules.mirrors else ranked
        peers = set(pool[:wanted]) | {r for r in ranked if self._tier(owner, r) == 2 and self.rules.mirrors > 1}
        return {rank: (0 if rank in peers else 1, i) for i, rank in enumerate(ranked)}

    def _wish(self, owner: int, rank: int, taken: tuple[int, ...], position: int) -> int:
        """Tier of ``rank`` for the mirror at ``position``, given those ``taken``."""
        domains, tier = self.rules.domains, self._tier(owner, rank)
        covered = any(domains[r] != domains[owner] for r in taken)
        if covered and tier in (0, 1):
            return 0
        last_chance = position == self.rules.mirrors - 1 and position > 0 and not covered
        return 0 if last_chance and tier == 2 else tier

    def add_best(self, key: BlockKey, position: int) -> bool:
        """Append the best further mirror of ``key``; False when no rank is left."""
        owner, taken, held = self.owners[key], self.mirrors[key], self.held[key]
        order = self.order[owner]

        def preference(rank: int) -> tuple[int, ...]:
            outside, place = order[rank]
            return (
                self._wish(owner, rank, taken, position),
                0 if rank in held else 1,
                outside,
                self.pairs.get((owner, rank), 0),
                self.load.get(rank, 0),
                self.total.get(rank, 0),
                place,
            )

        candidates = [rank for rank in order if rank not in taken]
        if not candidates:
            return False
        self._count(key, min(candidates, key=preference), 1)
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
        order = self.order[owner]
        peers = [r for r in order if order[r][0] == 0]
        counts = {r: n for (o, r), n in self.pairs.items() if o == owner and n > 0}
        for low in sorted(peers, key=lambda r: (counts.get(r, 0), self.total.get(r, 0), order[r][1])):
            few = counts.get(low, 0)
            donors = [r for r, n in counts.items() if n - few >= 2]
            for high in sorted(donors, key=lambda r: (-order[r][0], -counts[r], r)):
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
        """How many more of ``owner``'s blocks ``low`` mirrors than ``high``; less one where only ``low`` is a peer."""
        order = self.order[owner]
        if low not in order or high not in order or order[low][0] > order[high][0]:
            return 0
        more = self.pairs.get((owner, low), 0) - self.pairs.get((owner, high), 0)
        return more - (order[low][0] < order[high][0])

    def _movable(self, key: BlockKey, high: int, low: int) -> bool:
        """Whether the mirror of ``key`` may go from ``high`` to ``low`` without a worse tier."""
        taken, owner = self.mirrors[key], self.owners[key]
        if high not in taken or low in taken:
            return False
        rest = tuple(r for r in taken if r != high)
        position = len(taken) - 1
        return self._wish(owner, low, rest, position) <= self._wish(owner, high, rest, position)
