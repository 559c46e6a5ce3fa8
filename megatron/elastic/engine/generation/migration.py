"""A migration as agreed: the configuration to reach and the copies to add, promote and drop on the way.

:mod:`~megatron.elastic.engine.transaction.migrate` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.elastic.engine.generation.configuration import Configuration
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.placement import Transition

__all__ = ["Migration"]


@dataclass(frozen=True)
class Migration:
    """A configuration to reach, and the changes of copies that lead there; the same on every rank.

    An added copy may go from any rank that holds the block to any other, whatever
    units either computes.
    """

    target: Configuration
    changes: tuple[Transition, ...]
    urgent: bool = False
    """Only adds copies that blocks are short of after a loss."""

    def adds(self) -> dict[tuple[int, int], tuple[BlockKey, ...]]:
        """(source, destination) → blocks, ascending."""
        pairs: dict[tuple[int, int], list[BlockKey]] = {}
        for change in self.changes:
            if change.kind == "add":
                pairs.setdefault((change.source, change.rank), []).append(change.block)
        return {pair: tuple(sorted(blocks)) for pair, blocks in sorted(pairs.items())}
