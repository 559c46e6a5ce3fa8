"""Homes of experts by their load: which of the ranks that share the experts of some layers computes which.

Idea: these ranks exchange tokens in every layer, so each layer takes as long as the rank with most tokens needs. Homes
are the same in all layers of a stage, since a rank holds an expert of each. Two experts of different ranks change
places if that makes the sum of the squares of all ranks' tokens smaller, which falls as loads become even, in every
layer at once. The rank with the largest squares is looked at first. So few experts move, from homes that are
nearly even already.

An expert may have *replicas*: several homes, each of which receives the same number of its tokens
(:mod:`~megatron.elastic.plan.expert_replicas`).

Invariants of swaps: every expert keeps as many homes as before, and every rank as many experts, so it needs no more
memory. The result is a function of integers: equal on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = ["PARTS", "WORTH", "Homes", "Load", "busiest", "evened", "excess", "gains", "shares"]

Load = Sequence[Sequence[int]]
"""By layer and expert: tokens of a step."""

Homes = Mapping[int, tuple[int, ...]]
"""Rank, or any other place → its experts."""

PARTS = 5040
"""Tokens are counted in this fraction of one, so that up to ten replicas share them exactly."""
WORTH = 100
"""A swap must take off at least the unevenness divided by this, so that experts do not move for little."""
_GAIN = 20
"""All swaps together must take off at least the tokens of :func:`busiest` divided by this: a twentieth of the time."""


def shares(load: Load, homes: Homes) -> Mapping[int, tuple[int, ...]]:
    """Return expert → the tokens that each of its homes receives by layer, in 1/:data:`PARTS` of a token."""
    counts = Counter(expert for mine in homes.values() for expert in mine)
    return {expert: tuple(layer[expert] * PARTS // count for layer in load) for expert, count in counts.items()}


def busiest(load: Load, homes: Homes) -> int:
    """Return the tokens of the place with most in each layer, summed over layers: a step waits for them."""
    of = shares(load, homes)
    parts = sum(max(sum(of[expert][at] for expert in mine) for mine in homes.values()) for at in range(len(load)))
    return -(-parts // PARTS)


def excess(load: Load, homes: Homes) -> int:
    """Return the sum of the squares of all places' tokens above that of even loads, times the number of places."""
    of, found = shares(load, homes), 0
    for at in range(len(load)):
        tokens = [sum(of[expert][at] for expert in mine) for mine in homes.values()]
        found += len(tokens) * sum(mine * mine for mine in tokens) - sum(tokens) ** 2
    return found


def evened(load: Load, homes: Homes, above: int | None = None) -> Homes:
    """Return homes of more even loads, by swaps of two experts; ``homes`` if no swap is worth it.

    ``above``: the :func:`excess` of which a swap must take off 1/:data:`WORTH`; None: that of ``homes``.
    """
    search = _Swaps(load, homes, excess(load, homes) if above is None else above)
    while search.swap():
        pass
    return {place: tuple(sorted(mine)) for place, mine in search.homes.items()}


def gains(after: float, before: float) -> bool:
    """Return whether it is worth moving experts to bring :func:`busiest`, or a multiple of it, down to ``after``."""
    return after * _GAIN <= before * (_GAIN - 1) and after < before


class _Swaps:
    """Homes under way, and the tokens of each place by layer."""

    def __init__(self, load: Load, homes: Homes, above: int) -> None:
        self.homes = {place: list(homes[place]) for place in sorted(homes)}
        self._of = shares(load, homes)
        self._tokens = {
            place: [sum(self._of[expert][at] for expert in mine) for at in range(len(load))]
            for place, mine in self.homes.items()
        }
        self._excess = above

    def _squares(self, place: int) -> int:
        return sum(tokens * tokens for tokens in self._tokens[place])

    def swap(self) -> bool:
        """Make the best swap of the busiest place that has one worth it. Returns False if no place has."""
        order = sorted(self.homes, key=lambda place: (-self._squares(place), place))
        for at, place in enumerate(order):
            swaps = (
                (self._change(place, mine, other, theirs), mine, other, theirs)
                for mine in self.homes[place]
                for other in order[at + 1 :]
                for theirs in self.homes[other]
                if theirs not in self.homes[place] and mine not in self.homes[other]
            )
            change, mine, other, theirs = min(swaps, default=(0, 0, 0, 0))
            if change < 0 and -change * len(self.homes) * WORTH >= self._excess:
                self._swap(place, mine, other, theirs)
                return True
        return False

    def _change(self, place: int, mine: int, other: int, theirs: int) -> int:
        """Return the change of the sum of squares if ``place`` and ``other`` swap these two experts."""
        change = 0
        for here, there, mine_has, theirs_has in zip(
            self._tokens[place], self._tokens[other], self._of[mine], self._of[theirs], strict=True
        ):
            gain = theirs_has - mine_has
            change += 2 * gain * (here - there + gain)
        return change

    def _swap(self, place: int, mine: int, other: int, theirs: int) -> None:
        for at, gone, come in ((place, mine, theirs), (other, theirs, mine)):
            self.homes[at].remove(gone)
            self.homes[at].append(come)
            tokens = zip(self._tokens[at], self._of[gone], self._of[come], strict=True)
            self._tokens[at] = [before - less + more for before, less, more in tokens]
