"""The ranks that write parts of a checkpoint of which no rank of the launch is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.mcore.checkpoint.absent_parts import duties
from megatron.elastic.plan.model import Grid

DENSE = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2))
"""(tensor-parallel size, parts of the sequence)."""
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


def topologies() -> st.SearchStrategy[LaunchTopology]:
    """Launches with and without experts that ranks share, and with spares."""

    def launch(sizes: tuple[int, ...], pipeline: int, groups: int, spare_cells: int) -> LaunchTopology:
        tensor, context, *experts = sizes
        stages = tuple((2 * stage, 2 * stage + 2) for stage in range(pipeline))
        homes, parts = experts or (1, 1)
        data = groups * max(1, homes * parts // (tensor * context))
        extra = spare_cells * tensor * context
        found = LaunchTopology(tensor, pipeline, data, stages, Grid(data, 1, data), context=context, extra=extra)
        return replace(found, experts=8, expert_homes=homes, expert_parts=parts) if experts else found

    return st.builds(
        launch, st.sampled_from((*DENSE, *SHARED)), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)
    )


Parts = dict[str, list[tuple[int, ...]]]


def written(launch: LaunchTopology, ranks: Sequence[int]) -> Parts:
    """(Stage, shard), and (stage, space of state) of the experts, that these ranks have at launch."""
    launched = Assignment.at_launch(launch)
    found: Parts = {"rest": [], "experts": []}
    for rank in ranks:
        place, at = launch.place(rank), launched.place(rank)
        assert place is not None and at is not None
        found["rest"].append((place[2], place[0]))
        if launch.experts:
            assert at.crew is not None
            spaces = (launch.expert_shard(expert, at.index) for expert in at.crew.experts_of(rank))
            found["experts"] += [(place[2], space) for space in spaces]
    return found


@given(topologies(), st.data())
def test_every_part_has_one_writer_among_the_living(launch: LaunchTopology, draw: st.DataObject) -> None:
    """A part: a shard of a stage, or, where ranks share experts, a part of an expert."""
    everything = launch.slots + launch.extra
    living = sorted(draw.draw(st.sets(st.integers(0, everything - 1), min_size=1), label="living"))
    own = [rank for rank in living if rank < launch.slots]
    if not own:
        with pytest.raises(OSError, match="no rank of the launch is left"):
            duties(launch, living)
        return
    found = duties(launch, living)
    assert set(found) <= set(own), "ranks beyond the launch write nothing"
    given = [duty for others in found.values() for duty in others]
    assert not {duty.rank for duty in given} & set(living)
    present, whole = written(launch, own), written(launch, range(launch.slots))
    more = {
        "rest": written(launch, [duty.rank for duty in given if duty.rest])["rest"],
        "experts": written(launch, [duty.rank for duty in given if duty.experts])["experts"],
    }
    for kind, parts in more.items():
        assert len(parts) == len(set(parts)) and not set(parts) & set(present[kind]), kind
        assert set(parts) | set(present[kind]) == set(whole[kind]), kind


@given(topologies(), st.data())
def test_duties_are_spread_over_ranks_of_whole_cells(launch: LaunchTopology, draw: st.DataObject) -> None:
    living = sorted(draw.draw(st.sets(st.integers(0, launch.slots - 1), min_size=1), label="living"))
    found = duties(launch, living)
    whole = [rank for rank in living if set(launch.cell_of(rank).ranks) <= set(living)]
    counts = [len(found.get(rank, ())) for rank in whole or living]
    assert sum(counts) == sum(map(len, found.values()))
    assert max(counts) - min(counts) <= 1


def test_experts_alone_are_written_for_where_another_rank_has_the_shard() -> None:
    launch = LaunchTopology(1, 1, 2, ((0, 4),), Grid(2, 1, 2), experts=4, expert_homes=2)
    (duty,) = duties(launch, [0])[0]
    experts, rest = "decoder.layers.mlp.experts.experts.linear_fc1.weight", "decoder.layers.mlp.router.weight"
    assert duty.rank == 1
    assert [duty.has(key) for key in (experts, f"optimizer.state.exp_avg.{experts}", rest)] == [True, True, False]
