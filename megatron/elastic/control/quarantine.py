"""Nodes that lose their ranks again and again are left out for a while, and longer each time.

Each loss costs every other rank a recovery, each return another one. A node whose memory,
link or cooling is at fault would take that toll for ever; left out, it costs its share of
the work only. Faults of the program or of the cluster strike nodes alike, so a node is
compared with the others: its losses of the last hour beyond those of the median of the others.

*Left out* means that its lost ranks are not started again. Those that live go on. After
the time is over they are started, and the node is on parole: the next loss beyond the
others' leaves it out for twice as long, until an hour has passed without one.

A node whose hardware checks have a finding (``--elastic-health``) is left out as well,
until the finding is gone.

Pure: times are those of the events (seconds of the job), so that every
agent finds the same from the same journal, and any of them can take over.

Invariants (tests/unit/control/test_quarantine.py)
- A node that has lost no more than the median of the others is never put out.
- No node is out while the job has no member: it would wait for ranks that it does not start.
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median_high

import msgspec

__all__ = ["NodeRecord", "Quarantine"]

_HOUR = 3600.0
_TOGETHER = 1.0
"""Losses of one node within these seconds are one: a board or a power supply takes several ranks along."""


class NodeRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The losses of a node and its quarantines."""

    losses: list[float] = []
    """Times of its losses of the last hour; several at once count as one."""
    level: int = 0
    """Quarantines since it last passed an hour without a loss."""
    until: float = 0.0
    """The time at which the newest quarantine is (or was to be) over."""
    out: bool = False
    finding: str = ""
    """The finding of its hardware checks; it is left out while there is one."""

    def recent(self, now: float) -> list[float]:
        """Its losses of the last hour."""
        return [at for at in self.losses if now - at < _HOUR]


class Quarantine(msgspec.Struct, forbid_unknown_fields=True):
    """See the module docstring. ``after``: losses beyond the others' (0: never); ``seconds``: of the first time."""

    after: int = 0
    seconds: float = 60.0
    nodes: dict[int, NodeRecord] = {}

    def lost(self, node: int, others: Collection[int], now: float) -> bool:
        """Note that members on ``node`` were lost at ``now``; True when it is put out for it."""
        record = self.nodes.setdefault(node, NodeRecord())
        if record.out or (record.losses and now - record.losses[-1] < _TOGETHER):
            return False
        if now - max([record.until, *record.losses[-1:]]) >= _HOUR:
            record.level = 0
        record.losses = [*record.recent(now), now]
        needed = 1 if record.level else self.after
        counts = [len(self.nodes.get(other, NodeRecord()).recent(now)) for other in others]
        usual = median_high(counts) if counts else None
        if self.after == 0 or usual is None or len(record.losses) - usual < needed:
            return False
        record.level += 1
        record.until = now + min(_HOUR, self.seconds * 2.0 ** (record.level - 1))
        record.out = True
        return True

    def examined(self, node: int, finding: str) -> None:
        """Note what the hardware checks of ``node`` have found; empty: nothing any more."""
        self.nodes.setdefault(node, NodeRecord()).finding = finding

    def out(self) -> frozenset[int]:
        """Nodes whose lost ranks are not started again for now."""
        return frozenset(node for node, record in self.nodes.items() if record.out or record.finding)

    def due(self, now: float) -> tuple[int, ...]:
        """Nodes whose time is over."""
        return tuple(sorted(node for node, record in self.nodes.items() if record.out and now >= record.until))

    def lift(self, node: int, level: int | None = None, found: bool = True) -> None:
        """``node`` is out no longer; with ``level``, only if it is out for the ``level``-th time.

        ``found``: a finding of its hardware checks keeps it out no longer either.
        """
        record = self.nodes.get(node)
        if record is not None and level in (None, record.level):
            record.out = False
            if found:
                record.finding = ""
