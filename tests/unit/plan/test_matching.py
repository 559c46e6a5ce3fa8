"""The matching has the greatest total weight there is, with one taker a seat."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.plan.search.matching import best_matching, matching_in_order


@st.composite
def tables(draw: st.DrawFn) -> list[list[int]]:
    seats = draw(st.integers(0, 5))
    takers = draw(st.integers(seats, 6))
    row = st.lists(st.integers(-3, 9), min_size=takers, max_size=takers)
    return draw(st.lists(row, min_size=seats, max_size=seats))


@given(tables())
def test_no_other_matching_weighs_more(weights: list[list[int]]) -> None:
    found = best_matching(weights)
    assert len(set(found)) == len(found) == len(weights)
    takers = range(len(weights[0]) if weights else 0)
    best = max(sum(weights[seat][taker] for seat, taker in enumerate(p)) for p in permutations(takers, len(weights)))
    assert sum(weights[seat][taker] for seat, taker in enumerate(found)) == best


@st.composite
def kinds(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    of_seats, of_takers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 4).map(lambda weight: weight * 10**12), min_size=of_takers, max_size=of_takers)
    weights = draw(st.lists(row, min_size=of_seats, max_size=of_seats))
    takers = draw(st.lists(st.integers(0, of_takers - 1), max_size=6))
    seats = draw(st.lists(st.integers(0, of_seats - 1), max_size=len(takers)))
    return weights, seats, takers


@given(kinds())
def test_of_equal_matchings_the_nearest_to_the_order_is_found(
    drawn: tuple[list[list[int]], list[int], list[int]],
) -> None:
    weights, seats, takers = drawn

    def worth(found: tuple[int, ...]) -> tuple[int, int]:
        total = sum(weights[seats[seat]][takers[taker]] for seat, taker in enumerate(found))
        return total, -sum((seat - taker) ** 2 for seat, taker in enumerate(found))

    found = matching_in_order(weights, seats, takers)
    assert len(set(found)) == len(found) == len(seats)
    assert worth(found) == max(map(worth, permutations(range(len(takers)), len(seats))))


def test_fewer_takers_than_seats_are_refused() -> None:
    with pytest.raises(ValueError, match="2 seats for 1 takers"):
        best_matching([[1], [2]])
    with pytest.raises(ValueError, match="2 seats for 1 takers"):
        matching_in_order([[1]], [0, 0], [0])
