"""The matching has the greatest total weight there is, with one taker a seat."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.plan.search.matching import best_matching


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


def test_fewer_takers_than_seats_are_refused() -> None:
    with pytest.raises(ValueError, match="2 seats for 1 takers"):
        best_matching([[1], [2]])
