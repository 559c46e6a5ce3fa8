"""Ranks of one group in one generation: group ranks that callers use, inner ranks of the living.

*Group ranks* are positions among the living members, or, in the slot space (the
default group), global slots. *Inner ranks* are positions among those who take
part. A seating maps between them; it is replaced as a whole by an edit.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.elastic.comm.registry import group_name

__all__ = ["Seated", "Seating"]


@dataclass(frozen=True)
class Seating:
    """The members of one group in one generation."""

    generation: int
    living: tuple[int, ...]
    """Global ranks in member order: inner rank → global rank."""
    own: int
    """Inner rank of this process."""
    slots: int | None
    """Number of slots for the default group; None for a sub-group."""
    members: tuple[int, ...] = ()
    """All ranks that the group was made of. Before the first edit sizes and ranks are theirs (a model is
    built to nominal sizes), and collectives run over this process alone."""

    @property
    def _nominal(self) -> bool:
        return self.slots is None and self.generation == 0

    @property
    def size(self) -> int:
        if self._nominal:
            return len(self.members)
        return len(self.living) if self.slots is None else self.slots

    @property
    def rank(self) -> int:
        if self._nominal:
            return self.members.index(self.living[self.own])
        return self.own if self.slots is None else self.living[self.own]

    def seats(self) -> tuple[int, ...]:
        """Group rank of every inner rank."""
        if self._nominal:
            return (self.rank,)
        return tuple(range(len(self.living))) if self.slots is None else self.living

    def inner(self, group_rank: int) -> int | None:
        """Inner rank of ``group_rank``; None when that member is not living."""
        if self._nominal:
            return 0 if group_rank == self.rank else None
        if self.slots is None:
            return group_rank if 0 <= group_rank < len(self.living) else None
        return self.living.index(group_rank) if group_rank in self.living else None

    def root(self, group_rank: int) -> int:
        """Inner rank of a collective's root; the first living member stands in for a dead one."""
        inner = self.inner(group_rank)
        return 0 if inner is None else inner


class Seated:
    """The identity of a process group whose ranks follow its seating: what torch asks of any group."""

    role: str
    members: tuple[int, ...]
    seating: Seating

    def getRank(self) -> int:
        return self.seating.rank

    def getSize(self) -> int:
        return self.seating.size

    def rank(self) -> int:
        return self.seating.rank

    def size(self) -> int:
        return self.seating.size

    def getGroupName(self) -> str:
        return group_name(self.role, self.members)
