"""Failure domains of a generation's members, and the rules for placing copies that follow from them."""

from __future__ import annotations

from collections.abc import Collection

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.membership import Decision
from megatron.elastic.state.domains import FailureDomains
from megatron.elastic.state.placement import Rules

__all__ = ["failure_domains", "placement_rules"]


def failure_domains(decision: Decision) -> FailureDomains:
    """Return the failure domains of the members, from the labels of their addresses."""
    labels = {rank: address.domain or address.host.replace("/", "-") for rank, address in decision.members.items()}
    return FailureDomains.of(labels, {rank: address.host for rank, address in decision.members.items()})


def placement_rules(config: ElasticConfig, domains: FailureDomains, ranks: Collection[int] | None = None) -> Rules:
    """Return the rules for spreading copies over ``ranks`` (None: over all ranks of ``domains``)."""
    nodes = {rank: node for rank, node in domains.nodes.items() if ranks is None or rank in ranks}
    return Rules(config.mirrors, config.scatter_width, nodes, config.ownership, domains.wider)
