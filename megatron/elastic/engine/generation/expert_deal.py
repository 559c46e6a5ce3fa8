"""The deal of a layer's experts over adjacent ranks, for the sizes in force.

The ranks that have all experts together are those of several cells, of one cell, or some of one. Cells at one place of
adjacent replicas that share the experts are a crew. Into how many sets the experts are dealt follows from the sizes in
force. State has an expert in the parts of the launch. So has a cell whose size they divide; in another cell a rank has
several of them, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from megatron.elastic.plan.expert_replicas import Room

__all__ = ["ExpertDeal"]


@dataclass(frozen=True)
class ExpertDeal:
    """The experts of a layer that each rank has while none is missing."""

    experts: int
    """Number of experts of a layer, where ranks share them; 0: each rank of a stage has all experts of its layers."""
    homes: int
    """Into how many sets they are dealt: Megatron's expert-parallel size."""
    parts: int
    """Number of adjacent ranks of a cell with parts of the same experts: Megatron's expert-tensor-parallel size."""
    cell: int
    """Number of ranks of a cell."""
    replicas: int = 0
    """Number of experts that a rank may have beyond its share: replicas of those that other ranks have."""

    def over(self, homes: int, cell: int) -> ExpertDeal:
        """Return the deal of the same experts into ``homes`` sets over cells of ``cell`` ranks; this one: the launch's.

        A rank never has less than one of the launch's parts of an expert.
        """
        return replace(self, homes=homes, parts=gcd(self.parts, cell), cell=cell)

    @property
    def ranks(self) -> int:
        """Number of adjacent ranks that have all experts together; a multiple of a cell's ranks, or a divisor."""
        return self.homes * self.parts

    @property
    def crew_size(self) -> int:
        """Number of adjacent replicas that share the experts; 1 where each cell has all of them, also several times."""
        return max(1, self.ranks // self.cell)

    @property
    def _sets(self) -> int:
        """Number of sets of experts in a cell."""
        return min(self.ranks, self.cell) // self.parts

    def room(self, present: int) -> Room:
        """Return the experts that a cell may have while ``present`` cells of its crew are there."""
        return Room(
            self.experts // present, min(self.experts, -(-self.experts // present) + self.replicas * self._sets)
        )

    def at(self, index: int) -> tuple[int, ...]:
        """Return the experts that the ``index``-th replica of a crew has."""
        each = self.experts // self.crew_size
        return tuple(range(index * each, (index + 1) * each))

    def on_ranks(self, index: int, experts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return how the ``index``-th cell of a crew has ``experts`` on its ranks, in the order of these.

        Adjacent ranks that share a set have parts of the same ones: those that :meth:`at` gives them, and of the others
        as many as the rest of the cell.
        """
        own, homes = self.at(index), self._sets
        each = len(own) // homes
        found = [[expert for expert in own[at * each : (at + 1) * each] if expert in experts] for at in range(homes)]
        for expert in sorted(set(experts) - set(own)):
            min(found, key=len).append(expert)
        return tuple(tuple(sorted(found[at // self.parts % homes])) for at in range(self.cell))

    def refusal(self, replicas: int) -> str:
        """Return why ``replicas`` replicas cannot share experts so; empty if they can."""
        if self.experts % self.homes:
            return f"EP {self.homes} does not divide {self.experts} experts"
        if self.ranks % self.cell and self.cell % self.ranks:
            return (
                f"EP {self.homes}: {self.ranks} ranks have all experts together, which is neither a multiple nor a "
                f"divisor of {self.cell}, the ranks that share a micro-batch"
            )
        if replicas % self.crew_size:
            return f"EP {self.homes} takes a number of replicas that is a multiple of {self.crew_size}"
        return ""
