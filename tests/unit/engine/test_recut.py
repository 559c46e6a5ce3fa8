"""When units change place: damaged replicas are cut anew, everybody back means the launch's cut, all ranks agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.config import ElasticConfig
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.cell_sizes import CellSizes
from megatron.elastic.engine.generation.factory import ViewFactory
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.repartition import Recut, better_assignment, unmeasured_profile
from megatron.elastic.engine.generation.shape import CellCut
from megatron.elastic.plan.crews import crewed
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Grid, Profile
from megatron.elastic.plan.planner import instant_plan
from megatron.elastic.plan.policies.registry import choice_of, policy_named
from megatron.elastic.plan.search.steady import DecisionOptions
from megatron.elastic.state.layout import ParamSpec, UnitLayout

LAYERS, MEMORY = 8, 1 << 40


def nominal(tensor: int, pipeline: int, data: int, tied: bool = True) -> LaunchTopology:
    each = LAYERS // pipeline
    stages = tuple(
        (0 if stage == 0 else each * stage + 1, LAYERS + 2 if stage == pipeline - 1 else each * (stage + 1) + 1)
        for stage in range(pipeline)
    )
    return LaunchTopology(tensor, pipeline, data, stages, Grid(8 * data, 1, data), LAYERS + 2 if tied else None)


def layouts(shape: LaunchTopology) -> dict[tuple[int, int], UnitLayout]:
    def spec(name: str, *size: int) -> ParamSpec:
        numel = size[0] * (size[1] if len(size) > 1 else 1)
        return ParamSpec(name, numel, size, sharded=False, weight_decay_multiplier=1.0, group=0)

    table = {}
    for shard in range(shape.tensor):
        for unit in range(shape.compute_units + (shape.tied_unit is not None)):
            middle = (spec("weight", 64, 64), spec("bias", 64))
            specs = {0: (spec("position", 32, 64),), LAYERS + 1: (spec("norm", 64),)}.get(unit, middle)
            table[unit, shard] = UnitLayout.build(unit, shard, specs, 1 << 14)
    return table


def profile(shape, **more):  # type: ignore[no-untyped-def]
    return unmeasured_profile(
        shape,
        layouts(shape),
        sequence=32,
        boundary_bytes=4 * 32 * 64,
        itemsize=4,
        activation_bytes=lambda unit: 17 * 4 * 32 * 64,
        state_bytes=32,
        **more,
    )


def test_copies_of_weights_in_8_bits_take_memory_of_their_unit() -> None:
    shape = nominal(1, 2, 2)
    without, copied = profile(shape), profile(shape, quantized_bytes=lambda spec: 2 * spec.numel)
    more = [one.param_bytes - other.param_bytes for one, other in zip(copied.units, without.units, strict=True)]
    assert more == [2 * layouts(shape)[unit, 0].numel for unit in range(shape.compute_units)]


def test_a_gradients_bytes_are_memory_of_its_unit() -> None:
    shape = nominal(1, 2, 2)
    usual, exact = profile(shape), profile(shape, gradient_bytes=12)
    more = [one.param_bytes - other.param_bytes for one, other in zip(exact.units, usual.units, strict=True)]
    assert all(more) and all(extra % 8 == 0 for extra in more)
    assert more[1] == 8 * layouts(shape)[1, 0].numel


@pytest.mark.parametrize(("tensor", "pipeline", "data", "lost"), [(1, 2, 2, 3), (1, 4, 2, 5), (2, 2, 2, 6)])
def test_a_damaged_replica_is_cut_anew_by_itself_and_the_launchs_cut_returns(
    tensor: int, pipeline: int, data: int, lost: int
) -> None:
    shape = nominal(tensor, pipeline, data)
    start = Assignment.at_launch(shape)
    living = set(range(shape.slots)) - {lost}
    recut = better_assignment(start, living, profile(shape), MEMORY)
    assert recut is not None and recut.then_ns < recut.now_ns
    alive = {cell.id for cell in start.topology(living).cells}
    assert all({s.cell for s in r.segments} <= alive for r in recut.target.replicas), "only living cells get units"
    assert recut.target.units_of(lost) == ()
    for (unit, shard), ranks in recut.target.state_groups().items():
        of_cell = set(range(shape.tensor)) if shard == shape.common else {shard}
        assert {place[0] for rank in ranks if (place := shape.place(rank))} == of_cell
        assert ranks, f"unit {unit} has no holder"
    instant_plan(recut.target.topology(living), profile(shape))  # there is a plan for it
    assert better_assignment(recut.target, living, profile(shape), MEMORY) is None, "once is enough"
    back = better_assignment(recut.target, range(shape.slots), profile(shape), MEMORY)
    assert back is not None and back.target == start


def test_without_a_loss_nothing_moves() -> None:
    shape = nominal(1, 2, 2)
    assert better_assignment(Assignment.at_launch(shape), range(4), profile(shape), MEMORY) is None


def test_units_without_a_living_cell_are_taken_over() -> None:
    """One pipeline of four: the instant answer is none, the others take the units of the lost one."""
    shape = nominal(1, 4, 1)
    living = {0, 1, 3}
    with pytest.raises(PlanError):
        instant_plan(Assignment.at_launch(shape).topology(living), profile(shape))
    recut = better_assignment(Assignment.at_launch(shape), living, profile(shape), MEMORY)
    assert recut is not None and recut.now_ns == 0
    assert {unit for rank in living for unit in recut.target.units_of(rank)} == set(range(LAYERS + 3))


def test_the_head_of_tied_embeddings_costs_its_multiplication() -> None:
    shape = nominal(1, 2, 2, tied=True)
    costs = profile(shape).units
    assert costs[0].forward_ns * 10 < costs[1].forward_ns
    assert costs[LAYERS + 1].forward_ns == costs[1].forward_ns


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(1, 2, 2), (1, 4, 2), (2, 2, 2), (1, 2, 4), (1, 4, 1)]), st.data())
def test_any_losses_leave_every_unit_with_living_holders_of_whole_groups(
    sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    shape = nominal(*sizes)
    assignment, living = Assignment.at_launch(shape), set(range(shape.slots))
    for _ in range(3):
        living = data.draw(st.sets(st.integers(0, shape.slots - 1), min_size=1))
        try:
            recut = better_assignment(assignment, living, profile(shape), MEMORY)
        except PlanError:
            assert not assignment.topology(living).cells
            continue
        if recut is None:
            continue
        assignment = recut.target
        cells = {cell.id for cell in assignment.topology(living).cells}
        for replica in assignment.replicas:
            spans = [(s.first, s.end) for s in replica.segments if s.cell in cells]
            assert spans, "a replica of dead cells only"
        held = {unit for rank in living for unit in assignment.units_of(rank)}
        assert held >= set(range(shape.compute_units))


def test_memory_limits_who_takes_units_over() -> None:
    """With room for the whole model every cell becomes a replica of its own; with less, pipelines stay pipelines."""
    shape = nominal(1, 4, 2)
    start, living = Assignment.at_launch(shape), set(range(shape.slots)) - {3}
    costs = profile(shape)
    whole = sum(unit.param_bytes for unit in costs.units)
    for memory in (MEMORY, 4 * whole):
        recut = better_assignment(start, living, costs, memory)
        assert recut is not None
        longest = max(len(replica.segments) for replica in recut.target.replicas)
        assert (longest == 1) == (memory == MEMORY), recut.target.replicas


def test_a_slow_cell_is_given_fewer_units() -> None:
    shape = nominal(1, 4, 2)
    start, living = Assignment.at_launch(shape), set(range(shape.slots)) - {3}
    room = 6 * sum(unit.param_bytes for unit in profile(shape).units)
    even = better_assignment(start, living, profile(shape), room)
    uneven = better_assignment(start, living, profile(shape), room, {0: 400_000})
    assert even is not None and uneven is not None
    assert len(uneven.target.units_of(0)) < len(even.target.units_of(0))


def test_nothing_moves_that_would_not_pay_back_before_the_end_or_the_next_change() -> None:
    """Moving a layer takes a second, a step milliseconds: it pays only in a run that is long enough."""
    shape = nominal(1, 2, 2)
    start, living, costs = Assignment.at_launch(shape), {0, 1, 2}, profile(shape)
    heavy = tuple(replace(unit, param_bytes=costs.link_bytes_per_s) for unit in costs.units)

    def asked(**outlook: Any) -> Recut | None:
        found = replace(costs, units=heavy)
        return better_assignment(start, living, found, MEMORY, None, DecisionOptions(**outlook))

    assert asked(horizon_ns=10**18) is not None
    assert asked(horizon_ns=10**18, horizon_steps=10**12) is not None
    assert asked(horizon_ns=10**18, horizon_steps=5) is None, "the run ends before"
    assert asked(horizon_ns=10**6) is None, "the next change comes before"
    assert asked(horizon_ns=10**18, horizon_steps=0) is None


def test_a_stage_that_no_rank_holds_moves_however_little_is_left() -> None:
    shape = nominal(1, 4, 1)
    options = DecisionOptions(horizon_steps=1)
    assert better_assignment(Assignment.at_launch(shape), {0, 1, 3}, profile(shape), MEMORY, None, options) is not None


def routed(more: int) -> tuple[LaunchTopology, Profile]:
    """Four ranks with one of four experts of each layer, and room for ``more``; and its costs."""
    shape = replace(nominal(1, 1, 4, tied=False), experts=4, expert_homes=4, expert_replicas=more)
    spec = ParamSpec("experts.0", 64 * 64, (64, 64), sharded=True, weight_decay_multiplier=1.0, group=0, expert=0)
    table = layouts(shape)
    for unit in range(1, LAYERS + 1):
        for expert in range(4):
            one = replace(spec, name=f"experts.{expert}", expert=expert)
            shard = shape.expert_shard(expert)
            table[unit, shard] = UnitLayout.build(unit, shard, (one,), 1 << 14)
    return shape, unmeasured_profile(shape, table, 32, 4 * 32 * 64, 4, lambda unit: 17 * 4 * 32 * 64, 32)


def test_a_rank_needs_the_memory_of_the_replicas_that_it_may_have() -> None:
    """Of their parameters and gradients: the state of an expert is where it is without replicas."""
    (_, without), (_, two) = routed(0), routed(2)
    for unit, (before, after) in enumerate(zip(without.units, two.units, strict=True)):
        more = 2 * 64 * 64 * (4 + 4) if 0 < unit <= LAYERS else 0
        assert after.param_bytes - before.param_bytes == more
        assert replace(after, param_bytes=before.param_bytes) == before, "nothing else differs"


@pytest.mark.parametrize("more", [0, 2])
def test_memory_that_is_missing_for_replicas_is_known_before_they_are_made(more: int) -> None:
    shape, costs = routed(more)
    start = Assignment.at_launch(shape)

    def lacking(memory: int) -> int:
        views = ViewFactory(
            fabric=cast(Any, None),
            launch_topology=shape,
            config=ElasticConfig(),
            layouts={},
            arena=cast(Any, None),
            choose=crewed(choice_of(policy_named("elaswave"))),
            moves_units=False,
            profile=costs,
            hardware=Hardware(memory, 10**9),
            sizes=CellSizes.of(lambda tensor, parts: None, CellCut(1), only_whole=True),
        )
        return views.lacking_for_replicas(start, range(4))

    assert lacking(MEMORY) == 0 and (lacking(1) > 0) == (more > 0)
    need = lacking(1) + 1
    assert lacking(need) == 0 and lacking(need - 5) == (5 if more else 0)
