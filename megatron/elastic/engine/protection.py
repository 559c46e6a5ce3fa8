"""How long blocks had fewer mirrors than they should have after a loss, as one rank that was there saw it.

The time begins when the loss is noticed. It ends with the first vote that names k mirrors of every block among
the living, or as many as there are ranks for: from then on any k ranks may be lost. A further loss before that
lengthens it. A rank that is let in meanwhile does not know when it began, and says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from megatron.elastic.engine.standing import Standing

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
    """``short``: the number of blocks short of mirrors in a standing. Belongs to the training thread."""

    def __init__(self, rank: int, short: Callable[[Standing], int]) -> None:
        self._rank = rank
        self._short = short
        self._open: _Open | None = None

    def settled(self, standing: Standing, version: int, since: float, newcomers: Collection[int]) -> Protected | None:
        """Copies were lost, noticed at ``since`` (monotonic seconds), and work goes on after ``version``."""
        short, here = self._short(standing), frozenset(standing.living) - frozenset(newcomers)
        if self._open is None and short:
            self._open = _Open(since, version, short, here)
        elif self._open is not None:
            known = self._open
            self._open = replace(known, blocks=max(known.blocks, short), witnesses=known.witnesses & here)
        return self.voted(standing, version)

    def voted(self, standing: Standing, version: int) -> Protected | None:
        """A vote has named the copies of ``standing``; what to tell if all are there again."""
        known = self._open
        if known is None or self._short(standing):
            return None
        self._open = None
        speaks = self._rank == min(known.witnesses, default=-1)
        return Protected(time.monotonic() - known.since, version - known.version, known.blocks, speaks)
