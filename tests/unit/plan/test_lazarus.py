"""Replicas by load: every expert somewhere, hot ones on more ranks, no rank with more than its slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.plan.expert_replicas import Room
from megatron.elastic.plan.lazarus import allocation, homes_of, replicas

Case = tuple[list[int], int, int, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Loads, ranks, slots of a rank, and the least number of replicas, for which there is room."""
    load = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=16))
    ranks = draw(st.integers(1, 8))
    least = draw(st.integers(1, min(2, ranks)))
    slots = draw(st.integers(-(-least * len(load) // ranks), len(load) + 2))
    return load, ranks, slots, least


@given(cases())
def test_replicas_are_monotone_in_the_load_and_fit(case: Case) -> None:
    load, ranks, slots, least = case
    found = replicas(load, ranks, slots, least)
    assert all(least <= count <= ranks for count in found) and sum(found) <= ranks * slots
    by_load = sorted(zip(load, found, strict=True))
    assert all(fewer <= more for (_, fewer), (_, more) in pairwise(by_load))


@given(cases())
def test_every_expert_is_on_enough_different_ranks_and_none_has_too_many(case: Case) -> None:
    load, ranks, slots, least = case
    homes = allocation(load, ranks, slots, least)
    wanted = replicas(load, ranks, slots, least)
    assert len(homes) == ranks
    assert all(len(set(mine)) == len(mine) <= slots for mine in homes)
    for expert in range(len(load)):
        assert least <= sum(expert in mine for mine in homes) <= wanted[expert]
    assert homes == allocation(tuple(load), ranks, slots, least), "a function of its arguments"


@given(cases())
def test_fewer_losses_than_replicas_lose_no_expert(case: Case) -> None:
    load, ranks, slots, least = case
    homes = allocation(load, ranks, slots, least)
    for lost in combinations(range(ranks), least - 1):
        assert survives(homes, lost)


def survives(homes: Sequence[Sequence[int]], lost: Sequence[int]) -> bool:
    kept = {expert for rank, mine in enumerate(homes) if rank not in lost for expert in mine}
    return kept == {expert for mine in homes for expert in mine}


def test_a_share_of_the_tokens_is_a_share_of_the_slots() -> None:
    assert replicas((10, 10, 20, 40), ranks=4, slots=2) == (1, 1, 2, 4)
    assert replicas((0, 0, 0, 90), ranks=4, slots=2) == (1, 1, 1, 4), "a rank has an expert once"
    assert replicas((0, 0, 0), ranks=3, slots=2) == (2, 2, 2)


def test_overlap_survives_more_losses_than_experts_spread_in_turn() -> None:
    """Four experts with two replicas each on four ranks of two slots: two pairs of losses are fatal, not four."""
    homes = allocation((10, 10, 10, 10), ranks=4, slots=2)
    in_turn = ((0, 1), (1, 2), (2, 3), (3, 0))
    fatal = [sum(not survives(each, lost) for lost in combinations(range(4), 2)) for each in (homes, in_turn)]
    assert fatal == [2, 4]


@given(cases())
def test_the_replicas_of_an_expert_follow_the_formula(case: Case) -> None:
    """``r_e = max(floor(t_e / sum of t from e on * slots left), f)``, from the coldest expert to the hottest."""
    load, ranks, slots, least = case
    found = replicas(load, ranks, slots, least)
    order = sorted(range(len(load)), key=lambda expert: (load[expert], expert))
    for at, expert in enumerate(order):
        hotter, left = sum(load[one] for one in order[at:]), ranks * slots - sum(found[one] for one in order[:at])
        if hotter:
            assert found[expert] == min(ranks, max(load[expert] * left // hotter, least))


@given(cases(), st.data())
def test_places_have_every_expert_and_keep_what_they_can(case: Case, draw: st.DataObject) -> None:
    load, ranks, slots, _ = case
    seats = draw.draw(st.lists(st.integers(0, ranks - 1), min_size=len(load), max_size=len(load)))
    present = {10 + rank: tuple(e for e in range(len(load)) if seats[e] == rank) for rank in range(ranks)}
    room = Room(min(len(load) // ranks, slots), slots)
    found = homes_of([load], present, room)
    assert found.keys() == present.keys() and {e for mine in found.values() for e in mine} == set(range(len(load)))
    assert all(room.least <= len(set(mine)) == len(mine) <= room.most for mine in found.values())
    assert homes_of([load], found, room) == found, "experts that are where they should be stay there"


def test_too_few_slots_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 ranks of 1 slots have no room for 1 replicas of 3 experts"):
        replicas((1, 1, 1), ranks=2, slots=1)
