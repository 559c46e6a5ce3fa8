"""What the engine runs under each policy is a valid plan, and says which rows nobody computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.plan.choice import CHOICES, choice_named
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Op
from megatron.elastic.plan.planner import nominal_plan, plan_hash, uniform_profile
from megatron.elastic.plan.policy import damaged_replicas
from megatron.elastic.plan.topology import regular_topology, without_cells
from megatron.elastic.plan.validate import InvalidPlan, validate_plan

UNITS = 8
PROFILE = uniform_profile(UNITS)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CHOICES)),
    dp=st.integers(1, 4),
    pp=st.integers(1, 4),
    rows=st.integers(1, 2),
    lost=st.sets(st.integers(0, 15), max_size=4),
    split=st.booleans(),
)
def test_every_answer_is_a_valid_plan_of_the_rows_it_names(
    name: str, dp: int, pp: int, rows: int, lost: set[int], split: bool
) -> None:
    topology = without_cells(regular_topology(dp, pp, UNITS, micro_batch_size=rows, waves=3), lost)
    try:
        plan = choice_named(name, split)(topology, PROFILE)
    except PlanError as refusal:
        assert damaged_replicas(topology), f"{name} refuses a whole topology: {refusal}"
        return
    validate_plan(plan, UNITS, PROFILE)
    entering = sorted(row for piece in plan.pieces if piece.first == 0 for row in piece.rows)
    assert sorted((*entering, *plan.skipped)) == list(range(plan.grid.global_batch_size))
    assert len(entering) == plan.rows
    if name != "torchft" or not damaged_replicas(topology):
        assert plan.skipped == ()
    ops = {action.op for _, table in plan.tables for action in table}
    assert (Op.BACKWARD_INPUT in ops) == (split or (name == "recycle" and bool(damaged_replicas(topology))))
    assert (Op.BACKWARD in ops) != (Op.BACKWARD_INPUT in ops)


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_with_everybody_here_all_policies_run_megatrons_plan(name: str) -> None:
    topology = regular_topology(2, 4, UNITS, waves=4)
    plan, nominal = choice_named(name)(topology, PROFILE), nominal_plan(topology)
    assert (plan.pieces, plan.edges, plan.tables) == (nominal.pieces, nominal.edges, nominal.tables)


def test_a_dropped_replicas_rows_are_the_ones_left_out() -> None:
    topology = without_cells(regular_topology(3, 2, UNITS, micro_batch_size=2, waves=2), [2])
    plan = choice_named("torchft")(topology, PROFILE)
    assert plan.skipped == (2, 3, 8, 9)
    assert plan_hash(plan) != plan_hash(choice_named("torchft-batch")(topology, PROFILE))


def test_a_row_left_out_must_not_be_computed_by_anybody() -> None:
    plan = nominal_plan(regular_topology(2, 2, UNITS, waves=1))
    with pytest.raises(InvalidPlan, match="leaves it out"):
        validate_plan(replace(plan, skipped=(1,)), UNITS)


@pytest.mark.parametrize("name", ["torchft", "torchft-batch", "mindspeed"])
def test_when_no_replica_is_whole_a_policy_that_drops_replicas_says_so(name: str) -> None:
    topology = without_cells(regular_topology(2, 2, UNITS, waves=2), [0, 3])
    with pytest.raises(PlanError, match=f"policy {name}"):
        choice_named(name)(topology, PROFILE)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="elaswave, recycle, torchft, torchft-batch, mindspeed"):
        choice_named("none")
