"""Nonuniform tensor parallelism: a damaged replica computes what it finishes in the time of a whole one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.plan.cost import PPM
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Topology
from megatron.elastic.plan.planner import instant_plan, uniform_profile
from megatron.elastic.plan.policies.ntp import NonuniformTP
from megatron.elastic.plan.policies.registry import choice_of
from megatron.elastic.plan.policies.torchft import TorchFT
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.schedule.validate import validate_plan
from megatron.elastic.plan.tensor import parked, reduced_cells
from megatron.elastic.plan.topology import regular_topology, without_cells

UNITS, TENSOR = 4, 8
PROFILE = uniform_profile(UNITS)


def topology(dp: int, pp: int, left: dict[int, int], waves: int = 8) -> Topology:
    """Cells of eight ranks; those of ``left`` have so many ranks left, 0: none."""
    whole = regular_topology(dp, pp, UNITS, waves=waves, tp=TENSOR)
    some = without_cells(whole, [cell for cell, count in left.items() if not count])
    cells = tuple(
        replace(cell, ranks=cell.ranks[: left.get(cell.id, TENSOR)], nominal_ppm=PPM * left.get(cell.id, TENSOR) // 8)
        for cell in some.cells
    )
    return replace(some, cells=cells)


def quotas(plan: Plan, replicas: int, stages: int) -> list[int]:
    """Micro-batches of each replica."""
    first = [piece.cell // stages for piece in plan.pieces if piece.first == 0]
    return [first.count(replica) for replica in range(replicas)]


def instant(cells: Topology) -> Plan:
    return choice_of(NonuniformTP())(cells, PROFILE)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_no_replica_waits_for_a_damaged_one_and_none_could_do_more(dp: int, pp: int, data: st.DataObject) -> None:
    left = data.draw(st.dictionaries(st.integers(0, dp * pp - 1), st.integers(0, TENSOR - 1), max_size=4))
    cells = topology(dp, pp, left)
    try:
        plan = instant(cells)
    except PlanError as refusal:
        assert all(any(left.get(r * pp + s) == 0 for s in range(pp)) for r in range(dp)), refusal
        return
    validate_plan(plan, UNITS, PROFILE)
    sizes = [min(left.get(r * pp + s, TENSOR) for s in range(pp)) for r in range(dp)]
    fastest = max(sizes)
    stage = -(-UNITS // pp)
    for replica, quota in enumerate(quotas(plan, dp, pp)):
        if sizes[replica] in (0, fastest):
            assert quota == (8 if sizes[replica] else 0)
        elif pp == 1:
            assert quota == 8 * sizes[replica] // fastest
        else:
            assert quota <= 8 * sizes[replica] // fastest + stage
    whole = instant_plan(regular_topology(1, pp, UNITS, waves=8), PROFILE)
    assert plan_time(plan, PROFILE) <= -(-plan_time(whole, PROFILE) * TENSOR // fastest) + 100


def test_rows_that_a_damaged_replica_does_not_finish_are_left_out() -> None:
    """Seven of eight ranks finish six of eight micro-batches in the time of eight, the fill of two stages included."""
    plan = instant(topology(2, 2, {1: 7}))
    assert quotas(plan, 2, 2) == [6, 8] and plan.skipped == (12, 14) and plan.rows == 14


@pytest.mark.parametrize("left", range(1, TENSOR))
def test_rounded_times_cost_no_micro_batch(left: int) -> None:
    """Without a pipeline to fill, k of eight ranks finish k of eight micro-batches, though ``8 / k`` is rounded up."""
    assert quotas(instant(topology(2, 1, {0: left})), 2, 1) == [left, 8]


def test_a_lost_group_leaves_its_replica_out() -> None:
    plan = instant(topology(2, 2, {1: 0}))
    assert quotas(plan, 2, 2) == [0, 8]
    with pytest.raises(PlanError, match="policy ntp: every replica has lost a whole group"):
        instant(topology(2, 2, {1: 0, 2: 0}))


def test_a_restart_seats_damaged_groups_in_as_few_replicas_as_possible() -> None:
    """A group of each of four replicas is damaged: at a restart, they are one replica."""
    cells = topology(5, 4, {0: 7, 5: 7, 10: 7, 15: 7})
    outcome = NonuniformTP().respond(cells, PROFILE)
    assert outcome.restarts
    shares = sorted(pipeline.quota for pipeline in outcome.answer.pipelines)  # type: ignore[union-attr]
    assert shares == [6, 8, 8, 8, 8] and outcome.rows == 38
    assert instant(cells).rows == 4 * 6 + 8
    assert outcome.rate() > TorchFT().respond(parked(cells, reduced_cells(cells)), PROFILE).rate()


def test_the_smallest_group_of_a_replica_decides() -> None:
    together = NonuniformTP().respond(topology(2, 2, {0: 7, 1: 4}), PROFILE)
    alone = NonuniformTP().respond(topology(2, 2, {1: 4}), PROFILE)
    assert together.rows == alone.rows < NonuniformTP().respond(topology(2, 2, {0: 7}), PROFILE).rows


def test_with_power_for_it_a_damaged_replica_keeps_up() -> None:
    cells = topology(2, 2, {1: 7})
    before = NonuniformTP().respond(topology(2, 2, {}), PROFILE)
    enough = NonuniformTP(gain_ppm=PPM * 8 // 7 + 1).respond(cells, PROFILE)
    assert enough.rows == before.rows and enough.step_ns == before.step_ns
    little = NonuniformTP(gain_ppm=PPM * 15 // 14).respond(cells, PROFILE)
    assert NonuniformTP().respond(cells, PROFILE).rows < little.rows < before.rows


def test_measured_speeds_do_not_count() -> None:
    cells = topology(2, 2, {1: 7})
    slow = replace(cells, cells=tuple(replace(cell, speed_ppm=PPM // 2) for cell in cells.cells))
    assert NonuniformTP().respond(slow, PROFILE) == NonuniformTP().respond(cells, PROFILE)
