"""Homes that follow the load: tokens of ranks are more even, and no rank has more experts than before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.plan.expert_homes import busiest, evened, gains

Homes = Mapping[int, tuple[int, ...]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], Homes]:
    """Loads of a few layers, and homes of any numbers of experts, also on ranks that have none."""
    experts, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    layers = draw(st.lists(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts), max_size=3))
    seats = draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts))
    return layers, {rank: tuple(e for e in range(experts) if seats[e] == rank) for rank in range(ranks)}


@given(cases())
def test_every_expert_keeps_one_home_and_every_rank_its_number(case: tuple[list[list[int]], Homes]) -> None:
    load, homes = case
    found = evened(load, homes)
    assert {rank: len(mine) for rank, mine in found.items()} == {rank: len(mine) for rank, mine in homes.items()}
    assert sorted(e for mine in found.values() for e in mine) == sorted(e for mine in homes.values() for e in mine)


@given(cases())
def test_tokens_are_more_even_or_nothing_moves(case: tuple[list[list[int]], Homes]) -> None:
    load, homes = case
    found = evened(load, homes)
    assert found == homes or squares(load, found) < squares(load, homes)


def squares(load: list[list[int]], homes: Homes) -> int:
    return sum(sum(layer[expert] for expert in mine) ** 2 for layer in load for mine in homes.values())


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_are_named_decides_nothing(case: tuple[list[list[int]], Homes], draw: Any) -> None:
    load, homes = case
    shuffled = list(homes.items())
    draw.shuffle(shuffled)
    assert evened(load, dict(shuffled)) == evened(load, homes)


def test_hot_experts_leave_each_others_rank() -> None:
    """In two layers with other hot experts: those of one layer are apart."""
    load = [[50, 40, 5, 5, 0, 0], [0, 0, 5, 5, 40, 50]]
    homes = evened(load, {0: (0, 1, 2), 1: (3, 4, 5)})
    assert busiest(load, {0: (0, 1, 2), 1: (3, 4, 5)}) == 95 + 95
    assert busiest(load, homes) <= 55 + 55
    assert {0, 1} & set(homes[0]) and {0, 1} & set(homes[1]) and {4, 5} & set(homes[0]) and {4, 5} & set(homes[1])


def test_even_loads_move_nothing() -> None:
    homes = {0: (0, 1), 1: (2, 3)}
    assert evened([[10, 10, 10, 10]], homes) == homes
    assert evened([[0, 0, 0, 0]], homes) == homes and evened([], homes) == homes


def test_a_small_gain_is_not_worth_moving() -> None:
    assert gains(950, 1000) and not gains(951, 1000) and not gains(0, 0)
