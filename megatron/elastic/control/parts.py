"""Which parts of agents have been taken in (:class:`~megatron.elastic.control.events.Together`).

Invariant (tests/unit/launch/test_own_events.py): whatever the journal holds of an agent's parts, repeated or by
different ways, every reader takes each once, directly behind the part before it, and in the present life of its node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from megatron.elastic.control.events import Event, Together
from megatron.elastic.control.nodes import Node

__all__ = ["TakenParts"]


class TakenParts(msgspec.Struct, forbid_unknown_fields=True):
    """See the module docstring."""

    by_node: dict[int, int] = {}
    """Node → number of the newest part of its agents."""

    def newest(self, node: int) -> int:
        """Return the number of the newest part of ``node``; 0 before any."""
        return self.by_node.get(node, 0)

    def events(self, entry: Event, nodes: Mapping[int, Node]) -> Iterator[Event]:
        """Yield the events of the journal's next ``entry`` that count. Apply each before the next is asked for."""
        if not isinstance(entry, Together):
            yield entry
            return
        for part in entry.parts:
            node = nodes.get(part.node)
            if node is not None and part.epoch == node.epoch and part.number == self.newest(part.node) + 1:
                self.by_node[part.node] = part.number
                yield part.event
