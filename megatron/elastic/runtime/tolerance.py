"""The report of the losses that the job survives now: a log line, an event, and a text for agents (``ctl status``).

The lowest living rank makes it whenever it changes. The rank checks after every committed step, recovery and
migration, and computes the report only if the placement or the failure domains have changed since the last check.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.elastic.control.observations import Protection
from megatron.elastic.engine.generation.view import View
from megatron.elastic.observe.event_kinds import ToleranceEvent
from megatron.elastic.observe.events import EventLog
from megatron.elastic.observe.summary import ranks_text
from megatron.elastic.state.domains import FailureDomains
from megatron.elastic.state.placement import Placement
from megatron.elastic.state.tolerance import Level, Tolerance, tolerance

__all__ = ["Tolerances", "line"]


class Tolerances:
    """Reports the losses that the job survives.

    ``announce``: sends the text to the agents; ``store``: whether the first agent serves the store.
    """

    def __init__(
        self, rank: int, mirrors: int, log: EventLog, announce: Callable[[str, Protection], None], store: bool
    ) -> None:
        self._rank, self._mirrors = rank, mirrors
        self._log, self._announce, self._store = log, announce, store
        self._seen: tuple[Placement, FailureDomains] | None = None
        self._reported = ""

    def look(self, view: View, step: int) -> None:
        """Report if ``view``, in force after ``step``, changes the report."""
        present = view.placement, view.domains
        if view.living[0] != self._rank or self._is_seen(*present):
            return
        self._seen = present
        found = tolerance(*present, self._mirrors)
        text = line(found, present[1], self._store)
        if text != self._reported:
            self._reported = text
            print(text, flush=True)
            ranks, nodes = found.levels[:2]
            self._announce(text, Protection(ranks.any, nodes.any, found.short, found.blocks))
            self._log.write(_event(found, view, step, text))

    def _is_seen(self, placement: Placement, domains: FailureDomains) -> bool:
        return self._seen is not None and self._seen[0] is placement and self._seen[1] is domains


def line(found: Tolerance, domains: FailureDomains, store: bool) -> str:
    """Return the log line. ``store``: the loss of the first node ends the job in any case."""
    ranks, nodes, *wider = found.levels
    kinds = [(ranks, "rank"), (nodes, "node"), *((level, _around_nodes(up)) for up, level in enumerate(wider, 1))]
    able = [f"any {level.any} {kind}{'s' * (level.any > 1)}" for level, kind in kinds if level.any]
    text = f"state now survives the loss of {' or of '.join(able)}; not of " if able else "state now is lost with "
    text += _fatal(*(kinds[1] if nodes.count > 1 else kinds[0]), domains)
    if nodes.count == 1 < ranks.count:
        text += "; all ranks are on one node"
    if found.short:
        text += f"; {found.short} of {found.blocks} blocks lack copies for now"
    return text + ("; the loss of node 0 ends the job: its launcher serves the store" if store else "")


def _around_nodes(level: int) -> str:
    return "rack" if level == 1 else f"domain {level} levels above nodes"


def _fatal(level: Level, kind: str, domains: FailureDomains) -> str:
    """Return a text like ``nodes a and b (8 of 28 pairs)``."""
    first = level.fatal[0]
    if kind == "node":
        names = [domains.names[node] for node in first]
        text = f"node{'s' * (len(names) > 1)} {' and '.join(names)}"
    else:
        text = f"rank{'s' * (len(first) > 1)} {ranks_text(first)}"
    unit = {1: f"{kind}s", 2: "pairs"}.get(len(first), f"sets of {len(first)}")
    return f"{text}{' together' * (len(first) > 1)} ({len(level.fatal)} of {level.possible} {unit})"


def _event(found: Tolerance, view: View, step: int, text: str) -> ToleranceEvent:
    ranks, nodes, *wider = found.levels
    return ToleranceEvent(
        step=step,
        ranks=ranks.any,
        nodes=nodes.any,
        racks=tuple(level.any for level in wider),
        fatal_nodes=tuple(tuple(view.domains.names[node] for node in one) for one in nodes.fatal),
        short=found.short,
        text=text,
        placement=view.configuration.digest,
        homes=view.placement.homes,
    )
