"""Without a barrier between steps: no faster than the busiest cell and the longest trip, no slower than with it."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from megatron.elastic.plan.cost import Costs, plan_costs
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Op, Plan, Profile, UnitCost
from megatron.elastic.plan.planner import instant_plan
from megatron.elastic.plan.policies.recycle import ReCycle
from megatron.elastic.plan.schedule.stagger import regime, unit_peers
from megatron.elastic.plan.schedule.table import index_edges
from megatron.elastic.plan.schedule.timing import duration, execute
from megatron.elastic.plan.schedule.validate import validate_plan
from megatron.elastic.plan.topology import regular_topology, without_cells

SENDS = {Op.RECV_FORWARD: Op.SEND_FORWARD, Op.RECV_BACKWARD: Op.SEND_BACKWARD}
Tied = tuple[tuple[int, int], ...]


def uneven_profile(draw: random.Random, units: int) -> Profile:
    """Units, transfers and weight gradients of all lengths."""
    costs = []
    for _ in range(units):
        forward = draw.randint(500, 3000)
        backward = draw.randint(forward, 3 * forward)
        costs.append(UnitCost(forward, backward, draw.randint(0, backward), 0, 0, 1, draw.randint(0, 2)))
    return Profile(tuple(costs), link_bytes_per_s=2_000_000, latency_ns=draw.choice((0, 700)))


def damaged_plan(seed: int) -> tuple[Plan, Profile, Tied]:
    """A rerouted plan of a random size and damage; in some, the first and last unit are one."""
    draw = random.Random(seed)
    stages = draw.randint(1, 6)
    units, replicas = stages * draw.randint(1, 3), draw.randint(2, 4)
    profile = uneven_profile(draw, units)
    whole = regular_topology(replicas, stages, units, waves=draw.randint(1, 9))
    tied = ((0, units - 1),) if stages > 1 and draw.random() < 0.3 else ()
    while True:
        lost = draw.sample(range(replicas * stages), draw.randint(0, replicas))
        try:
            topology = without_cells(whole, lost)
            return instant_plan(topology, profile, split_backward=draw.random() < 0.7), profile, tied
        except PlanError:
            continue


def chained(plan: Plan, costs: Costs, peers: Mapping[int, frozenset[int]], steps: int) -> list[dict[int, int]]:
    """When each cell begins each of ``steps`` steps: all actions of all steps as one graph, relaxed until it rests."""
    ends: dict[tuple[int, int, int], int] = {}
    sent = {(a.op, a.edge): (c, n) for c, table in plan.tables for n, a in enumerate(table) if a.op in SENDS.values()}

    def begin(step: int, cell: int) -> int:
        return max((ends.get((step - 1, peer, -1), 0) for peer in peers[cell]), default=0) if step else 0

    moved = True
    while moved:
        moved = False
        for step in range(steps):
            for cell, table in plan.tables:
                now = begin(step, cell)
                for number, action in enumerate(table):
                    if action.op in SENDS:
                        now = max(now, ends.get((step, *sent[SENDS[action.op], action.edge]), 0))
                    elif action.op in SENDS.values():
                        here = now + costs.edges[action.edge]
                        moved |= ends.get((step, cell, number)) != here
                        ends[step, cell, number] = here
                    else:
                        now += duration(action, costs.pieces[action.piece])
                moved |= ends.get((step, cell, -1)) != now
                ends[step, cell, -1] = now
    return [{cell: begin(step, cell) for cell, _ in plan.tables} for step in range(steps)]


def longest_trip(plan: Plan, costs: Costs) -> int:
    """The longest way from a piece's forward through all that follows and back: no cell is done with it sooner."""
    index = index_edges(plan.pieces, plan.edges)
    trip: dict[int, int] = {}
    for piece in sorted(plan.pieces, key=lambda piece: -piece.first):
        cost = costs.pieces[piece.id]
        after = (2 * costs.edges[edge] + trip[plan.edges[edge].target] for edge in index.outgoing[piece.id])
        weight = cost.weight if any(a.op is Op.BACKWARD_INPUT for a in plan.table(piece.cell)) else 0
        trip[piece.id] = cost.forward + cost.backward - weight + max(after, default=0)
    return max(trip.values())


@pytest.mark.parametrize("seed", range(40))
def test_a_step_is_between_what_nothing_beats_and_the_step_with_a_barrier(seed: int) -> None:
    plan, profile, tied = damaged_plan(seed)
    costs = plan_costs(plan.pieces, plan.edges, plan.cells, profile)
    run, found = execute(plan, costs), regime(plan, profile, tied)
    assert max(run.busy.values()) <= found.period_ns <= run.makespan
    assert longest_trip(plan, costs) <= found.period_ns


@pytest.mark.parametrize("seed", range(100, 112))
def test_steps_repeat_as_foretold(seed: int) -> None:
    plan, profile, tied = damaged_plan(seed)
    found = regime(plan, profile, tied)
    costs, peers = plan_costs(plan.pieces, plan.edges, plan.cells, profile), unit_peers(plan, tied)
    begins = chained(plan, costs, peers, found.settled_after + 2 * found.steps + 1)[found.settled_after :]
    first = min(begins[0].values())
    assert {cell: begin - first for cell, begin in begins[0].items()} == found.begins
    for now, later in zip(begins, begins[found.steps :], strict=False):
        assert {cell: begin + found.shift_ns for cell, begin in now.items()} == later


def test_with_one_stage_every_peer_waits_for_every_other() -> None:
    profile = Profile((UnitCost(1000, 2000, 1000, 0, 0, 1, 0),) * 4, latency_ns=0)
    for lost in ([], [1]):
        plan = instant_plan(without_cells(regular_topology(3, 1, 4, waves=5), lost), profile)
        run = execute(plan, plan_costs(plan.pieces, plan.edges, plan.cells, profile))
        found = regime(plan, profile)
        assert found.period_ns == run.makespan and set(found.begins.values()) == {0}


def test_units_that_are_tied_are_one_stage() -> None:
    plan = instant_plan(regular_topology(2, 3, 6, waves=2))
    assert unit_peers(plan) == {cell: frozenset({cell % 3, cell % 3 + 3}) for cell in range(6)}
    ends = unit_peers(plan, ((0, 5),))
    assert ends[0] == ends[5] == frozenset({0, 2, 3, 5}) and ends[1] == frozenset({1, 4})


@pytest.mark.parametrize("stage", range(8))
def test_at_one_loss_of_dp_2_pp_8_steps_overlap_perfectly(stage: int) -> None:
    """92 : 128, the work of the cell that serves both replicas, with room for late weight gradients; barriers cost."""
    profile = Profile((UnitCost(1000, 2000, 1000, 100, 600, 30, 0),) * 32, latency_ns=0)
    topology = without_cells(regular_topology(2, 8, 32, waves=16), [stage])
    staggered, barrier = ReCycle().respond(topology, profile), ReCycle(staggered=False).respond(topology, profile)
    assert staggered.step_ns == staggered.ideal_ns == barrier.ideal_ns == 128 * 3000
    assert barrier.step_ns > staggered.step_ns or not stage
    assert isinstance(staggered.answer, Plan)
    validate_plan(staggered.answer, 32)
