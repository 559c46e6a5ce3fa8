"""Counts cut into fp64 limbs: their sums are exact, so one contributor of a million that differs is noticed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.comm.limbs import limbs_of, of_limbs

COUNTS = st.integers(0, (1 << 75) - 1)


@given(st.lists(COUNTS, min_size=1, max_size=64), st.integers(0, 1 << 19))
def test_sums_of_limbs_in_fp64_are_the_sum(counts: list[int], others: int) -> None:
    """``others`` more contribute the first count: the sum of theirs is exact as well."""
    low, middle, high = (
        sum(map(float, each), others * float(each[0])) for each in zip(*map(limbs_of, counts), strict=True)
    )
    assert of_limbs(low, middle, high) == sum(counts) + others * counts[0]
