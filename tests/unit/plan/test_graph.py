"""Shapes are optimal where that can be checked, reach the design's figures, and fit memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.plan.cost import held_bytes
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Cell, Grid, Plan, Profile, Replica, Segment, Topology, UnitCost
from megatron.elastic.plan.planner import instant_plan
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.schedule.validate import memory_peaks, validate_plan
from megatron.elastic.plan.search.graph import GraphOptions, Shape, candidate_shapes, pipeline_bound
from megatron.elastic.plan.search.partition import (
    CellCapacity,
    Model,
    PipelineTime,
    cut_pipeline,
    nearest_cuts,
    pipeline_time,
    share_out,
)
from megatron.elastic.plan.search.steady import (
    DecisionOptions,
    decide,
    migration_ns,
    shape_plan,
    steady_plan,
    transition,
)
from megatron.elastic.plan.topology import regular_topology, with_speeds, without_cells

LAYER = UnitCost(1000, 2000, 1000, 100, 600, 30, 0)


def layers(count: int) -> Profile:
    return Profile((LAYER,) * count, latency_ns=0)


def paper_case(waves: int = 16, headroom: float = 1.25) -> Topology:
    """32 layers, DP 2 x PP 8; each cell has ``headroom`` times the memory its first stage needs."""
    topology = regular_topology(2, 8, 32, waves=waves)
    need = Model(layers(32), 1, 2).stage_bytes(0, 4, 8)
    cells = tuple(replace(cell, memory_bytes=int(need * headroom)) for cell in topology.cells)
    return replace(topology, cells=cells)


def by_kind(shapes: list[Shape]) -> dict[str, Shape]:
    return {shape.kind: shape for shape in reversed(shapes)}


def test_the_designs_figures_for_one_loss_of_sixteen_cells() -> None:
    """With 16 micro-batches: 0.92 re-cut, 0.59 dropped at equal batch; alike pays 107 for 92."""
    before = (16 + 7) * 12_000
    found = by_kind(candidate_shapes(without_cells(paper_case(), [3]), layers(32)))
    assert before / found["recut"].time_ns == pytest.approx(0.92)
    assert before / found["drop"].time_ns == pytest.approx(92 / 156)
    assert before / found["alike"].time_ns == pytest.approx(92 / 107)
    assert [p.quota for p in found["recut"].pipelines] == [18, 14]


def test_the_designs_figures_without_fill_and_drain() -> None:
    """Many micro-batches: 0.80 alike, 0.90 re-cut, 0.50 dropped."""
    waves = 4000
    before = (waves + 7) * 12_000
    found = by_kind(candidate_shapes(without_cells(paper_case(waves), [3]), layers(32)))
    for kind, share in (("alike", 0.80), ("recut", 0.90), ("drop", 0.50)):
        assert before / found[kind].time_ns == pytest.approx(share, abs=2e-3)


def test_closed_form_is_the_time_of_the_tables() -> None:
    """Exactly so with even stages; with uneven ones and few micro-batches tables are somewhat faster."""
    topology = without_cells(paper_case(), [3])
    for shape in candidate_shapes(topology, layers(32)):
        plan = shape_plan(topology, shape, layers(32))
        validate_plan(plan, 32, layers(32))
        assert plan_time(plan, layers(32)) == shape.time_ns


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.lists(st.sampled_from([500_000, 800_000, 1_000_000]), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_minimax_cut_is_the_best_of_all_cuts(work: list[int], speeds: list[int], room: int) -> None:
    units = tuple(UnitCost(w * 1000, w * 2000, 0, w, 0, 1, 0) for w in work)
    model = Model(Profile(units, latency_ns=0), 1, 1)
    places = [CellCapacity(speed, room * 4) for speed in speeds]
    count = len(places)
    best = None
    for inner in combinations_with_replacement(range(len(work) + 1), count - 1):
        ends = (0, *inner, len(work))
        spans = list(zip(ends, ends[1:], places, strict=False))
        if all(model.stage_bytes(a, b, count - s) <= p.memory_bytes for s, (a, b, p) in enumerate(spans)):
            slowest = max(model.stage_time(a, b, p) for a, b, p in spans)
            best = slowest if best is None else min(best, slowest)
    cuts = cut_pipeline(model, places)
    if best is None:
        assert cuts is None
    else:
        assert cuts is not None
        assert max(model.stage_time(a, b, p) for a, b, p in zip(cuts, cuts[1:], places, strict=False)) == best


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=3))
def test_quotas_minimise_the_slowest_pipeline(total: int, lines: list[tuple[int, int]]) -> None:
    times = [PipelineTime(fixed, each) for fixed, each in lines]
    quotas, reached = share_out(total, times)
    assert sum(quotas) == total
    assert reached == max(time.of(quota) for time, quota in zip(times, quotas, strict=True))
    every = (q for q in product(range(total + 1), repeat=len(times)) if sum(q) == total)
    assert reached == min(max(t.of(n) for t, n in zip(times, q, strict=True)) for q in every)


@settings(max_examples=25, deadline=None, print_blob=True)
@given(
    st.integers(2, 4),
    st.integers(1, 5),
    st.integers(6, 12),
    st.integers(0, 6),
    st.sampled_from([1.0, 1.3, 2.0, 8.0]),
    st.data(),
)
def test_any_damage_gets_a_valid_plan_within_memory_close_to_the_bound(
    dp: int, pp: int, units: int, more: int, headroom: float, data: st.DataObject
) -> None:
    """With at least as many micro-batches as stages; with fewer the bound grants memory that quotas may need."""
    waves = pp + more
    profile = layers(units)
    topology = regular_topology(dp, pp, units, waves=waves)
    widest = -(-units // pp)
    memory = int(Model(profile, 1, dp).stage_bytes(0, widest, pp) * headroom)
    topology = replace(topology, cells=tuple(replace(c, memory_bytes=memory) for c in topology.cells))
    lost = data.draw(st.sets(st.integers(0, dp * pp - 1), min_size=1, max_size=dp * pp - 1))
    topology = without_cells(topology, lost)
    try:
        shapes = candidate_shapes(topology, profile)
    except PlanError:
        with pytest.raises(PlanError):
            pipeline_bound(topology, profile)
        return
    assert shapes[0].time_ns >= pipeline_bound(topology, profile)
    assert pipeline_bound(topology, profile) / shapes[0].time_ns >= 0.95
    for shape in shapes:
        plan = shape_plan(topology, shape, profile)
        validate_plan(plan, units, profile)
        assert 0.85 * shape.time_ns <= plan_time(plan, profile) <= shape.time_ns


def test_spare_cells_lengthen_or_found_pipelines() -> None:
    """Cells of a replica that lost too much join others or form a new one when that is faster."""
    topology = without_cells(paper_case(headroom=1.7), [8, 9, 10])
    best = candidate_shapes(topology, layers(32))[0]
    assert 92 * 3000 / best.time_ns >= 0.80
    used = {segment.cell for pipeline in best.pipelines for segment in pipeline.segments}
    assert {p.cell for p in shape_plan(topology, best, layers(32)).pieces} == used <= {c.id for c in topology.cells}


def test_a_slow_cell_gets_fewer_layers_or_its_pipeline_fewer_samples() -> None:
    topology = with_speeds(paper_case(headroom=2), {5: 500_000})
    plan = steady_plan(topology, layers(32))
    validate_plan(plan, 32)
    work = {
        cell.id: sum(len(p.rows) * (p.end - p.first) for p in plan.pieces if p.cell == cell.id) for cell in plan.cells
    }
    assert work[5] <= 0.7 * max(work.values())
    assert plan_time(plan, layers(32)) < 1.25 * 92 * 3000


def test_losing_a_unit_everywhere_has_no_instant_plan_but_a_steady_one() -> None:
    decision = decide(without_cells(paper_case(), [3, 11]), layers(32))
    assert decision.instant is None
    assert decision.steady is not None
    assert all(not move.sources for move in decision.moves if 12 <= move.unit < 16)


def test_migration_that_cannot_pay_back_is_not_done() -> None:
    topology = without_cells(paper_case(), [3])
    slow = replace(layers(32), link_bytes_per_s=1)
    assert decide(topology, layers(32)).steady is not None
    assert decide(topology, slow, DecisionOptions(horizon_ns=10**9)).steady is None


def test_transition_names_living_sources_and_only_what_is_lacking() -> None:
    before = (Replica((Segment(0, 0, 2), Segment(1, 2, 4))), Replica((Segment(2, 0, 2), Segment(3, 2, 4))))
    after = (Replica((Segment(0, 0, 4),)), Replica((Segment(2, 0, 2), Segment(3, 2, 4))))
    moves = transition(before, after, layers(4), [0, 2, 3])
    assert [(m.cell, m.unit, m.sources, m.bytes) for m in moves] == [(0, 2, (3,), 400), (0, 3, (3,), 400)]
    assert transition(before, before, layers(4), [0, 1, 2, 3]) == ()
    assert migration_ns(moves, replace(layers(4), link_bytes_per_s=800)) == 1_000_000_000


def test_recutting_prefers_the_cut_that_moves_least() -> None:
    model = Model(layers(12), 1, 2)
    holds = [((0, 4),), ((8, 12),)]
    assert nearest_cuts(model, [CellCapacity(), CellCapacity()], 8 * 3000, holds) == (0, 4, 12)
    assert nearest_cuts(model, [CellCapacity(), CellCapacity()], 6 * 3000, holds) == (0, 6, 12)


def test_tied_embeddings_held_by_one_cell_count_once() -> None:
    profile = layers(4)
    tied = Model(profile, 1, 1, tied=((0, 3),))
    assert Model(profile, 1, 1).stage_bytes(0, 4, 1) - tied.stage_bytes(0, 4, 1) == 700
    assert tied.stage_bytes(0, 3, 1) == Model(profile, 1, 1).stage_bytes(0, 3, 1)
    topology = replace(regular_topology(1, 1, 4), tied=((0, 3),))
    plan = steady_plan(topology, profile)
    assert memory_peaks(plan, profile)[0] - memory_peaks(plan, profile, topology.tied)[0] == 700


def test_of_tied_units_the_larger_one_has_something_of_its_own() -> None:
    """Layers of multi-token prediction beside the head: 40 bytes of weights and 24 of state."""
    embedding, head = replace(LAYER, param_bytes=100), replace(LAYER, param_bytes=140, state_bytes=624)
    profile, tied = Profile((embedding, LAYER, LAYER, head), latency_ns=0), ((0, 3),)
    one, two = (regular_topology(1, stages, 4).replicas for stages in (1, 2))
    assert held_bytes(one, profile, tied) == {0: 3 * 700 + 64}
    assert Model(profile, 1, 1, tied=tied).stage_bytes(0, 4, 0) == 3 * 700 + 64
    assert held_bytes(two, profile, tied) == {0: 700 + 100 + 300, 1: 700 + 100 + 300 + 64}
    memory = Model(profile, 1, 1).stage_bytes(0, 4, 1) - 700
    assert cut_pipeline(Model(profile, 1, 1, tied=tied), [CellCapacity(memory_bytes=memory)]) == (0, 4)
    assert cut_pipeline(Model(profile, 1, 1, tied=tied), [CellCapacity(memory_bytes=memory - 1)]) is None


def test_heterogeneous_units_are_cut_by_cost() -> None:
    head = UnitCost(4000, 8000, 4000, 100, 600, 30, 0)
    profile = Profile((LAYER,) * 8 + (head,), latency_ns=0)
    model = Model(profile, 1, 1)
    cuts = cut_pipeline(model, [CellCapacity()] * 3)
    assert cuts == (0, 4, 8, 9)
    assert pipeline_time(model, [CellCapacity()] * 3, cuts).each == 12_000


def test_axes_can_be_switched_off() -> None:
    topology = without_cells(paper_case(), [3])
    assert decide(topology, layers(32), DecisionOptions(graph=None)).steady is None
    only = candidate_shapes(topology, layers(32), GraphOptions(alike=False, pool=False, drop=False))
    assert [shape.kind for shape in only] == ["recut"]


@settings(max_examples=25, deadline=None, print_blob=True)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.data())
def test_losses_on_top_of_steady_plans_keep_giving_valid_plans(
    dp: int, stages: int, chunks: int, split: bool, data: st.DataObject
) -> None:
    """Each answer becomes the next topology, interleaved at first or not, until nothing fits."""
    units = 2 * stages * chunks
    profile = layers(units)
    cells = tuple(Cell(number, (number,)) for number in range(dp * stages))
    replicas = tuple(
        Replica(tuple(Segment(r * stages + i % stages, 2 * i, 2 * i + 2) for i in range(stages * chunks)))
        for r in range(dp)
    )
    topology = Topology(Grid(4 * dp, 1, dp), units, cells, replicas)
    while len(topology.cells) > 1:
        lost = data.draw(st.sampled_from([cell.id for cell in topology.cells]))
        topology = without_cells(topology, [lost])
        decision = decide(topology, profile, DecisionOptions(split_backward=split))
        for answer in (decision.instant, decision.steady):
            if isinstance(answer, Plan):
                validate_plan(answer, units)
            elif answer is not None:
                validate_plan(shape_plan(topology, answer, profile, split), units)
        if decision.steady is not None:
            topology = replace(topology, replicas=decision.steady.replicas())
        elif isinstance(decision.instant, Shape) and data.draw(st.booleans()):
            topology = replace(topology, replicas=decision.instant.replicas())


def test_ragged_replicas_share_by_speed_in_the_instant_plan_too() -> None:
    """After re-cutting to 8 + 7 cells another loss elsewhere leaves quotas near 18 : 14, not 16 : 16."""
    topology = without_cells(paper_case(headroom=2), [3])
    steady = by_kind(candidate_shapes(topology, layers(32)))["recut"]
    moved = replace(topology, replicas=steady.replicas())
    plan = instant_plan(moved, layers(32))
    validate_plan(plan, 32)
    assert plan_time(plan, layers(32)) == steady.time_ns


def test_state_in_the_hosts_memory_takes_none_of_the_cells() -> None:
    profile = Profile((UnitCost(1000, 2000, 1000, 4_000, 32_000, 100, 0),) * 8, latency_ns=0)
    topology = without_cells(regular_topology(1, 4, 8, waves=4, memory_bytes=20_000), [2])
    with pytest.raises(PlanError):
        candidate_shapes(topology, profile)
    there = replace(profile, resident_ppm=0)
    assert candidate_shapes(topology, there)
    replicas = topology.replicas
    assert held_bytes(replicas, there)[0] == 2 * 4_000 < held_bytes(replicas, profile)[0]


def test_a_pipeline_that_computes_far_more_than_its_share_has_the_memory_for_it() -> None:
    """The damaged pipeline is by far the fastest: it computes all four micro-batches, three more than the others."""
    unit = UnitCost(100, 200, 100, 0, 0, 10, 0)
    topology = regular_topology(4, 5, 10, waves=1, memory_bytes=60)
    slow = with_speeds(topology, dict.fromkeys(range(15), 1000))
    profile = Profile((unit,) * 10, latency_ns=0)
    plan = steady_plan(without_cells(slow, [15]), profile)
    assert {piece.cell for piece in plan.pieces} == {16, 17, 18, 19}
    validate_plan(plan, 10, profile)
