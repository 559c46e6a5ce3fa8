"""Matching of seats to takers with the greatest total weight (the assignment problem).

Each seat gets one taker; takers may be left over. The method is the Hungarian one (Kuhn 1955, Munkres 1957) with
potentials, one shortest augmenting path a seat: O(seats² · takers), native (``csrc/plan/matching.cpp``). Weights are
integers, so the result is exact and the same in every process.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.elastic import _plan

__all__ = ["best_matching", "matching_in_order"]


def best_matching(weights: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the taker of each seat, such that the sum of ``weights[seat][taker]`` is greatest.

    Raises ``ValueError`` if there are fewer takers than seats.
    """
    return _matched(weights, range(len(weights)), range(len(weights[0]) if weights else 0), False)


def matching_in_order(weights: Sequence[Sequence[int]], seats: Sequence[int], takers: Sequence[int]) -> tuple[int, ...]:
    """Return the same for seats and takers of few kinds; ``weights``: by the kind of a seat, then by that of a taker.

    Of all such matchings it is the one with the smallest sum of the squares of (seat - taker): the nearest to the
    order. Raises ``ValueError`` if there are fewer takers than seats.
    """
    return _matched(weights, seats, takers, True)


def _matched(
    weights: Sequence[Sequence[int]], seats: Sequence[int], takers: Sequence[int], in_order: bool
) -> tuple[int, ...]:
    if len(takers) < len(seats):
        raise ValueError(f"{len(seats)} seats for {len(takers)} takers")
    return tuple(_plan.matching(weights, seats, takers, in_order))
