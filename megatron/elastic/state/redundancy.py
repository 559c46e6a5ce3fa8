"""The blocks that are short of mirrors after a loss, and the placement of new mirrors.

``ownership.rebalance`` finds the balanced placement; it also moves owners, which may take
long. After a loss it is urgent that each block has all its mirrors again. This file adds only
the missing mirrors: no owner changes, no copy is dropped. ``rebalance`` follows later and keeps
existing copies if possible.

Order of preference for one mirror (that of ``mirrors``, without its peers and its fine balance):

- 1: the rank shares as few failure domains as possible with any other copy of the block;
- 2: it computes the unit;
- 3: it receives least so far, so that all receive equal shares; then it holds least.

The first two follow from the ranks with a copy and those that compute the unit, which many blocks have in common: the
ranks that are best by them are found once for all these blocks.

All are pure functions of integers: every process derives the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache

from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.placement import Copies, Placement, Rules, Transition, UnitGroup, shared_levels

__all__ = ["replenish", "short_of_mirrors"]


def short_of_mirrors(placement: Placement, mirrors: int, living: Collection[int]) -> tuple[BlockKey, ...]:
    """Return the blocks with fewer mirrors than ``mirrors`` and than ``living`` ranks allow, ascending."""
    due = min(mirrors, len(living) - 1)
    return tuple(sorted(key for key, copies in placement.copies.items() if len(copies.mirrors) < due))


def replenish(
    placement: Placement, groups: Sequence[UnitGroup], rules: Rules
) -> tuple[Placement, tuple[Transition, ...]]:
    """Add missing mirrors on the ranks of ``rules.domains``; ``groups``: the ranks that compute each unit.

    Returns the placement with them, and one add for each, sent by the rank that sends least so far.
    """
    living = sorted(rules.domains)
    homes = {(group.unit, group.shard): group.holders for group in groups}
    best = _Candidates(rules).best
    holds = Counter(rank for copies in placement.copies.values() for rank in copies.ranks)
    received, sent = Counter[int](), Counter[int]()
    copies, adds = dict(placement.copies), list[Transition]()
    for key in short_of_mirrors(placement, rules.mirrors, living):
        home, sources = homes.get(key[:2], ()), copies[key].ranks
        for _ in range(min(rules.mirrors, len(living) - 1) - len(copies[key].mirrors)):
            held = copies[key]
            new = min(best(held.ranks, home), key=lambda rank: (received[rank], holds[rank], rank))
            source = min(sources, key=lambda rank: (sent[rank], rank))
            received[new], holds[new], sent[source] = received[new] + 1, holds[new] + 1, sent[source] + 1
            copies[key] = Copies(held.owner, (*held.mirrors, new))
            adds.append(Transition("add", key, new, source))
    return Placement(copies), tuple(adds)


class _Candidates:
    """The ranks for a further copy: first those in fewest failure domains of the other copies, of them the holders."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._inside: dict[int, list[int]] = {}
        """Innermost domain → its ranks."""
        for rank, domain in rules.domains.items():
            self._inside.setdefault(domain, []).append(rank)
        self.best = cache(self._best)

    def _best(self, held: tuple[int, ...], home: tuple[int, ...]) -> tuple[int, ...]:
        """Return the best candidates for a block that the ranks ``held`` have and the ranks ``home`` compute.

        Some living rank must have no copy.
        """
        paths = [self._rules.path(rank) for rank in held if rank in self._rules.domains]
        shared: dict[int, list[int]] = {}
        for ranks in self._inside.values():
            if free := [rank for rank in ranks if rank not in held]:
                mine = self._rules.path(free[0])
                most = max((shared_levels(mine, path) for path in paths), default=0)
                shared.setdefault(most, []).extend(free)
        least = shared[min(shared)]
        return tuple(frozenset(least).intersection(home)) or tuple(least)
