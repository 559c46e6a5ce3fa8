"""Cells of TP x CP ranks: Megatron's order, and cells that go on with fewer parts of the sequence."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.cell_sizes import CellSizes
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.shape import CellCut
from megatron.elastic.plan.model import Grid

UNITS = 4


def launch(tensor: int, context: int, pipeline: int, data: int, extra: int = 0) -> LaunchTopology:
    cuts = tuple(pairwise([UNITS * stage // pipeline for stage in range(pipeline + 1)]))
    return LaunchTopology(tensor, pipeline, data, cuts, Grid(8 * data, 1, data), extra=extra, context=context)


def sizes_of(topology: LaunchTopology) -> CellSizes:
    """A cell of n parts is as fast as n."""
    tensor = topology.tensor
    return CellSizes.of(
        lambda count, parts: -(-1_000_000 // (count * parts)) if count == tensor else None,
        CellCut(tensor, topology.context),
    )


LAUNCHES = st.builds(launch, st.integers(1, 3), st.integers(2, 3), st.integers(1, 2), st.integers(1, 3))


@given(LAUNCHES)
def test_ranks_are_numbered_tensor_context_data_pipeline(topology: LaunchTopology) -> None:
    at, rank = Assignment.at_launch(topology), 0
    for stage in range(topology.pipeline):
        for replica in range(topology.data):
            for part in range(topology.context):
                for position in range(topology.tensor):
                    place = at.place(rank)
                    assert place is not None and topology.place(rank) == (position, replica, stage)
                    assert (place.position.index, place.position.count) == (position, topology.tensor)
                    assert (place.part.index, place.part.count) == (part, topology.context)
                    assert rank in place.tensor_ranks and rank in place.context_ranks
                    assert len(set(place.tensor_ranks) & set(place.context_ranks)) == 1
                    rank += 1
    assert rank == topology.slots


@given(LAUNCHES)
def test_every_part_holds_the_same_state(topology: LaunchTopology) -> None:
    for (_, shard), ranks in Assignment.at_launch(topology).state_groups().items():
        every = topology.tensor if shard == topology.common else 1
        assert len(ranks) == topology.data * topology.context * every


@given(LAUNCHES, st.data())
def test_cells_are_formed_of_whole_tensor_groups(topology: LaunchTopology, data: st.DataObject) -> None:
    living = data.draw(st.sets(st.integers(0, topology.slots - 1), min_size=1))
    sizes, start = sizes_of(topology), Assignment.at_launch(topology)
    formed = sizes.living_on(start, living)
    for number, ranks in formed.formed:
        assert set(ranks) <= living and len(ranks) % topology.tensor == 0
        assert [rank % topology.tensor for rank in ranks] == [i % topology.tensor for i in range(len(ranks))]
        own = [rank for rank in start.cells[number].ranks if rank in living]
        teams = min(sum(rank % topology.tensor == place for rank in own) for place in range(topology.tensor))
        assert not ranks or len(ranks) >= teams * topology.tensor, "no rank of its own is left out that it could use"
    parked = formed.topology(living).parked
    if formed.broken(living):
        assert any(
            not [rank for rank in parked if rank % topology.tensor == place] for place in range(topology.tensor)
        ), "parked ranks could compute a part"
    assert sizes.living_on(formed, range(topology.slots)) == start


@pytest.mark.parametrize(
    ("lost", "ranks"),
    [
        ({0}, (2, 3)),
        ({2}, (0, 1)),
        ({0, 3}, (2, 1)),
    ],
    ids=["the first part is gone", "the second part is gone", "two broken groups make a whole one"],
)
def test_a_cell_of_two_parts_of_two_ranks(lost: set[int], ranks: tuple[int, ...]) -> None:
    topology = launch(2, 2, 1, 1)
    assert dict(sizes_of(topology).living_on(Assignment.at_launch(topology), set(range(4)) - lost).formed) == {0: ranks}


def test_a_broken_group_waits_where_no_other_is_left() -> None:
    topology = launch(2, 2, 1, 2)
    formed = sizes_of(topology).living_on(Assignment.at_launch(topology), {0, 2, 4, 5, 6, 7})
    assert formed.formed == () and formed.broken({0, 2, 4, 5, 6, 7}) == (0,)
