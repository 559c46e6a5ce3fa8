"""This agent's place among the agents of a job: shared by the parts of it that talk to the other agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.elastic.control.nodes import Node
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.store import Store
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.loop import Loop

__all__ = ["WATCHERS", "AgentPlace"]

WATCHERS = 4
"""Number of agents that read the leases of all nodes: the coordinator and those that would succeed it."""


@dataclass(frozen=True)
class AgentPlace:
    """``node``: this agent's node number; ``token``: its own, which tells it from another agent of that number."""

    node: int
    token: str
    nodes: Mapping[int, Node]
    """All nodes of the job. They change with the journal."""
    store: Store
    signer: Signer
    timing: Timing
    loop: Loop

    @property
    def epoch(self) -> int:
        """The present life of this node."""
        return self.nodes[self.node].epoch

    def others(self) -> dict[int, Node]:
        """The other living nodes, by number."""
        return {number: node for number, node in self.nodes.items() if number != self.node and node.alive}

    def watched(self) -> dict[int, Node]:
        """The other living nodes whose leases this agent reads, by number.

        The first living nodes read all leases, and the others read theirs. If all read all, the store would serve the
        square of the number of nodes at each beat.
        """
        watchers = sorted(number for number, node in self.nodes.items() if node.alive)[:WATCHERS]
        others = self.others()
        return others if self.node in watchers else {number: others[number] for number in watchers}
