"""How long blocks had fewer mirrors than they should have after a loss, as one rank that was there saw it.

The time begins when the loss is noticed. It ends with the first vote that names k mirrors of every block among
the living, or as many as there are ranks for: from then on any k ranks may be lost. A further loss before that
lengthens it. A rank that is let in meanwhile does not know when it began, and says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

__all__ = ["Exposure", "Protected"]


@dataclass(frozen=True)
class Protected:
    """Every block has its mirrors again."""

    seconds: float
    """Since the loss was noticed."""
    steps: int
    """Committed since, the one whose vote names the last copy included."""
    blocks: int
    """The most that were short of a mirror at one time."""
    speaks: bool
    """Whether this is the lowest rank that was there all the time."""


@dataclass(frozen=True)
class _Open:
    since: float
    version: int
    blocks: int
    witnesses: frozenset[int]


class Exposure:
    """The time under way, if any. Belongs to the training thread; ``clock`` gives monotonic seconds."""

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._clock = clock
        self._open: _Open | None = None

    @property
    def open(self) -> bool:
        """Whether some block was short of a mirror when last asked."""
        return self._open is not None

    def settled(
        self, short: int, living: Collection[int], version: int, since: float, newcomers: Collection[int] = ()
    ) -> Protected | None:
        """Work goes on after ``version`` with ``short`` blocks short of a mirror; what to tell if it is over.

        ``since``: when the loss behind it was noticed; ``newcomers``: those of the ``living`` that were not there then.
        """
        known, here = self._open, frozenset(living) - frozenset(newcomers)
        if known is not None:
            self._open = replace(known, blocks=max(known.blocks, short), witnesses=known.witnesses & here)
        elif short:
            self._open = _Open(since, version, short, here)
        return self.voted(short, version)

    def voted(self, short: int, version: int) -> Protected | None:
        """The vote of ``version`` leaves ``short`` blocks short of a mirror; what to tell if it is over."""
        known = self._open
        if known is None or short:
            return None
        self._open = None
        speaks = self._rank == min(known.witnesses, default=-1)
        return Protected(self._clock() - known.since, version - known.version, known.blocks, speaks)
