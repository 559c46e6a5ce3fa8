"""Compute orders: bounded by memory, valid whichever is taken, and the fastest of those that are tried."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.plan.cost import plan_costs
from megatron.elastic.plan.model import Profile, Topology, UnitCost
from megatron.elastic.plan.planner import draft_instant, nominal_plan
from megatron.elastic.plan.schedule.orders import (
    ORDERINGS,
    OrderInput,
    compute_orders,
    memory_rows,
    row_caps,
)
from megatron.elastic.plan.schedule.table import index_edges
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.schedule.validate import held_rows_peak, validate_plan
from megatron.elastic.plan.search.partition import Model
from megatron.elastic.plan.topology import regular_topology, without_cells

ACTIVATION, PARAMETERS = 100, 600


def profile(units: int, latency_ns: int = 0) -> Profile:
    return Profile((UnitCost(1000, 2000, 1000, 10, PARAMETERS, ACTIVATION, 0),) * units, latency_ns=latency_ns)


def with_room_for(topology: Topology, rows: int, units: int) -> Topology:
    """Every cell has memory for its part of the state and for ``rows`` rows of ``units`` units."""
    held = int(Model(profile(topology.units), 1, topology.grid.data_parallel_size).stage_bytes(0, units, 0))
    memory = held + rows * units * ACTIVATION
    return replace(topology, cells=tuple(replace(cell, memory_bytes=memory) for cell in topology.cells))


def order_input(topology: Topology) -> OrderInput:
    """Return the input of the orders of ``topology``'s nominal plan."""
    costs = profile(topology.units)
    plan = nominal_plan(topology, costs)
    waves = [plan.grid.nominal_microbatch(piece.rows[0]) // plan.grid.data_parallel_size for piece in plan.pieces]
    return OrderInput(
        plan.pieces,
        plan.edges,
        index_edges(plan.pieces, plan.edges),
        waves,
        plan_costs(plan.pieces, plan.edges, plan.cells, costs),
        memory_rows(plan.pieces, topology, costs),
    )


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_the_rows_that_fit_are_those_that_memory_leaves_beside_the_state(rows: int) -> None:
    topology = with_room_for(regular_topology(1, 4, 8, waves=6), rows, units=2)
    pieces = nominal_plan(topology, profile(8)).pieces
    assert memory_rows(pieces, topology, profile(8)) == dict.fromkeys(range(4), rows)
    less = replace(topology, cells=tuple(replace(cell, memory_bytes=cell.memory_bytes - 1) for cell in topology.cells))
    assert memory_rows(pieces, less, profile(8)) == dict.fromkeys(range(4), rows - 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 8), st.integers(0, 12))
def test_a_stage_may_hold_the_micro_batches_of_1f1b_or_as_many_as_the_first_stage(
    stages: int, micro_batch: int, waves: int, room: int
) -> None:
    topology = with_room_for(regular_topology(1, stages, stages, micro_batch, waves), room, units=1)
    work = order_input(topology)
    caps = row_caps([piece.id for piece in work.pieces], work)
    needed = [{cell: (stages - cell) * micro_batch for cell in range(stages)}, dict.fromkeys(range(stages), 0)]
    needed[1] = dict.fromkeys(range(stages), stages * micro_batch)
    wanted = [{cell: max(1, min(rows, room)) for cell, rows in each.items()} for each in needed]
    assert caps == (wanted if wanted[0] != wanted[1] else wanted[:1])


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(1, 6), st.data(), st.booleans(), st.sampled_from(["reroute", "resize"]))
def test_every_ordering_of_a_damaged_plan_is_valid_and_takes_as_long_as_it_says(
    stages: int, waves: int, data: st.DataObject, split: bool, flow: str
) -> None:
    lost = data.draw(st.sets(st.integers(0, stages - 1), min_size=1, max_size=stages - 1))
    topology, costs = without_cells(regular_topology(2, stages, stages, waves=waves), lost), profile(stages, 30)
    times = []
    for ordering in ORDERINGS:
        draft = draft_instant(topology, costs, flow, False, split, ordering=ordering)  # type: ignore[arg-type]
        validate_plan(draft.plan, stages)
        assert draft.time_ns == plan_time(draft.plan, costs)
        times.append(draft.time_ns)
    assert ORDERINGS[0] is compute_orders
    thrifty = (1, 2, 3, 4) if split else (1, 3)  # without a split backward, backwards first is not tried
    assert times[0] <= min(times[number] for number in thrifty)


def test_of_equally_fast_orders_the_one_that_holds_least_is_taken() -> None:
    """One cell serves both stages of two pipelines, so no order is faster than another."""
    topology = without_cells(regular_topology(2, 1, 2, waves=4), [1])
    plan = draft_instant(topology, profile(2), "reroute").plan
    assert held_rows_peak(plan, 0) == 1


def test_a_cell_without_memory_for_1f1b_runs_with_less() -> None:
    """ZB-H1 needs the memory of 1F1B; where even that is not there, a list schedule keeps within what is."""
    whole = regular_topology(1, 4, 4, waves=8)
    for room in (4, 2, 1):
        topology = with_room_for(whole, room, units=1)
        plan = draft_instant(topology, profile(4), "reroute", split_backward=True).plan
        validate_plan(plan, 4)
        assert max(held_rows_peak(plan, cell) for cell in range(4)) <= room
