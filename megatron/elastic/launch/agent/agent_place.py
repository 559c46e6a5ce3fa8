"""This agent's place among the agents of a job: shared by the parts of it that talk to the other agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.elastic.control.nodes import Node
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.store import Store
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.loop import Loop

__all__ = ["AgentPlace"]


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
