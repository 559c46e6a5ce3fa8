"""A migration: the target configuration and the copies to add, promote and drop.

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
    """A target configuration, and the changes of copies that lead there; equal on every rank.

    An added copy may go from any rank that holds the block to any other, independent of
    the units that the two compute.
    """

    target: Configuration
    changes: tuple[Transition, ...]
    urgent: bool = False
    """True if it only adds the copies that a loss left missing."""

    def adds(self) -> dict[tuple[int, int], tuple[BlockKey, ...]]:
        """Return (source, destination) → blocks to copy, ascending."""
        pairs: dict[tuple[int, int], list[BlockKey]] = {}
        for change in self.changes:
            if change.kind == "add":
                pairs.setdefault((change.source, change.rank), []).append(change.block)
        return {pair: tuple(sorted(blocks)) for pair, blocks in sorted(pairs.items())}
