"""Blocks that are short of mirrors after a loss, and where further ones are made at once.

``ownership.rebalance`` says where copies belong; it weighs balance, moves owners and may take
long. After a loss only one thing is urgent: that each block has its mirrors again. This
file adds what is missing, and nothing else: no owner changes, no copy goes. Balance follows later,
with ``rebalance``, which keeps a copy that is there already where it can.

Order of preference for one mirror (that of ``mirrors``, without its peers and its fine balance)
1. the rank shares as few failure domains as possible with any other copy of the block;
2. it computes the unit;
3. it receives least so far, so that all receive alike; it holds least.

Pure functions of integers, linear in the missing copies: every process derives the same in a recovery.
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
    """Blocks with fewer than ``mirrors`` mirrors, or fewer than ``living`` ranks allow, ascending."""
    due = min(mirrors, len(living) - 1)
    return tuple(sorted(key for key, copies in placement.copies.items() if len(copies.mirrors) < due))


def replenish(
    placement: Placement, groups: Sequence[UnitGroup], rules: Rules
) -> tuple[Placement, tuple[Transition, ...]]:
    """Add the mirrors that blocks are short of on ``rules.domains``' ranks; ``groups`` say who computes which unit.

    Returns the placement with them, and one add for each, from the rank that sends least so far.
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


def _costs(
    candidates: Sequence[int], held: Copies, home: Collection[int], rules: Rules
) -> dict[int, tuple[int, bool]]:
    """Candidate → (most failure domains shared with a copy, whether it does not compute the unit)."""
    paths = [rules.path(rank) for rank in held.ranks if rank in rules.domains]
    shared = {rank: max((shared_levels(rules.path(rank), path) for path in paths), default=0) for rank in candidates}
    return {rank: (shared[rank], rank not in home) for rank in candidates}
