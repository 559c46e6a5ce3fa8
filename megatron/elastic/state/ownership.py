"""Balanced, redundant placement with few transfers: the second stage of a change of membership.

:func:`rebalance` restores balance (owners of a unit group differ by at most one
block) and k declustered mirrors with few adds. Adds run in the background;
promotions and drops follow at a boundary (docs/design.md §6).

All are pure functions of integers: each process derives the same placement from
the same decision and compares ``Placement.digest()``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.elastic.state.balance import balanced_owners
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.mirrors import choose_mirrors
from megatron.elastic.state.placement import (
    Copies,
    Placement,
    Promotion,
    Rules,
    Transition,
    UnitGroup,
    promote_only,
)

__all__ = [
    "Copies",
    "Placement",
    "Promotion",
    "Rules",
    "Transition",
    "UnitGroup",
    "after",
    "initial",
    "promote_only",
    "rebalance",
]


def initial(groups: Sequence[UnitGroup], rules: Rules) -> Placement:
    """Return the balanced placement of a job without state: contiguous ranges of each unit per holder.

    The ranks that own one block more rotate from unit to unit.
    """
    if rules.ownership == "contiguous":
        cut = _contiguous(groups)
        return Placement(_mirrored(groups, rules, cut, {key: Copies(rank) for key, rank in cut.items()}))
    owners: dict[BlockKey, int] = {}
    turn: dict[tuple[int, ...], int] = {}
    for group in groups:
        n, m = len(group.blocks), len(group.holders)
        shift = turn.get(group.holders, 0)
        turn[group.holders] = (shift + n) % m
        sizes = [n // m + ((j - shift) % m < n % m) for j in range(m)]
        ranks = [rank for rank, size in zip(group.holders, sizes, strict=True) for _ in range(size)]
        owners |= {block.key: rank for block, rank in zip(group.blocks, ranks, strict=True)}
    return Placement(_mirrored(groups, rules, owners, {key: Copies(rank) for key, rank in owners.items()}))


def rebalance(
    placement: Placement, groups: Sequence[UnitGroup], rules: Rules
) -> tuple[Placement, tuple[Transition, ...]]:
    """Restore balance and redundancy for ``groups`` with few adds. Changes are ordered: adds, promotions, drops.

    Raises ``KeyError`` for blocks that ``placement`` lacks: they have no state to copy.
    """
    contiguous = rules.ownership == "contiguous"
    owners = _contiguous(groups) if contiguous else balanced_owners(placement.copies, groups)
    copies = _mirrored(groups, rules, owners, placement.copies)
    changes = _difference(placement.copies, copies)
    return Placement(copies), changes


def after(
    placement: Placement, groups: Sequence[UnitGroup], rules: Rules
) -> tuple[Placement, tuple[Transition, ...], tuple[BlockKey, ...]]:
    """Run both stages, for simulators and tests; return (placement, transitions, lost blocks)."""
    first = promote_only(placement, rules.domains.keys(), groups)
    if first.lost:
        return first.placement, first.transitions, first.lost
    second, changes = rebalance(first.placement, groups, rules)
    return second, first.transitions + changes, ()


def _contiguous(groups: Sequence[UnitGroup]) -> dict[BlockKey, int]:
    """Return owners: units of a shard with the same holders are concatenated and cut into one equal part a holder."""
    runs: dict[tuple[int, tuple[int, ...]], list[BlockKey]] = {}
    for group in sorted(groups, key=lambda g: (g.shard, g.unit)):
        runs.setdefault((group.shard, group.holders), []).extend(block.key for block in group.blocks)
    return {
        key: holders[position * len(holders) // len(keys)]
        for (_, holders), keys in runs.items()
        for position, key in enumerate(keys)
    }


def _mirrored(
    groups: Sequence[UnitGroup],
    rules: Rules,
    owners: Mapping[BlockKey, int],
    before: Mapping[BlockKey, Copies],
) -> dict[BlockKey, Copies]:
    """Return the copies of every block of ``groups``. Those that stay as they were ``before`` are the same objects."""
    held = {block.key: before[block.key].ranks for group in groups for block in group.blocks}
    mirrors = choose_mirrors(groups, rules, owners, held)
    return {
        key: was if (was := before[key]).ranks == (owners[key], *ranks) else Copies(owners[key], ranks)
        for key, ranks in mirrors.items()
    }


def _difference(before: Mapping[BlockKey, Copies], now: Mapping[BlockKey, Copies]) -> tuple[Transition, ...]:
    """Return adds (each from the copy whose rank sends least so far), then promotions, then drops."""
    adds, promotions, drops = list[Transition](), list[Transition](), list[Transition]()
    sent: dict[int, int] = {}
    changed = sorted(key for key, copies in now.items() if copies is not before[key])
    for key in changed:
        old, new = before[key], now[key]
        for rank in (r for r in new.ranks if r not in old.ranks):
            source = min(old.ranks, key=lambda r: (sent.get(r, 0), r))
            sent[source] = sent.get(source, 0) + 1
            adds.append(Transition("add", key, rank, source))
        promotions += [Transition("promote", key, new.owner)] if new.owner != old.owner else []
        drops += [Transition("drop", key, r) for r in old.ranks if r not in new.ranks]
    return (*adds, *promotions, *drops)
