"""Nodes and ranks as the journal has them: the parts of :class:`~generations.Generations`."""

from __future__ import annotations

from typing import Literal

import msgspec

from megatron.elastic.control.events import Entry

__all__ = ["Node", "RankState", "Standing"]

Standing = Literal["starting", "waiting", "member", "lost", "done"]


class Node(msgspec.Struct, forbid_unknown_fields=True):
    """One agent and the ranks it starts."""

    host: str
    ranks: tuple[int, ...]
    epoch: int = 0
    alive: bool = True
    agent: str = ""
    """Token of the agent that holds this place; what another one says for this node does not count."""


class RankState(msgspec.Struct, forbid_unknown_fields=True):
    """The state of one rank's present incarnation."""

    incarnation: int = 0
    standing: Standing = "starting"
    entry: Entry | None = None
    """Its report when it asked to become a member."""
    may_return: bool = True
    code: int | None = None
    announced: bool = True
