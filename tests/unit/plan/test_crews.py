"""Plans of cells that share experts: lockstep, whole micro-batches, no deadlock, whatever is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.plan.crews import crewed
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Op, Plan, Topology
from megatron.elastic.plan.planner import nominal_plan, uniform_profile
from megatron.elastic.plan.policies.registry import choice_of, policy_named
from megatron.elastic.plan.schedule.validate import InvalidPlan, validate_plan
from megatron.elastic.plan.topology import regular_topology, without_cells

UNITS = 8
PROFILE = uniform_profile(UNITS)
COMPUTE = {Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}


def shared(groups: int, size: int, stages: int, rows: int = 1, waves: int = 2) -> Topology:
    """``groups`` × ``size`` replicas, of which ``size`` adjacent ones share experts."""
    return replace(regular_topology(groups * size, stages, UNITS, rows, waves), crew_size=size)


def planned(topology: Topology, split: bool = False) -> Plan:
    return crewed(choice_of(policy_named("elaswave"), split))(topology, PROFILE)


@given(
    groups=st.integers(1, 3),
    size=st.integers(2, 3),
    stages=st.integers(1, 3),
    rows=st.integers(1, 2),
    lost=st.sets(st.integers(0, 26), max_size=5),
    split=st.booleans(),
)
def test_any_loss_leaves_a_valid_plan_in_lockstep(
    groups: int, size: int, stages: int, rows: int, lost: set[int], split: bool
) -> None:
    """The validator runs the tables, and begins a computation of a crew when all its cells have come to it."""
    topology = without_cells(shared(groups, size, stages, rows), lost)
    held = {segment.first for r in topology.replicas for segment in r.segments if segment.cell not in lost}
    if len(held) < stages:
        with pytest.raises(PlanError, match="living holder"):
            planned(topology, split)
        return
    plan = planned(topology, split)
    validate_plan(plan, UNITS)
    assert all(len(piece.rows) in (0, rows) for piece in plan.pieces), "micro-batches stay whole"
    assert {row // rows for piece in plan.pieces for row in piece.rows} == set(range(groups * size * 2))


def test_without_a_loss_it_is_megatrons_plan() -> None:
    topology = shared(2, 2, 2)
    plan, alone = planned(topology), nominal_plan(replace(topology, crew_size=1), PROFILE)
    assert not [piece for piece in plan.pieces if not piece.rows]
    for cell, table in alone.tables:
        ours = [(a.op, plan.pieces[a.piece].rows) for a in plan.table(cell) if a.op in COMPUTE]
        assert ours == [(a.op, alone.pieces[a.piece].rows) for a in table if a.op in COMPUTE]


def test_two_cells_compute_three_micro_batches_in_two_turns_with_a_ghost() -> None:
    plan = planned(without_cells(shared(1, 3, 1, waves=1), [1]))
    assert [(piece.cell, piece.rows) for piece in plan.pieces] == [(0, (0,)), (2, (1,)), (0, (2,)), (2, ())]
    assert plan.crews == ((0, 2),)


def test_cells_of_a_crew_in_another_order_are_refused() -> None:
    plan = planned(shared(1, 2, 1))
    first, (cell, (forward, backward, *rest)) = plan.tables
    another = (forward, rest[0], backward, *rest[1:])
    with pytest.raises(InvalidPlan, match="lockstep"):
        validate_plan(replace(plan, tables=(first, (cell, another))), UNITS)
    validate_plan(replace(plan, tables=(first, (cell, another)), crews=()), UNITS)
