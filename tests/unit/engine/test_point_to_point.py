"""Messages between cells: their tags."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.point_to_point import _tag

STEPS, EDGES = st.integers(0, 10**9), st.integers(0, (1 << 26) - 2)


@given(STEPS, EDGES, st.booleans())
def test_no_tag_is_the_one_that_a_vendor_library_matches_by_order(step: int, edge: int, backward: bool) -> None:
    assert 0 < _tag(step, edge, backward) < 1 << 31


@given(STEPS, EDGES, EDGES, st.booleans(), st.booleans())
def test_messages_of_a_step_and_of_the_next_have_different_tags(
    step: int, edge: int, other: int, backward: bool, back: bool
) -> None:
    assert (_tag(step, edge, backward) == _tag(step, other, back)) is ((edge, backward) == (other, back))
    assert _tag(step, edge, backward) != _tag(step + 1, other, back)
