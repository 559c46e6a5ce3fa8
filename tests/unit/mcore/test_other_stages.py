"""The rank that writes for a stage of which no rank is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
