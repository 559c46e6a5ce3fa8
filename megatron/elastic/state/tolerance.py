"""The losses that state survives now: any so many ranks, nodes or racks at once, and the smallest sets it does not.

A block is lost with a set of domains exactly when all its copies lie in them. So the smallest sets whose loss takes
state along are the smallest among the sets of domains that hold all copies of a block, on each level of domains.
Exact, in one pass over the blocks: most of them share their sets of ranks with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb

from megatron.elastic.state.domains import FailureDomains
from megatron.elastic.state.placement import Placement

__all__ = ["Level", "Tolerance", "tolerance"]


@dataclass(frozen=True)
class Level:
    """Domains of one kind: ranks, nodes, or what holds nodes."""

    count: int
    """How many there are."""
    any: int
    """State survives the loss of any so many of them at once."""
    fatal: tuple[tuple[int, ...], ...]
    """The sets of ``any`` + 1 whose loss takes state along, ascending; of all ``possible`` sets of that size."""

    @property
    def possible(self) -> int:
        """Number of sets of ``any`` + 1 domains."""
        return comb(self.count, self.any + 1)


@dataclass(frozen=True)
class Tolerance:
    """What can be lost now; levels from ranks outwards, the second one nodes."""

    levels: tuple[Level, ...]
    short: int
    """Blocks with fewer copies than wanted."""
    blocks: int


def tolerance(placement: Placement, domains: FailureDomains, mirrors: int) -> Tolerance:
    """Of the copies in ``placement`` at living ranks, those of ``domains``, of ``mirrors`` beside the owner wanted."""
    sets: dict[tuple[int, ...], int] = {}
    for copies in placement.copies.values():
        ranks = copies.ranks
        sets[ranks] = sets.get(ranks, 0) + 1
    wanted = min(1 + mirrors, len(domains.nodes))
    living = {ranks: frozenset(rank for rank in ranks if rank in domains.nodes) for ranks in sets}
    short = sum(count for ranks, count in sets.items() if len(living[ranks]) < wanted)
    held = set(living.values())
    paths = {rank: (rank, node, *reversed(domains.wider.get(node, ()))) for rank, node in domains.nodes.items()}
    depth = len(next(iter(paths.values()), ()))
    levels = tuple(_level({rank: path[level] for rank, path in paths.items()}, held) for level in range(depth))
    return Tolerance(levels, short, len(placement.copies))


def _level(domain: Mapping[int, int], held: set[frozenset[int]]) -> Level:
    there = {frozenset(domain[rank] for rank in ranks) for ranks in held}
    least = min(map(len, there), default=0)
    fatal = sorted(tuple(sorted(one)) for one in there if len(one) == least)
    return Level(len(set(domain.values())), max(0, least - 1), tuple(fatal))
