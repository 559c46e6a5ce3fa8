"""The plan that the engine runs under each policy is valid, and says which rows no rank computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Op, Plan
from megatron.elastic.plan.planner import nominal_plan, uniform_profile
from megatron.elastic.plan.policies.base import damaged_replicas
from megatron.elastic.plan.policies.registry import choice_of, engine_policies, policy_named
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.schedule.validate import InvalidPlan, validate_plan
from megatron.elastic.plan.topology import regular_topology, with_speeds, without_cells

UNITS = 8
PROFILE = uniform_profile(UNITS)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(engine_policies()),
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
        plan = choice_of(policy_named(name), split)(topology, PROFILE)
    except PlanError as refusal:
        assert damaged_replicas(topology), f"{name} refuses a whole topology: {refusal}"
        return
    validate_plan(plan, UNITS, PROFILE)
    entering = sorted(row for piece in plan.pieces if piece.first == 0 for row in piece.rows)
    assert sorted((*entering, *plan.skipped)) == list(range(plan.grid.global_batch_size))
    assert len(entering) == plan.rows
    if policy_named(name).keeps_batch or not damaged_replicas(topology):
        assert plan.skipped == ()
    ops = {action.op for _, table in plan.tables for action in table}
    assert (Op.BACKWARD_INPUT in ops) == (split or (name == "recycle" and bool(damaged_replicas(topology))))
    assert (Op.BACKWARD in ops) != (Op.BACKWARD_INPUT in ops)


@pytest.mark.parametrize("name", engine_policies())
def test_with_all_ranks_here_all_policies_run_megatrons_plan(name: str) -> None:
    topology = regular_topology(2, 4, UNITS, waves=4)
    plan, nominal = choice_of(policy_named(name))(topology, PROFILE), nominal_plan(topology)
    assert (plan.pieces, plan.edges, plan.tables) == (nominal.pieces, nominal.edges, nominal.tables)


def test_a_dropped_replicas_rows_are_the_ones_left_out() -> None:
    topology = without_cells(regular_topology(3, 2, UNITS, micro_batch_size=2, waves=2), [2])
    plan = choice_of(policy_named("torchft"))(topology, PROFILE)
    assert plan.skipped == (2, 3, 8, 9)
    assert plan.digest != choice_of(policy_named("torchft-batch"))(topology, PROFILE).digest


def test_a_row_left_out_must_not_be_computed_by_any_rank() -> None:
    plan = nominal_plan(regular_topology(2, 2, UNITS, waves=1))
    with pytest.raises(InvalidPlan, match="leaves it out"):
        validate_plan(replace(plan, skipped=(1,)), UNITS)


def test_without_a_spare_the_policy_of_spares_ends() -> None:
    whole = regular_topology(2, 2, UNITS, waves=2)
    assert (
        choice_of(policy_named("spares"))(whole, PROFILE).pieces
        == choice_of(policy_named("elaswave"))(whole, PROFILE).pieces
    )
    with pytest.raises(PlanError, match=r"policy spares: replicas .* no spare is ready"):
        choice_of(policy_named("spares"))(without_cells(whole, [3]), PROFILE)


@pytest.mark.parametrize("name", ["torchft", "torchft-batch", "mindspeed", "ntp"])
def test_when_no_replica_is_whole_a_policy_that_drops_replicas_says_so(name: str) -> None:
    topology = without_cells(regular_topology(2, 2, UNITS, waves=2), [0, 3])
    with pytest.raises(PlanError, match=f"policy {name}"):
        choice_of(policy_named(name))(topology, PROFILE)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="elaswave, recycle, torchft, torchft-batch, mindspeed, ntp, spares"):
        choice_of(policy_named("none"))


@settings(max_examples=60, deadline=None)
@given(
    dp=st.integers(1, 4),
    pp=st.integers(1, 3),
    size=st.integers(1, 4),
    speeds=st.dictionaries(st.integers(0, 11), st.integers(200_000, 1_000_000), max_size=4),
    lost=st.sets(st.integers(0, 11), max_size=2),
)
def test_where_rows_count_by_themselves_shares_are_exact_to_a_row(
    dp: int, pp: int, size: int, speeds: dict[int, int], lost: set[int]
) -> None:
    """Valid plans of every row, no piece of two micro-batches, and no slower than by whole micro-batches."""
    topology = without_cells(with_speeds(regular_topology(dp, pp, UNITS, size, waves=3), speeds), lost)
    try:
        whole = choice_of(policy_named("elaswave"))(topology, PROFILE)
    except PlanError:
        return
    cut = choice_of(policy_named("elaswave"), cut_microbatches=True)(topology, PROFILE)
    validate_plan(cut, UNITS, PROFILE)
    entering = sorted(row for piece in cut.pieces if piece.first == 0 for row in piece.rows)
    assert entering == list(range(cut.grid.global_batch_size))
    assert all(len({row // size for row in piece.rows}) == 1 for piece in cut.pieces)
    if pp == 1 and not lost:
        assert plan_time(cut, PROFILE) <= plan_time(whole, PROFILE)


def test_a_rank_at_half_speed_gets_half_the_rows() -> None:
    """24 rows in micro-batches of four: a speed of 0.7 cannot be met by whole ones."""
    slow = with_speeds(regular_topology(2, 1, UNITS, 4, waves=3), {1: 500_000})
    for cut, expected in ((False, {0: 16, 1: 8}), (True, {0: 16, 1: 8})):
        assert rows_of(choice_of(policy_named("elaswave"), cut_microbatches=cut)(slow, PROFILE)) == expected
    third = with_speeds(regular_topology(2, 1, UNITS, 4, waves=3), {1: 700_000})
    assert rows_of(choice_of(policy_named("elaswave"))(third, PROFILE)) == {0: 16, 1: 8}
    assert rows_of(choice_of(policy_named("elaswave"), cut_microbatches=True)(third, PROFILE)) == {0: 14, 1: 10}


def rows_of(plan: Plan) -> dict[int, int]:
    """Rows by cell."""
    found: dict[int, int] = {}
    for piece in plan.pieces:
        found[piece.cell] = found.get(piece.cell, 0) + len(piece.rows)
    return dict(sorted(found.items()))
