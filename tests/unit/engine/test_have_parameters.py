"""Members that let a newcomer in have their parameters exactly if each was a holder of all that it holds now."""

from __future__ import annotations

import pytest

from megatron.elastic.engine.generation.view import have_parameters
from megatron.elastic.state.placement import UnitGroup


def groups(**holders: tuple[int, ...]) -> list[UnitGroup]:
    """``u2s1=(0, 1)``: ranks 0 and 1 hold unit 2, shard 1."""
    return [UnitGroup(int(name[1]), int(name[3]), (), ranks) for name, ranks in holders.items()]


@pytest.mark.parametrize(
    ("before", "now", "newcomers", "have"),
    [
        (groups(u0s0=(0,)), groups(u0s0=(0, 1)), {1}, True),
        (groups(u0s0=(0, 1, 2)), groups(u0s0=(0, 3)), {3}, True),
        (groups(u0s0=(0,), u1s0=(2,)), groups(u0s0=(0, 1), u1s0=(2, 3)), {1, 3}, True),
        (groups(u0s0=(0,)), groups(u0s0=(0, 1), u1s0=(1,)), {1}, False),
        (groups(u0s0=(0,), u1s0=(3,)), groups(u0s0=(0,), u1s0=(1,)), {1}, False),
        (groups(u0s0=(0,), u1s0=(2,)), groups(u0s0=(0, 1), u1s0=(0, 2)), {1}, False),
        (groups(u0s0=(0, 1)), groups(u0s0=(0, 1), u0s1=(0, 1)), {1}, False),
    ],
    ids=[
        "one came back",
        "one came for two",
        "one to each stage",
        "a unit of the newcomer alone",
        "a unit whose holders are all lost",
        "a member gained a unit",
        "a member gained a shard",
    ],
)
def test_only_newcomers_lack_parameters(
    before: list[UnitGroup], now: list[UnitGroup], newcomers: set[int], have: bool
) -> None:
    assert have_parameters(before, now, newcomers) == have
