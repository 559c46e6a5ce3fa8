"""The launch topology: Megatron's rank order, whole cells compute, mates of the dead are parked."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.plan.model import Grid


def nominal(tensor: int, pipeline: int, data: int, tied: bool = False) -> LaunchTopology:
    layers = 2 * pipeline
    stages = tuple(
        (0 if stage == 0 else 2 * stage + 1, layers + 2 if stage == pipeline - 1 else 2 * stage + 3)
        for stage in range(pipeline)
    )
    return LaunchTopology(tensor, pipeline, data, stages, Grid(4 * data, 1, data), layers + 2 if tied else None)


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))


@given(SIZES, st.booleans())
def test_every_rank_has_one_place(sizes: tuple[int, int, int], replicas_last: bool) -> None:
    shape = replace(nominal(*sizes), replicas_last=replicas_last)
    places = [shape.place(rank) for rank in range(shape.slots)]
    assert [shape.rank(*place) for place in places if place] == list(range(shape.slots))
    assert len(set(places)) == shape.slots


@given(SIZES, st.booleans())
def test_every_unit_is_held_by_every_replica(sizes: tuple[int, int, int], tied: bool) -> None:
    shape = nominal(*sizes, tied)
    groups = Assignment.at_launch(shape).state_groups()
    units = shape.compute_units + tied
    assert set(groups) == {(unit, shard) for unit in range(units) for shard in shape.shards}
    assert (shape.common is None) == (shape.tensor == 1)
    for (unit, shard), members in groups.items():
        ends = 2 if tied and unit == shape.tied_unit and shape.pipeline > 1 else 1
        every = shape.tensor if shard == shape.common else 1
        assert len(members) == len(set(members)) == shape.data * ends * every
        assert {shape.shard(rank) for rank in members} == (set(range(shape.tensor)) if every > 1 else {shard})


@given(SIZES, st.data())
def test_a_cell_computes_only_when_it_is_whole(sizes: tuple[int, int, int], data: st.DataObject) -> None:
    shape = nominal(*sizes)
    living = data.draw(st.sets(st.integers(0, shape.slots - 1)))
    topology = Assignment.at_launch(shape).topology(living)
    computing = {rank for cell in topology.cells for rank in cell.ranks}
    assert computing <= living and computing | set(topology.parked) == living
    assert all(set(cell.ranks) <= living for cell in topology.cells)
    assert not any(set(shape.cell_of(rank).ranks) <= living for rank in topology.parked)


@given(SIZES, st.integers(1, 3), st.data())
def test_waiting_cells_take_lost_places_and_nothing_else_moves(
    sizes: tuple[int, int, int], spare: int, data: st.DataObject
) -> None:
    shape = replace(nominal(*sizes), extra=spare * sizes[0])
    everybody = range(shape.slots + shape.extra)
    assert sorted(rank for cell in shape.cells for rank in cell.ranks) == list(everybody)
    assert all(
        shape.cell_of(rank) in shape.cells and shape.cell_of(rank).ranks[shape.shard(rank)] == rank
        for rank in everybody
    )
    living = data.draw(st.sets(st.sampled_from(everybody)))
    before = Assignment.at_launch(shape)
    after = before.seated(living)
    lost, left = before.broken(living), after.broken(living)
    assert after.cut == before.cut
    assert len(lost) - len(left) == min(len(lost), len(before.waiting(living)))
    changed = {
        (old.cell, new.cell)
        for one, other in zip(before.replicas, after.replicas, strict=True)
        for old, new in zip(one.segments, other.segments, strict=True)
        if old != new
    }
    assert {old for old, _ in changed} <= set(lost)
    assert {new for _, new in changed} <= set(before.waiting(living)) and len(changed) == len(lost) - len(left)
    assert after.seated(living) == after


@given(SIZES, st.data())
def test_units_are_uncovered_where_every_cell_of_their_stage_lost_a_rank(
    sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    shape = nominal(*sizes)
    living = data.draw(st.sets(st.sampled_from(range(shape.slots))))
    gone = Assignment.at_launch(shape).uncovered(living)
    for stage, (first, end) in enumerate(shape.chunks):
        whole = any(set(shape.cell(replica, stage).ranks) <= living for replica in range(shape.data))
        assert {unit in gone for unit in range(first, end)} == {not whole}
