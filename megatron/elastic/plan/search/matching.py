"""Matching of seats to takers with the greatest total weight (the assignment problem).

Each seat gets one taker; takers may be left over. The method is the Hungarian one (Kuhn 1955, Munkres 1957) with
potentials, one shortest augmenting path a seat: O(seats² · takers). Weights are integers, so the result is exact and
the same in every process.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["best_matching"]


def best_matching(weights: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the taker of each seat, such that the sum of ``weights[seat][taker]`` is greatest.

    Raises ``ValueError`` if there are fewer takers than seats.
    """
    seats, takers = len(weights), len(weights[0]) if weights else 0
    if takers < seats:
        raise ValueError(f"{seats} seats for {takers} takers")
    of_seat, of_taker = [0] * (seats + 1), [0] * (takers + 1)
    """Potentials: their sum is at most the cost of each pair, and equal to it for matched pairs."""
    seat_of = [0] * (takers + 1)
    """Taker, counted from 1, → its seat, counted from 1; 0: none. Entry 0 is the seat that looks for a taker."""
    for seat in range(1, seats + 1):
        seat_of[0] = seat
        _augment(weights, of_seat, of_taker, seat_of)
    found = [0] * seats
    for taker, seat in enumerate(seat_of[1:]):
        if seat:
            found[seat - 1] = taker
    return tuple(found)


def _augment(weights: Sequence[Sequence[int]], of_seat: list[int], of_taker: list[int], seat_of: list[int]) -> None:
    """Match the seat ``seat_of[0]`` along the shortest augmenting path; adjusts potentials and pairs in place."""
    takers = len(of_taker) - 1
    slack: list[int | None] = [None] * (takers + 1)
    before = [0] * (takers + 1)
    done = [False] * (takers + 1)
    at = 0
    while seat_of[at]:
        done[at] = True
        seat, least, nearest = seat_of[at], None, 0
        row, potential = weights[seat - 1], of_seat[seat]
        for taker in range(1, takers + 1):
            if done[taker]:
                continue
            reduced = -row[taker - 1] - potential - of_taker[taker]
            known = slack[taker]
            if known is None or reduced < known:
                slack[taker] = known = reduced
                before[taker] = at
            if least is None or known < least:
                least, nearest = known, taker
        assert least is not None, "there are as many takers as seats"
        for taker in range(takers + 1):
            if done[taker]:
                of_seat[seat_of[taker]] += least
                of_taker[taker] -= least
            elif (known := slack[taker]) is not None:
                slack[taker] = known - least
        at = nearest
    while at:
        seat_of[at] = seat_of[before[at]]
        at = before[at]
