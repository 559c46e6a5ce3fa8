"""Homes of experts: even at the launch, on the survivors of each crew after losses, even again when all are back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.model_interface import Crew
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.plan.model import Grid

EXPERTS = 12


def launched(size: int, groups: int, stages: int, tensor: int = 1, parts: int = 1) -> Assignment:
    """``size`` adjacent replicas share experts, each a part on ``parts`` ranks of a cell."""
    cuts = tuple((2 * stage, 2 * stage + 2) for stage in range(stages))
    data = size * groups
    return Assignment.at_launch(
        LaunchTopology(
            tensor, stages, data, cuts, Grid(data, 1, data), experts=EXPERTS, crew_size=size, expert_parts=parts
        )
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


@given(
    size=st.sampled_from((1, 2, 3)),
    groups=st.integers(1, 2),
    stages=st.integers(1, 2),
    cut=st.booleans(),
    draw=st.data(),
)
def test_tensor_parallel_groups_have_each_expert_cut_or_whole(
    size: int, groups: int, stages: int, cut: bool, draw: st.DataObject
) -> None:
    """A group that has lost a rank leaves its experts to the others, and its other rank has none."""
    tensor, parts = 2, 2 if cut else 1
    before = launched(size, groups, stages, tensor, parts)
    living = draw.draw(st.sets(st.sampled_from(range(tensor * size * groups * stages)), min_size=1))
    after = before.crewed(living)
    computing = {rank for cell in after.whole(living) for rank in after.cells[cell].ranks}
    for rank in computing:
        crew = crew_of(after, rank)
        assert set(crew.ranks) <= computing
        found = Counter(expert for mine in crew.experts for expert in mine)
        assert found == Counter(dict.fromkeys(range(EXPERTS), parts))
        counts = [len(mine) for mine in crew.experts]
        assert max(counts) - min(counts) <= 1
        assert set(crew_of(before, rank).experts_of(rank)) <= set(crew.experts_of(rank)), "an expert stays where it is"
    spaces = [after.launch_topology.expert_shard(expert, at) for expert in range(EXPERTS) for at in range(parts)]
    assert spaces == list(range(3, 3 + parts * EXPERTS)), "behind both shards and the common part"


def test_an_expert_has_a_group_of_its_homes() -> None:
    before = launched(2, 2, 1)
    launch, covered = before.launch_topology, lambda unit, position: (0,)
    groups = before.crewed({0, 2, 3}).state_groups(covered)
    assert groups[1, launch.expert_shard(0)] == (0, 2)
    assert groups[1, launch.expert_shard(11)] == (0, 1, 3), "a missing rank counts where it was"
    assert groups[1, 0] == (0, 1, 2, 3)
