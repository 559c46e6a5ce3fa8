"""Replicas of experts by their load, after Lazarus (Wu et al., arXiv 2407.04656, section 4).

An expert has as many replicas as its share of the tokens, on as many ranks, and at least ``least``. Experts are taken
from the coldest to the hottest, each with its share of the slots that are left for it and the hotter ones, rounded
down; so a remainder goes to the hot ones.

Placement has maximum rank overlap: experts with about as many replicas, as many as a rank has slots, are together on
ranks of their own. Then few different sets of ranks must not be lost together, which maximizes the probability that
every expert survives. The slots that are left take the replicas that hot experts still lack. Where the experts do not
fill whole ranks and the rest of them would have too few ranks, replicas go to ranks in turn.

The engine's state survives losses by mirrors, wherever experts are. So :func:`homes_of` asks for two replicas of each
expert where there is room for them, and a lost rank's experts are computed where they are already
(:meth:`Assignment.crewed`); without the room it asks for one.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.elastic.plan.expert_homes import Homes, Load
from megatron.elastic.plan.expert_replicas import Room
from megatron.elastic.plan.search.matching import best_matching

__all__ = ["allocation", "homes_of", "replicas"]


def replicas(load: Sequence[int], ranks: int, slots: int, least: int = 1) -> tuple[int, ...]:
    """Return the number of replicas of each expert, on different ranks.

    ``load``: tokens by expert; ``slots``: experts of a rank. Raises ``ValueError`` if there are too few slots for
    ``least`` replicas of each.
    """
    if least > ranks or least * len(load) > ranks * slots:
        raise ValueError(f"{ranks} ranks of {slots} slots have no room for {least} replicas of {len(load)} experts")
    found, left, tokens = [0] * len(load), ranks * slots, sum(load)
    order = sorted(range(len(load)), key=lambda expert: (load[expert], expert))
    for at, expert in enumerate(order):
        share = left * load[expert] // tokens if tokens else left // (len(order) - at)
        found[expert] = min(max(share, least), ranks)
        left, tokens = left - found[expert], tokens - load[expert]
    return tuple(found)


def allocation(load: Sequence[int], ranks: int, slots: int, least: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the experts of each rank. Raises ``ValueError`` as :func:`replicas` does.

    An expert may have fewer replicas than :func:`replicas` where no further rank has a slot for it, never fewer than
    ``least``.
    """
    wanted = replicas(load, ranks, slots, least)
    order = sorted(range(len(load)), key=lambda expert: (wanted[expert], load[expert], expert))
    groups = [order[first : first + slots] for first in range(0, len(order) - slots + 1, slots)]
    homes = [list(group) for group in groups for _ in range(wanted[group[0]])]
    rest = order[len(groups) * slots :]
    if rest and ranks - len(homes) < least:
        return _in_turn(order, wanted, ranks)
    homes += [[] for _ in range(ranks - len(homes))]
    placed = {expert: wanted[group[0]] for group in groups for expert in group}
    for expert in reversed(order):
        free = sorted((mine for mine in homes if len(mine) < slots and expert not in mine), key=len)
        for mine in free[: wanted[expert] - placed.get(expert, 0)]:
            mine.append(expert)
    return tuple(tuple(sorted(mine)) for mine in homes)


def homes_of(load: Load, present: Homes, room: Room) -> Homes:
    """Return the homes that the paper gives the places of ``present``, for the sum of the load over layers.

    Of the places each takes the set with most experts that it has already, as far as all of them together can. A place
    with fewer experts than ``room`` says takes further replicas of the hottest ones.
    """
    tokens = [sum(of) for of in zip(*load, strict=True)]
    order, places = sorted(range(len(tokens)), key=lambda expert: (-tokens[expert], expert)), sorted(present)
    least = min(2, len(places) * room.most // len(tokens), len(places))
    found = allocation(tokens, len(places), room.most, least)
    full = [_filled(mine, order, room.least) for mine in found]
    taken = best_matching([[len(set(present[place]).intersection(mine)) for mine in full] for place in places])
    return {place: full[at] for place, at in zip(places, taken, strict=True)}


def _filled(mine: Sequence[int], order: Sequence[int], least: int) -> tuple[int, ...]:
    others = [expert for expert in order if expert not in mine]
    return tuple(sorted((*mine, *others[: max(0, least - len(mine))])))


def _in_turn(order: Sequence[int], wanted: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the experts of each rank, replica by replica to the next rank: it fits whenever the numbers do."""
    every = [expert for expert in order for _ in range(wanted[expert])]
    return tuple(tuple(sorted(every[rank::ranks])) for rank in range(ranks))
