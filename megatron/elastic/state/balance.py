"""The balance of owners within each unit group, to within one block and with few transfers.

Making a mirror the owner is free; making a rank without a copy the owner transfers one
block. Within a unit group the loads are first balanced along *free* paths
(rank r gives a block to r' that mirrors it, r' one of its own to r'', …). The
loads reachable that way form an M-convex set, so steepest descent ends in the
decreasingly minimal one. That minimises every symmetric convex function of the
loads at once (Frank and Murota, "Decreasing minimization on M-convex sets", 2019),
including the number of remaining paid moves. Only those are paid.

Then the ranks that own one block more are varied over the units, so that
ranks holding the same units own nearly the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property

from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.placement import Copies, UnitGroup, classes_of

__all__ = ["LEVEL_TOLERANCE", "balanced_owners"]

LEVEL_TOLERANCE = 0.02
"""Share of owned blocks by which ranks with the same units may differ before blocks are transferred for it."""


class _Ownership:
    """Owners of one unit group during the search."""

    def __init__(self, group: UnitGroup, copies: Mapping[BlockKey, Copies]) -> None:
        self.holders = group.holders
        self.owner = {block.key: copies[block.key].owner for block in group.blocks}
        self.held = {block.key: copies[block.key].ranks for block in group.blocks}
        self.load = dict.fromkeys(group.holders, 0)
        for owner in self.owner.values():
            if owner in self.load:
                self.load[owner] += 1

    @cached_property
    def _owned(self) -> dict[int, set[BlockKey]]:
        """Rank → the blocks that it owns. Most groups need no move, and then it is never made."""
        owned: dict[int, set[BlockKey]] = {}
        for key, owner in self.owner.items():
            owned.setdefault(owner, set()).add(key)
        return owned

    def give(self, key: BlockKey, rank: int) -> None:
        """Change the owner of ``key`` to ``rank``."""
        before = self.owner[key]
        self._owned[before].remove(key)
        self._owned.setdefault(rank, set()).add(key)
        if before in self.load:
            self.load[before] -= 1
        self.load[rank] += 1
        self.owner[key] = rank

    def _free(self, rank: int) -> list[tuple[int, BlockKey]]:
        """Return, for each other holder with copies of blocks that ``rank`` owns, the first such block; ascending."""
        first: dict[int, BlockKey] = {}
        for key in self._owned.get(rank, ()):
            for other in self.held[key]:
                if other != rank and other in self.load and (other not in first or key < first[other]):
                    first[other] = key
        return sorted(first.items())

    def free_path(self, source: int, targets: frozenset[int]) -> list[tuple[BlockKey, int]] | None:
        """Return the shortest chain of free moves from ``source`` to one of ``targets``, as (block, new owner)."""
        came = dict[int, tuple[int, BlockKey]]()
        queue, seen = deque([source]), {source}
        while queue:
            rank = queue.popleft()
            if rank in targets:
                return _trace(came, source, rank)
            for other, key in self._free(rank):
                if other not in seen:
                    seen.add(other)
                    came[other] = (rank, key)
                    queue.append(other)
        return None

    def even_freely(self) -> None:
        """Make free moves from loaded to less loaded ranks (difference 2 or more) until none is left."""
        progress = True
        while progress:
            progress, least = False, min(self.load.values())
            loaded = [rank for rank, load in self.load.items() if load - least >= 2]
            for source in sorted(loaded, key=lambda r: (-self.load[r], r)):
                targets = frozenset(r for r, n in self.load.items() if self.load[source] - n >= 2)
                path = self.free_path(source, targets)
                if path:
                    for key, rank in path:
                        self.give(key, rank)
                    progress = True
                    break

    def adopt_orphans(self, paid: bool) -> None:
        """Give blocks owned outside the group to the least loaded holder (with a copy, unless ``paid``)."""
        orphans = sorted(key for key, rank in self.owner.items() if rank not in self.load)
        for key in orphans:
            able = self.holders if paid else tuple(r for r in self.held[key] if r in self.load)
            if able:
                self.give(key, min(able, key=lambda r: (self.load[r], r)))

    def pay(self, source: int, target: int) -> None:
        """Make one paid move; prefer a block that is short of copies, since it needs a new copy anyway."""
        self.give(min(self._owned[source], key=lambda key: (len(self.held[key]), key)), target)

    def even_by_paying(self, total: Mapping[int, int]) -> None:
        """Make paid moves from the most to the least loaded until within one block; ``total`` breaks ties."""
        while True:
            source = max(self.holders, key=lambda r: (self.load[r], total.get(r, 0), -r))
            target = min(self.holders, key=lambda r: (self.load[r], total.get(r, 0), r))
            if self.load[source] - self.load[target] < 2:
                return
            self.pay(source, target)


def _trace(came: Mapping[int, tuple[int, BlockKey]], source: int, rank: int) -> list[tuple[BlockKey, int]]:
    path = []
    while rank != source:
        before, key = came[rank]
        path.append((key, rank))
        rank = before
    return path


def balanced_owners(copies: Mapping[BlockKey, Copies], groups: Sequence[UnitGroup]) -> dict[BlockKey, int]:
    """Return the owner of every block of ``groups``: a holder; loads within a group differ by at most one block.

    ``copies``: the existing copies, which may be outside of the holders.
    """
    states = [_Ownership(group, copies) for group in groups]
    total: dict[int, int] = {}
    for state in states:
        state.adopt_orphans(paid=False)
        state.even_freely()
        state.adopt_orphans(paid=True)
        state.even_freely()
        for rank, load in state.load.items():
            total[rank] = total.get(rank, 0) + load
    for state in states:
        for rank, load in state.load.items():
            total[rank] -= load
        state.even_by_paying(total)
        for rank, load in state.load.items():
            total[rank] += load
    _level(states, total)
    return {key: rank for state in states for key, rank in state.owner.items()}


def _level(states: Sequence[_Ownership], total: dict[int, int]) -> None:
    """Balance owned blocks between ranks that hold the same units, by free moves first."""
    for signature, ranks in classes_of([state.holders for state in states]).items():
        while len(ranks) > 1:
            high = max(ranks, key=lambda r: (total[r], -r))
            low = min(ranks, key=lambda r: (total[r], r))
            gap = total[high] - total[low]
            worth_paying = gap > max(1.0, LEVEL_TOLERANCE * total[high])
            if gap < 2 or not _shift([states[i] for i in signature], high, low, worth_paying):
                break
            total[high] -= 1
            total[low] += 1


def _shift(states: Sequence[_Ownership], high: int, low: int, may_pay: bool) -> bool:
    """Move one block from ``high`` to ``low`` in a unit that stays balanced; return whether there was one."""
    able = [state for state in states if state.load[high] > state.load[low]]
    for state in able:
        path = state.free_path(high, frozenset({low}))
        if path:
            for key, rank in path:
                state.give(key, rank)
            return True
    if may_pay and able:
        able[0].pay(high, low)
        return True
    return False
