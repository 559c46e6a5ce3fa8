"""Replicas of hot experts: an expert with more tokens than others has homes on several ranks, which share its tokens.

Idea: no single home helps an expert that has more tokens than a mean rank. From the present homes two changes are
tried for the rank with most tokens: a further home of one of its hottest experts on another rank, and a home that moves
to a rank with room. A rank without room drops a replica then, or one of its experts moves on. Where no such change
helps, experts are swapped (:mod:`expert_homes`). As there, a change must take off part of the sum of the squares of all
ranks' tokens. A replica without which the busiest rank has hardly more to do is dropped, since each one takes memory
and part of the exchange of gradients.

Invariants: every expert keeps a home, and no rank has fewer or more experts than its :class:`Room` says. The result is
a function of integers: equal on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from megatron.elastic.plan.expert_homes import PARTS, WORTH, Homes, Load, busiest, evened, excess, gains

__all__ = ["Room", "dealt", "replicated", "slots", "worth"]

_IDLE = 100
"""A replica is idle if the busiest place has at most 1/:data:`_IDLE` more tokens without it. Far below what a new one
must gain (:func:`gains`), so that none comes and goes."""

_HOTTEST = 4
"""Number of experts of a place for which further homes are looked for, the hottest ones: the search stays short."""

_Change = Mapping[int, frozenset[int]]
"""Expert → its homes after a change."""


@dataclass(frozen=True)
class Room:
    """The number of experts that a place may have, at least and at most."""

    least: int
    most: int


def slots(homes: Homes) -> int:
    """Return the number of experts of all places together, each replica counted."""
    return sum(map(len, homes.values()))


def replicated(load: Load, homes: Homes, room: Room) -> Homes:
    """Return homes of more even loads, with replicas of hot experts; ``homes`` has each expert at least once.

    No place of ``homes`` has more experts than ``room``.
    """
    found, above = homes, excess(load, homes)
    while True:
        change = _Search(load, found, room, above).best()
        further = evened(load, found, above) if change is None else _changed(found, change)
        if further == found:
            return _without_idle(load, found, room)
        found = further


def worth(after: float, before: float, fewer: bool) -> bool:
    """Return whether it is worth moving experts to bring :func:`busiest`, or a multiple of it, down to ``after``.

    ``fewer``: there are fewer replicas then, which is worth a little more to do.
    """
    return gains(after, before) or (fewer and after * _IDLE <= before * (_IDLE + 1))


def dealt(homes: Homes, lost: Collection[int], room: int) -> Homes:
    """Return ``homes`` with a home for each of the ``lost`` experts, at the places with fewest.

    ``room``: experts of all places together. Replicas are dropped for more, at the places with most.
    """
    mine = {place: list(homes[place]) for place in sorted(homes)}
    while sum(map(len, mine.values())) + len(lost) > room:
        count = Counter(expert for of in mine.values() for expert in of)
        spare = [(len(of), place, expert) for place, of in mine.items() for expert in of if count[expert] > 1]
        _, place, expert = max(spare)
        mine[place].remove(expert)
    for expert in sorted(lost):
        mine[min(mine, key=lambda place: (len(mine[place]), place))].append(expert)
    return {place: tuple(sorted(of)) for place, of in mine.items()}


def _without_idle(load: Load, homes: Homes, room: Room) -> Homes:
    """Return ``homes`` without idle replicas (:data:`_IDLE`), those of the coldest experts first."""
    limit, found = busiest(load, homes) * (_IDLE + 1), dict(homes)
    tokens = {expert: sum(layer[expert] for layer in load) for mine in homes.values() for expert in mine}
    for expert in sorted(tokens, key=lambda expert: (tokens[expert], expert)):
        for place in sorted(homes, reverse=True):
            mine, count = found[place], sum(expert in of for of in found.values())
            if expert not in mine or count == 1 or len(mine) <= room.least:
                continue
            fewer = {**found, place: tuple(other for other in mine if other != expert)}
            if busiest(load, fewer) * _IDLE <= limit:
                found = fewer
    return found


def _changed(homes: Homes, change: _Change) -> Homes:
    return {
        place: tuple(
            sorted({expert for expert in mine if expert not in change} | {e for e, at in change.items() if place in at})
        )
        for place, mine in homes.items()
    }


class _Search:
    """Homes, and the tokens of each place by layer in 1/:data:`PARTS` of a token."""

    def __init__(self, load: Load, homes: Homes, room: Room, above: int) -> None:
        self._load, self._homes, self._room, self._above = load, homes, room, above
        experts = sorted({expert for mine in homes.values() for expert in mine})
        self._at = {expert: frozenset(place for place, mine in homes.items() if expert in mine) for expert in experts}
        self._tokens = {
            place: [sum(self._share(expert, at, len(self._at[expert])) for expert in mine) for at in range(len(load))]
            for place, mine in homes.items()
        }
        self._fair = sum(map(sum, load)) * PARTS // max(1, len(experts))
        """Tokens of a mean expert in all layers: what one of a rank's experts should have."""

    def _share(self, expert: int, layer: int, count: int) -> int:
        """Return the tokens of each of ``count`` homes."""
        return self._load[layer][expert] * PARTS // count

    def best(self) -> _Change | None:
        """Return the best change of the busiest place that has one worth it; None if no place has."""
        squares = {place: sum(mine * mine for mine in tokens) for place, tokens in self._tokens.items()}
        for place in sorted(self._homes, key=lambda place: (-squares[place], place)):
            gain, change = min(
                ((self._gain(change), change) for change in self._changes(place)),
                key=lambda found: found[0],
                default=(0, None),
            )
            if gain < 0 and -gain * len(self._homes) * WORTH >= self._above:
                return change
        return None

    def _changes(self, place: int) -> Iterator[_Change]:
        mine, room = self._homes[place], self._room
        for expert in mine:
            at = self._at[expert]
            for other in sorted(self._homes.keys() - at):
                if len(self._homes[other]) < room.most and len(mine) > room.least:
                    yield {expert: at - {place} | {other}}
        for expert in self._hot(place):
            at = self._at[expert]
            for other in sorted(self._homes.keys() - at):
                if len(self._homes[other]) < room.most:
                    yield {expert: at | {other}}
                else:
                    yield from ({expert: at | {other}, **less} for less in self._without_one(other))

    def _without_one(self, place: int) -> Iterator[_Change]:
        """Yield the changes after which a full place has an expert less: a replica, or one that moves on."""
        for expert in self._homes[place]:
            at = self._at[expert]
            if len(at) > 1:
                yield {expert: at - {place}}
            free = [other for other in sorted(self._homes.keys() - at) if len(self._homes[other]) < self._room.most]
            if free:
                yield {expert: at - {place} | {min(free, key=lambda other: (sum(self._tokens[other]), other))}}

    def _hot(self, place: int) -> list[int]:
        """Return the hottest experts of a place, of those with more tokens in a home than a mean expert."""
        tokens = {
            expert: sum(self._share(expert, layer, len(self._at[expert])) for layer in range(len(self._load)))
            for expert in self._homes[place]
        }
        hot = sorted((expert for expert in tokens if tokens[expert] > self._fair), key=lambda e: (-tokens[e], e))
        return hot[:_HOTTEST]

    def _gain(self, change: _Change) -> int:
        """Return the change of the sum of squares: below zero is better."""
        places = sorted({place for expert, after in change.items() for place in self._at[expert] | after})
        found = 0
        for layer in range(len(self._load)):
            more = dict.fromkeys(places, 0)
            for expert, after in change.items():
                before = self._at[expert]
                for place in before:
                    more[place] -= self._share(expert, layer, len(before))
                for place in after:
                    more[place] += self._share(expert, layer, len(after))
            for place, by in more.items():
                found += by * (2 * self._tokens[place][layer] + by)
        return found
