"""The losses that the state survives now: the number of ranks, nodes or racks, and the smallest fatal sets.

A block is lost with a set of domains exactly if all its copies are in them. So the smallest fatal sets of a level are
the smallest sets of domains that hold all copies of some block. The result is exact and takes one pass over the
blocks, most of which share their sets of ranks with others.
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
    """Domains of one level: ranks, nodes, or domains of nodes."""

    count: int
    """Number of domains."""
    any: int
    """State survives the loss of any this many domains at once."""
    fatal: tuple[tuple[int, ...], ...]
    """The sets of ``any`` + 1 domains whose loss loses state, ascending; of all ``possible`` sets of that size."""

    @property
    def possible(self) -> int:
        """Number of sets of ``any`` + 1 domains."""
        return comb(self.count, self.any + 1)


@dataclass(frozen=True)
class Tolerance:
    """The tolerated losses; levels from ranks outwards, the second one nodes."""

    levels: tuple[Level, ...]
    short: int
    """Blocks with fewer copies than wanted."""
    blocks: int


def tolerance(placement: Placement, domains: FailureDomains, mirrors: int) -> Tolerance:
    """Return the tolerance of ``placement`` on the living ranks, those of ``domains``; ``mirrors``: wanted mirrors."""
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
