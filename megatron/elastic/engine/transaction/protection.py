"""The time after a loss during which blocks have too few mirrors, measured by one rank.

It begins when the loss is noticed. It ends with the first vote that names k mirrors of every block on living
ranks, or as many as there are ranks for: from then on any k ranks may be lost. A further loss before that
lengthens it. A rank admitted meanwhile does not know when it began and does not report it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

__all__ = ["Exposure", "Protected"]


@dataclass(frozen=True)
class Protected:
    """Every block has its mirrors again."""

    seconds: float
    """Seconds since the loss was noticed."""
    steps: int
    """Steps committed since then, including the one whose vote names the last copy."""
    blocks: int
    """Largest number of blocks that were short of a mirror at one time."""
    speaks: bool
    """True if this rank logs the event: the lowest rank that was a member all the time."""


@dataclass(frozen=True)
class _Open:
    since: float
    version: int
    blocks: int
    witnesses: frozenset[int]


class Exposure:
    """Measures the time with too few mirrors. For the training thread; ``clock`` returns monotonic seconds."""

    def __init__(self, rank: int, clock: Callable[[], float]) -> None:
        self._rank = rank
        self._clock = clock
        self._open: _Open | None = None

    @property
    def open(self) -> bool:
        """True if some block was short of a mirror at the last call."""
        return self._open is not None

    def settled(
        self, short: int, living: Collection[int], version: int, since: float, newcomers: Collection[int] = ()
    ) -> Protected | None:
        """Take in a recovery at ``version`` with ``short`` blocks short of a mirror. Returns the event if it is over.

        ``since``: time at which the loss was noticed; ``newcomers``: those of ``living`` that joined later.
        """
        known, here = self._open, frozenset(living) - frozenset(newcomers)
        if known is not None:
            self._open = replace(known, blocks=max(known.blocks, short), witnesses=known.witnesses & here)
        elif short:
            self._open = _Open(since, version, short, here)
        return self.voted(short, version)

    def voted(self, short: int, version: int) -> Protected | None:
        """Take in the vote of ``version``; ``short`` blocks still lack a mirror. Returns the event if it is over."""
        known = self._open
        if known is None or short:
            return None
        self._open = None
        speaks = self._rank == min(known.witnesses, default=-1)
        return Protected(self._clock() - known.since, version - known.version, known.blocks, speaks)
