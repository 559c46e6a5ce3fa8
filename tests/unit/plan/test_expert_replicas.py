"""Replicas of hot experts: the busiest rank has less to do, no expert is lost, and no rank has more than its room."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.plan.expert_homes import PARTS, busiest, evened, excess, gains, shares
from megatron.elastic.plan.expert_replicas import Room, dealt, replicated, slots, worth

Homes = Mapping[int, tuple[int, ...]]
Case = tuple[list[list[int]], Homes, Room]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Loads of a few layers, adjacent homes, some replicas, and room for a few more."""
    ranks, each, more = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = ranks * each
    layer = st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)
    load = draw(st.lists(layer, min_size=1, max_size=3))
    homes = {rank: set(range(rank * each, (rank + 1) * each)) for rank in range(ranks)}
    for rank, expert in draw(st.lists(st.tuples(st.integers(0, ranks - 1), st.integers(0, experts - 1)), max_size=4)):
        if len(homes[rank]) < each + more:
            homes[rank].add(expert)
    return load, {rank: tuple(sorted(mine)) for rank, mine in homes.items()}, Room(each, each + more)


def moves(load: list[list[int]], before: Homes, after: Homes) -> bool:
    return worth(busiest(load, after), busiest(load, before), slots(after) < slots(before))


@given(cases())
def test_every_expert_has_a_home_and_every_rank_the_room_for_its_experts(case: Case) -> None:
    load, homes, room = case
    found = replicated(load, homes, room)
    assert found.keys() == homes.keys()
    assert {expert for mine in found.values() for expert in mine} == set(range(len(load[0])))
    assert all(room.least <= len(set(mine)) == len(mine) <= room.most for mine in found.values())


@given(cases())
def test_what_is_worth_moving_is_a_gain_or_needs_fewer_replicas(case: Case) -> None:
    """After a move there is no reason for another one under the same load, so no expert comes and goes."""
    load, homes, room = case
    found = replicated(load, homes, room)
    if moves(load, homes, found):
        less = gains(busiest(load, found), busiest(load, homes))
        assert less or (slots(found) < slots(homes) and busiest(load, found) <= 1.01 * busiest(load, homes) + 1)
    seen, now = [homes], homes
    while moves(load, now, after := replicated(load, now, room)):
        assert after not in seen and len(seen) < 20
        seen.append(after)
        now = after


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_are_named_decides_nothing(case: Case, draw: st.DataObject) -> None:
    load, homes, room = case
    shuffled = list(homes.items())
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    assert replicated(load, dict(shuffled), room) == replicated(load, homes, room)


@given(cases())
def test_the_homes_of_an_expert_share_its_tokens(case: Case) -> None:
    load, homes, _ = case
    of = shares(load, homes)
    for expert, parts in of.items():
        count = sum(expert in mine for mine in homes.values())
        assert all(0 <= layer[expert] * PARTS - count * part < count for layer, part in zip(load, parts, strict=True))
    most = sum(max(sum(of[e][at] for e in mine) for mine in homes.values()) for at in range(len(load)))
    assert busiest(load, homes) == ceil(most / PARTS)


@st.composite
def hot_cases(draw: st.DrawFn) -> tuple[list[int], Homes, Room]:
    """One expert has more tokens than a mean rank, so no single home of it evens the load."""
    ranks, each = draw(st.integers(2, 6)), draw(st.integers(2, 4))
    load = [draw(st.integers(50, 60)) for _ in range(ranks * each)]
    load[draw(st.integers(0, len(load) - 1))] = 2 * sum(load)
    homes = {rank: tuple(range(rank * each, (rank + 1) * each)) for rank in range(ranks)}
    return load, homes, Room(each, each + 1)


@given(hot_cases())
def test_an_expert_hotter_than_a_rank_has_replicas_on_all_and_the_load_is_nearly_even(
    case: tuple[list[int], Homes, Room],
) -> None:
    load, homes, room = case
    mean, alone = sum(load) / len(homes), busiest([load], evened([load], homes))
    found = replicated([load], homes, room)
    assert sum(load.index(max(load)) in mine for mine in found.values()) == len(homes)
    assert busiest([load], found) <= 1.1 * mean < 1.3 * mean <= alone
    assert moves([load], homes, found)


def test_cold_experts_have_no_replicas() -> None:
    """One expert is hot: the others have as many homes as before."""
    load, homes = [[400, 10, 10, 10, 10, 10, 10, 10]], {rank: (2 * rank, 2 * rank + 1) for rank in range(4)}
    found = replicated(load, homes, Room(2, 3))
    assert {expert for expert in range(8) if sum(expert in mine for mine in found.values()) > 1} == {0}


def test_a_replica_that_is_no_longer_needed_is_dropped() -> None:
    homes, room = {0: (0, 1), 1: (0, 2, 3)}, Room(2, 3)
    even = [[100, 100, 100, 100]]
    found = replicated(even, homes, room)
    assert slots(found) == 4 and moves(even, homes, found)
    assert replicated(even, found, room) == found


def test_a_hot_expert_takes_the_place_of_another_replica() -> None:
    """Rank 1 is full: it has a replica of the expert that was hot before."""
    homes, room = {0: (0, 1), 1: (0, 2, 3)}, Room(2, 3)
    load = [[10, 900, 10, 10]]
    found = replicated(load, homes, room)
    assert 1 in found[0] and 1 in found[1] and moves(load, homes, found)


def test_even_loads_move_nothing() -> None:
    homes, room = {0: (0, 1), 1: (2, 3)}, Room(2, 3)
    for load in ([[10, 10, 10, 10]], [[0, 0, 0, 0]]):
        assert replicated(load, homes, room) == homes and not moves(load, homes, homes)
    assert excess([[10, 10, 10, 10]], homes) == 0


@given(cases(), st.data())
def test_lost_experts_are_dealt_and_replicas_make_room(case: Case, draw: st.DataObject) -> None:
    """Some places are gone. No expert is lost, those that have a home keep one, and none has much more than others."""
    _, homes, room = case
    gone = draw.draw(st.sets(st.sampled_from(sorted(homes)), max_size=len(homes) - 1))
    left = {place: mine for place, mine in homes.items() if place not in gone}
    experts = {expert for mine in homes.values() for expert in mine}
    kept = {expert for mine in left.values() for expert in mine}
    more = room.most - room.least
    found = dealt(left, experts - kept, len(experts) + more * len(left))
    assert {expert for mine in found.values() for expert in mine} == experts and found.keys() == left.keys()
    assert all(len(set(mine)) == len(mine) <= ceil(len(experts) / len(left)) + more for mine in found.values())
    for place, mine in left.items():
        assert all(expert in found[place] or any(expert in of for of in found.values()) for expert in mine)
