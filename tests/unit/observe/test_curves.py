"""A curve of the points that are written is the curve of all values, straight lines left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.observe.curves import LONGEST, Curves


def drawn(points: list[tuple[int, float]], step: int) -> float:
    """The height at ``step`` of straight lines through ``points``; after the last one, that of the last."""
    before = [point for point in points if point[0] <= step][-1]
    after = next((point for point in points if point[0] > step), before)
    if after is before:
        return before[1]
    return before[1] + (after[1] - before[1]) * (step - before[0]) / (after[0] - before[0])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=300))
def test_the_curve_passes_through_every_value(values: list[int]) -> None:
    curves, points = Curves(), list[tuple[int, float]]()
    for step, value in enumerate(values, 1):
        points += [(at, height) for _, height, at in curves.points({"a": value}, step)]
    assert [drawn(points, step) for step in range(1, len(values) + 1)] == values
    assert [step for step, _ in points] == sorted({step for step, _ in points})


def test_a_value_that_stays_is_written_seldom_and_a_changing_one_always() -> None:
    curves, steps = Curves(), 3 * LONGEST
    found = [point for step in range(steps) for point in curves.points({"a": 1.0, "b": float(step)}, step)]
    assert [step for name, _, step in found if name == "a"] == [0, LONGEST, 2 * LONGEST]
    assert [step for name, _, step in found if name == "b"] == list(range(steps))


def test_a_step_that_comes_again_is_written_again() -> None:
    curves = Curves()
    for step in (4, 5, 6):
        curves.points({"a": 1.0}, step)
    assert curves.points({"a": 1.0}, 4) == [("a", 1.0, 4)] and curves.points({"a": 2.0}, 4) == [("a", 2.0, 4)]
