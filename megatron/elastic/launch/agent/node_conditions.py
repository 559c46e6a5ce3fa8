"""The conditions of an agent's node besides its workers: notices that it will be taken away (``--elastic-notices``).

Nothing is asked, and no thread started, where no setting asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.events import Event
from megatron.elastic.control.generations import Generations
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.notices import NodeDrain, NoticeThread, source_of

__all__ = ["NodeConditions"]


class NodeConditions:
    """Of node ``node`` of the state. ``append``: to the journal."""

    def __init__(
        self, settings: ElasticConfig, node: int, state: Generations, loop: Loop, append: Callable[[Event], None]
    ) -> None:
        self._settings, self._loop = settings, loop
        there = state.nodes[node]
        self._drain = NodeDrain(f"node {node} ({there.host})", there.ranks, state, append)
        self._notices: NoticeThread | None = None

    def start(self) -> None:
        """Begin to ask."""
        if self._settings.notices is not None:
            self._notices = NoticeThread(source_of(self._settings.notices), self._loop, self._drain.heard)

    def follow(self) -> None:
        """After each entry of the journal."""
        self._drain.follow()

    def close(self) -> None:
        """Ask no longer."""
        if self._notices is not None:
            self._notices.close()
