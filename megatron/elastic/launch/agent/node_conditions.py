"""The conditions of an agent's node besides its workers.

Notices say that the node will be taken away (``--elastic-notices``); hardware checks say that it is not fit
(``--elastic-health``). Nothing is asked, and no thread started, where no setting asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.elastic.config import ElasticConfig, health_settings
from megatron.elastic.control.events import Event, Examined, Readmitted
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.health import Check, HealthThread, checks_of, examine
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.notices import NodeDrain, NoticeThread, source_of
from megatron.elastic.launch.arguments import BadCommand

__all__ = ["NodeConditions", "finding_at_start", "refuse_unfit"]


def finding_at_start(settings: ElasticConfig) -> str:
    """Return what the hardware checks find on this node now; empty: nothing. Raises ``ConfigError``."""
    return examine(_checks(settings))


def refuse_unfit(settings: ElasticConfig) -> None:
    """Raise :class:`BadCommand` if the hardware checks find something on this node now, or ``ConfigError``."""
    unfit = finding_at_start(settings)
    if unfit:
        raise BadCommand(f"this node is not fit (--elastic-health): {unfit}; mend it, or leave that check out")


def _checks(settings: ElasticConfig) -> tuple[Check, ...]:
    return () if settings.health is None else checks_of(health_settings(settings.health))


class NodeConditions:
    """Of node ``node`` of the state. ``append``: to the journal."""

    def __init__(
        self,
        settings: ElasticConfig,
        timing: Timing,
        node: int,
        state: Generations,
        loop: Loop,
        append: Callable[[Event], None],
    ) -> None:
        self._settings, self._timing, self._node = settings, timing, node
        self._state, self._loop, self._append = state, loop, append
        there = state.nodes[node]
        self._ranks, name = there.ranks, f"node {node} ({there.host})"
        self._notice_drain = NodeDrain(name, there.ranks, state, append)
        self._health_drain = NodeDrain(name, there.ranks, state, append, whole_job=False)
        self._sent_away: tuple[int, ...] = ()
        """Ranks that were asked to leave because of a finding; started again without it."""
        self._notices: NoticeThread | None = None
        self._health: HealthThread | None = None

    def start(self) -> None:
        """Begin to ask."""
        if self._settings.notices is not None:
            self._notices = NoticeThread(source_of(self._settings.notices), self._loop, self._notice_drain.heard)
        checks = _checks(self._settings)
        if checks:
            self._health = HealthThread(checks, self._loop, self._examined, self._timing.examine)

    def follow(self) -> None:
        """After each entry of the journal."""
        self._notice_drain.follow()
        self._health_drain.follow()

    def close(self) -> None:
        """Ask no longer."""
        for thread in (self._notices, self._health):
            if thread is not None:
                thread.close()

    def _examined(self, finding: str) -> None:
        state = self._state
        self._append(Examined(self._node, finding))
        if not finding:
            if self._sent_away:
                self._append(Readmitted(self._sent_away))
            self._sent_away = ()
            return
        if any(state.ranks[rank].standing == "member" for rank in self._ranks):
            # A spare that was not enlisted would become a further replica if it were admitted by its number.
            self._sent_away = tuple(rank for rank in self._ranks if rank < state.nominal or rank in state.enlisted)
            self._health_drain.heard(finding)
