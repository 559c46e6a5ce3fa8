"""Pure rules that find the rank at fault, from the wait-for graph and the accusations.

A hang stalls all ranks, so silence proves nothing (docs/design.md §4). Blame falls on the
*sinks* of the wait-for graph: ranks that others wait for, directly or through a
chain, and that wait for no rank themselves. A cycle has no sink and blames no rank.

A broken link between two processes whose agents vouch for them gets one
reconnection (the generation is formed anew). If the same two fall out again, the
one with more broken links goes; when that is even, the higher rank. The rule is
arbitrary on purpose: both ends, asked separately, must give the same answer.

A host that answers nothing, while its agent renews its lease, is cut off from other
nodes' data. It gets one reconnection too. Then the nodes that reach fewest of the others
go, and of equal ones the higher, until all that are left reach one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

__all__ = ["Accusation", "Idle", "Ruling", "Suspicions", "cut_off", "hang_verdict", "sinks"]


@dataclass(frozen=True)
class Accusation:
    """``by`` has evidence against ``rank``."""

    by: int
    rank: int
    why: str = ""
    silent: tuple[int, ...] = ()
    """Ranks whose hosts answered ``by`` nothing."""


@dataclass(frozen=True)
class Ruling:
    """Form the generation anew, kill ``rank``, or give up ``nodes`` (ascending)."""

    kind: Literal["reform", "condemn", "cut off"]
    rank: int = -1
    why: str = ""
    nodes: tuple[int, ...] = ()


class Idle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member's published activity and for how long it has not changed (seconds)."""

    step: int
    phase: str
    waiting_for: tuple[int, ...]
    seconds: float
    limit: float
    """Seconds for which this is normal."""


def sinks(waiting: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Ranks that others wait for and that wait for no rank themselves, most waited-for first (then by rank).

    ``waiting`` maps each living rank to the ranks it waits for; a rank that is
    waited for but not in the map is a sink too (it is gone, or says nothing).
    """
    waiters: dict[int, list[int]] = {}
    for rank, others in waiting.items():
        for other in set(others) - {rank}:
            waiters.setdefault(other, []).append(rank)
    counts = {rank: _reachable(rank, waiters) for rank in waiters if not waiting.get(rank)}
    return tuple(sorted(counts, key=lambda rank: (-counts[rank], rank)))


def _reachable(start: int, edges: Mapping[int, Sequence[int]]) -> int:
    """Return the number of ranks that are reached from ``start``, without itself."""
    found, front = {start}, [start]
    while front:
        for rank in edges.get(front.pop(), ()):
            if rank not in found:
                found.add(rank)
                front.append(rank)
    return len(found) - 1


def hang_verdict(table: Mapping[int, Idle]) -> Ruling | None:
    """The rank to kill when no rank makes progress; None while any does, or where none is at fault."""
    if not table or any(idle.seconds <= idle.limit for idle in table.values()):
        return None
    found = sinks({rank: idle.waiting_for for rank, idle in table.items()})
    if not found:
        return None
    idle_at = table.get(found[0])
    where = f" in {idle_at.phase!r} of step {idle_at.step}" if idle_at else ""
    return Ruling("condemn", found[0], f"hung{where}: {len(table) - 1} others made no progress waiting for it")


def cut_off(apart: Collection[frozenset[int]]) -> tuple[int, ...]:
    """Nodes to give up, ascending, so that no pair of ``apart`` is left. ``apart``: no data passes between the two."""
    gone = set[int]()
    while left := [pair for pair in apart if not pair & gone]:
        counts = Counter(node for pair in left for node in pair)
        gone.add(max(counts, key=lambda node: (counts[node], node)))
    return tuple(sorted(gone))


@dataclass
class Suspicions:
    """Accusations of one generation, and the pairs that fell out before."""

    generation: int = 0
    _now: list[Accusation] = field(default_factory=list)
    _before: set[frozenset[tuple[int, int]]] = field(default_factory=set)
    _apart: frozenset[frozenset[int]] = frozenset()
    """Pairs of nodes between which no data passed before."""

    @property
    def silence(self) -> bool:
        """Some host was silent, by an accusation of the present generation."""
        return any(accusation.silent for accusation in self._now)

    def add(self, generation: int, accusation: Accusation) -> bool:
        """Note an accusation made in ``generation``; True when it is the first there."""
        if generation != self.generation:
            self.generation, self._now = generation, []
        self._now.append(accusation)
        return len(self._now) == 1

    def verdict(self, incarnations: Mapping[int, int], nodes: Mapping[int, int]) -> Ruling | None:
        """The ruling if none of the ranks involved died or was stopped.

        ``incarnations``: of living members. ``nodes``: of all ranks.
        """
        apart = frozenset(
            frozenset((nodes[a.by], nodes[rank]))
            for a in self._now
            for rank in a.silent
            if a.by in incarnations and rank in incarnations and nodes[a.by] != nodes[rank]
        )
        if apart:
            known, self._apart = self._apart, self._apart | apart
            why = f"no data passes between nodes {_pairs(apart)}"
            return Ruling("cut off", nodes=cut_off(apart), why=why) if apart & known else Ruling("reform", why=why)
        standing = [a for a in self._now if a.by in incarnations and a.rank in incarnations and a.by != a.rank]
        if not standing:
            return None
        pairs = {frozenset(((a.by, incarnations[a.by]), (a.rank, incarnations[a.rank]))) for a in standing}
        again = pairs & self._before
        self._before |= pairs
        if not again:
            return Ruling("reform", why=_describe(standing))
        involved = {rank for pair in again for rank, _ in pair}
        # Which end accuses depends on which noticed first: the number of broken links of a rank decides.
        broken = {rank: sum(any(rank == one for one, _ in pair) for pair in pairs) for rank in involved}
        worst = max(involved, key=lambda rank: (broken[rank], rank))
        return Ruling("condemn", worst, f"link broken again ({_describe(standing)})")


def _pairs(apart: Collection[frozenset[int]]) -> str:
    return ", ".join(" and ".join(map(str, sorted(pair))) for pair in sorted(apart, key=sorted))


def _describe(accusations: Sequence[Accusation]) -> str:
    first = accusations[0]
    more = f" and {len(accusations) - 1} more" if len(accusations) > 1 else ""
    return f"rank {first.by} against rank {first.rank}: {first.why or 'no reason given'}{more}"
