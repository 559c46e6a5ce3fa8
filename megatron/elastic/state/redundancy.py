"""The blocks that are short of mirrors after a loss, and the placement of new mirrors.

``ownership.rebalance`` finds the balanced placement; it also moves owners, which may take
long. After a loss it is urgent that each block has all its mirrors again. This file adds only
the missing mirrors: no owner changes, no copy is dropped. ``rebalance`` follows later and keeps
existing copies if possible.

Order of preference for one mirror (that of ``mirrors``, without its peers and its fine balance):

- 1: the rank shares as few failure domains as possible with any other copy of the block;
- 2: it computes the unit;
- 3: it receives least so far, so that all receive equal shares; then it holds least.

All are pure functions of integers, linear in the missing copies: every process derives the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.placement import Copies, Placement, Rules, Transition, UnitGroup, shared_levels

__all__ = ["replenish", "short_of_mirrors"]

Path = tuple[int, ...]
"""Failure domains of a rank, outermost first."""


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
    homes = {(group.unit, group.shard): frozenset(group.holders) for group in groups}
    holds = Counter(rank for copies in placement.copies.values() for rank in copies.ranks)
    received, sent = Counter[int](), Counter[int]()
    copies, adds = dict(placement.copies), list[Transition]()
    for key in short_of_mirrors(placement, rules.mirrors, living):
        home, sources = homes.get(key[:2], frozenset()), copies[key].ranks
        for _ in range(min(rules.mirrors, len(living) - 1) - len(copies[key].mirrors)):
            held = copies[key]
            candidates = [rank for rank in living if rank not in held.ranks]
            cost = _costs(candidates, held, home, rules)
            new = min(candidates, key=lambda rank: (*cost[rank], received[rank], holds[rank], rank), default=None)
            if new is None:
                break
            source = min(sources, key=lambda rank: (sent[rank], rank))
            received[new], holds[new], sent[source] = received[new] + 1, holds[new] + 1, sent[source] + 1
            copies[key] = Copies(held.owner, (*held.mirrors, new))
            adds.append(Transition("add", key, new, source))
    return Placement(copies), tuple(adds)


def _costs(candidates: Sequence[int], held: Copies, home: Collection[int], rules: Rules) -> dict[int, tuple[int, bool]]:
    """Return candidate → (most failure domains shared with a copy, whether it does not compute the unit)."""
    paths = [rules.path(rank) for rank in held.ranks if rank in rules.domains]
    shared = {rank: max((shared_levels(rules.path(rank), path) for path in paths), default=0) for rank in candidates}
    return {rank: (shared[rank], rank not in home) for rank in candidates}
