"""The rank that writes for a stage of which no rank is left, and experts that no rank is left to write."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.mcore.checkpoint.absent_stages import duties
from megatron.elastic.plan.model import Grid


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.data())
def test_every_stage_of_the_launch_has_a_writer_for_each_cut(
    tensor: int, pipeline: int, data: int, spare_cells: int, draw: st.DataObject
) -> None:
    stages = tuple((2 * stage, 2 * stage + 2) for stage in range(pipeline))
    nominal = LaunchTopology(tensor, pipeline, data, stages, Grid(data, 1, data), extra=spare_cells * tensor)
    living = sorted(draw.draw(st.sets(st.integers(0, nominal.slots + nominal.extra - 1))))
    launched = {rank: place for rank in living if (place := nominal.place(rank)) is not None}
    if {place[0] for place in launched.values()} != set(range(tensor)):
        with pytest.raises(OSError, match="tensor-parallel rank"):
            duties(nominal, living)
        return
    found = duties(nominal, living)
    own = {(place[0], place[2]) for place in launched.values()}
    more = [(nominal.shard(rank), stage) for rank, others in found.items() for stage in others]
    assert set(found) <= set(launched), "ranks beyond the launch write nothing"
    assert len(more) == len(set(more)) and not own & set(more)
    assert own | set(more) == {(shard, stage) for shard in range(tensor) for stage in range(pipeline)}


SHARED = (
    (1, 1, 2, 1),
    (2, 1, 2, 1),
    (2, 1, 2, 2),
    (2, 1, 4, 1),
    (4, 1, 2, 2),
    (4, 1, 2, 1),
    (1, 2, 2, 1),
    (2, 2, 2, 2),
)
"""(tensor-parallel size, parts of the sequence, sets of experts, ranks with a part of each)."""


@given(st.sampled_from(SHARED), st.integers(1, 2), st.integers(1, 2), st.data())
def test_experts_are_written_as_long_as_a_rank_of_the_launch_has_each_part(
    sizes: tuple[int, int, int, int], pipeline: int, groups: int, draw: st.DataObject
) -> None:
    tensor, context, homes, parts = sizes
    stages = tuple((2 * stage, 2 * stage + 2) for stage in range(pipeline))
    data = groups * max(1, homes * parts // (tensor * context))
    launch = LaunchTopology(tensor, pipeline, data, stages, Grid(data, 1, data), context=context)
    launch = replace(launch, experts=8, expert_homes=homes, expert_parts=parts)
    launched = Assignment.at_launch(launch)

    def held(ranks: range | list[int]) -> set[tuple[int, int]]:
        """(Stage, space of state) of the experts of these ranks."""
        found = set()
        for rank in ranks:
            at, place = launched.place(rank), launch.place(rank)
            assert at is not None and at.crew is not None and place is not None
            found |= {(place[2], launch.expert_shard(expert, at.index)) for expert in at.crew.experts_of(rank)}
        return found

    living = sorted(draw.draw(st.sets(st.integers(0, launch.slots - 1), min_size=1)))
    if held(living) != held(range(launch.slots)):
        with pytest.raises(OSError, match="all ranks are missing that write experts"):
            duties(launch, living)
        return
    try:
        duties(launch, living)
    except OSError as error:  # a cell that has all experts several times lacks a rank
        assert "experts" not in str(error)
