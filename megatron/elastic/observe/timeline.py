"""Timeline of one process: phases and computations, collected between two lines of the event log.

Off unless asked for (``--elastic-trace``): a step of many micro-batches is many
spans. Collecting one is an append; the log line is written once a step. Times
are this process's monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.elastic.observe.phases import IDLE, Moment

__all__ = ["Timeline", "Work"]

Work = tuple[str, int, int, int, int, int]
"""A computation: (op, piece, first unit, end unit, start ns, end ns)."""

Phase = tuple[str, int, int]
"""(name, start ns, end ns)."""


@dataclass
class Timeline:
    """Spans since the last :meth:`take`. ``enabled`` False: nothing is kept."""

    enabled: bool = False
    _work: list[Work] = field(default_factory=list)
    _phases: list[Phase] = field(default_factory=list)
    _present: Moment | None = None

    def computed(self, op: str, piece: int, first: int, end: int, start_ns: int, end_ns: int) -> None:
        """A computation ran."""
        if self.enabled:
            self._work.append((op, piece, first, end, start_ns, end_ns))

    def moved(self, moment: Moment) -> None:
        """The process is in another phase now (``PhaseTimer``'s ``on_change``)."""
        left, self._present = self._present, moment
        if self.enabled and left is not None and left.phase != IDLE and moment.since_ns > left.since_ns:
            self._phases.append((left.phase, left.since_ns, moment.since_ns))

    def take(self) -> tuple[tuple[Phase, ...], tuple[Work, ...]]:
        """Return the collected entries and clear them."""
        phases, work = tuple(self._phases), tuple(self._work)
        self._phases.clear()
        self._work.clear()
        return phases, work
