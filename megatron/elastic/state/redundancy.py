"""Blocks that are short of mirrors after a loss, and where further ones are made at once.

``ownership.rebalance`` says where copies belong; it weighs balance, moves owners and may take
long. After a loss only one thing is urgent: that each block has its mirrors again. This
file adds what is missing, and nothing else: no owner changes, no copy goes. Balance follows later,
with ``rebalance``, which keeps a copy that is there already where it can.

Order of preference for one mirror (that of ``mirrors``, without its fine balance)
1. computes the unit and lies in a failure domain without a copy; computes the unit; lies in a failure
   domain without a copy; any other. The last of several mirrors leaves the owner's domain, if need be to another
   group;
2. receives least so far, so that all receive alike;
3. holds least.

Pure functions of integers, linear in the missing copies: every process derives the same in a recovery.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.placement import Copies, Placement, Rules, Transition, UnitGroup

__all__ = ["replenish", "short_of_mirrors"]


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
    holders = {(group.unit, group.shard): group.holders for group in groups}
    holds = Counter(rank for copies in placement.copies.values() for rank in copies.ranks)
    received, sent = Counter[int](), Counter[int]()
    copies, adds = dict(placement.copies), list[Transition]()
    for key in short_of_mirrors(placement, rules.mirrors, living):
        home, sources = holders.get(key[:2], ()), copies[key].ranks
        while len(copies[key].mirrors) < rules.mirrors:
            held = copies[key]
            candidates = [rank for rank in living if rank not in held.ranks]
            if not candidates:
                break
            tiers = _tiers(held, home, rules, candidates)
            new = min(candidates, key=lambda rank: (tiers[rank], received[rank], holds[rank], rank))
            source = min(sources, key=lambda rank: (sent[rank], rank))
            received[new], holds[new], sent[source] = received[new] + 1, holds[new] + 1, sent[source] + 1
            copies[key] = Copies(held.owner, (*held.mirrors, new))
            adds.append(Transition("add", key, new, source))
    return Placement(copies), tuple(adds)


def _tiers(held: Copies, home: Collection[int], rules: Rules, candidates: Sequence[int]) -> Mapping[int, int]:
    """Candidate → first criterion above, 0 the best."""
    taken = {rules.domains[rank] for rank in held.ranks if rank in rules.domains}
    last = rules.mirrors > 1 and len(held.mirrors) == rules.mirrors - 1
    must_leave = last and len(taken) == 1
    near, far = (1, 2) if not must_leave else (2, 1)
    tiers = {}
    for rank in candidates:
        away = rules.domains[rank] not in taken
        tiers[rank] = (0 if away else near) if rank in home else (far if away else 3)
    return tiers
