"""Homes of experts: even at the launch, on the survivors of each crew after losses, even again when all are back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.model_interface import Crew
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.plan.model import Grid

EXPERTS = 6


def launched(size: int, groups: int, stages: int) -> Assignment:
    cuts = tuple((2 * stage, 2 * stage + 2) for stage in range(stages))
    data = size * groups
    return Assignment.at_launch(
        LaunchTopology(1, stages, data, cuts, Grid(data, 1, data), experts=EXPERTS, crew_size=size)
    )


def crew_of(assignment: Assignment, rank: int) -> Crew:
    """The crew of a rank that has one."""
    place = assignment.place(rank)
    assert place is not None and place.crew is not None
    return place.crew


@given(size=st.sampled_from((2, 3)), groups=st.integers(1, 3), stages=st.integers(1, 2), draw=st.data())
def test_each_crew_has_each_expert_once_and_survivors_keep_theirs(
    size: int, groups: int, stages: int, draw: st.DataObject
) -> None:
    before = launched(size, groups, stages)
    ranks = range(size * groups * stages)
    living = draw.draw(st.sets(st.sampled_from(ranks), min_size=1))
    after = before.crewed(living)
    for rank in living:
        crew = crew_of(after, rank)
        assert set(crew.ranks) <= living
        assert sorted(expert for mine in crew.experts for expert in mine) == list(range(EXPERTS))
        counts = [len(mine) for mine in crew.experts]
        assert max(counts) - min(counts) <= 1
        kept = crew_of(before, rank).experts_of(rank)
        assert set(kept) <= set(crew.experts_of(rank)), "an expert stays where it is"
    assert after.crewed(ranks) == before, "homes are even when all ranks are back"
    assert (after.digest() == before.digest()) == (after == before)


def test_an_expert_has_a_group_of_its_homes() -> None:
    before = launched(2, 2, 1)
    launch, covered = before.launch_topology, lambda unit, position: (0,)
    groups = before.crewed({0, 2, 3}).state_groups(covered)
    assert groups[1, launch.expert_shard(0)] == (0, 2)
    assert groups[1, launch.expert_shard(5)] == (0, 3)
    assert groups[1, 0] == (0, 1, 2, 3)
