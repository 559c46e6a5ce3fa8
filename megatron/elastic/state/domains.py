"""Failure domains of the living ranks, from the labels that come with their addresses.

A label names nested domains, outermost first: ``rack7/host12`` is node ``host12`` in rack ``rack7``. Ranks with equal
labels are in one node; labels with a common prefix share the domains of the prefix. Domains are numbered in order of
their lowest rank, so every rank derives the same numbers from the same decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["FailureDomains", "check_label"]

_LONGEST = 200


def check_label(label: str) -> str:
    """Return ``label`` if it is valid. Raises ``ValueError`` with one line."""
    parts = label.split("/")
    if len(label) > _LONGEST or not label.isprintable() or not all(part and part == part.strip() for part in parts):
        raise ValueError(f"takes names with '/' between, outermost first, like rack7/host12; got {label[:80]!r}")
    return label


@dataclass(frozen=True)
class FailureDomains:
    """The failure domains of ranks. ``nodes``: rank → its innermost domain; ``wider``: as in :class:`Rules`."""

    nodes: Mapping[int, int] = field(default_factory=dict)
    wider: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    """Innermost domain → names of its hosts for log lines."""

    @classmethod
    def of(cls, labels: Mapping[int, str], hosts: Mapping[int, str]) -> FailureDomains:
        """Return the domains of the ranks of ``labels``; ``hosts``: rank → name of its host."""
        depth = max((label.count("/") + 1 for label in labels.values()), default=1)
        numbers: dict[tuple[str, ...], int] = {}
        nodes, wider, inside = dict[int, int](), dict[int, tuple[int, ...]](), dict[int, list[str]]()
        for rank in sorted(labels):
            parts = labels[rank].split("/")
            path = (*parts, *parts[-1:] * (depth - len(parts)))  # of unequal depths: a node is its own rack
            around = tuple(numbers.setdefault(path[:level], len(numbers)) for level in range(1, depth))
            node = numbers.setdefault(path, len(numbers))
            nodes[rank], wider[node] = node, around
            hosts_there = inside.setdefault(node, [])
            if hosts[rank] not in hosts_there:
                hosts_there.append(hosts[rank])
        return cls(nodes, wider, {node: "+".join(names) for node, names in inside.items()})
