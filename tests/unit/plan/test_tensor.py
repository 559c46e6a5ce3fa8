"""Reduced cells compute or are parked, whichever is faster and fits memory; slow cells share pipelines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.plan.cost import PPM
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Replica, Segment, Topology, UnitCost
from megatron.elastic.plan.planner import instant_plan, uniform_profile
from megatron.elastic.plan.policies.elaswave import ElasWave
from megatron.elastic.plan.policies.registry import choice_of
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.schedule.validate import memory_peaks, validate_plan
from megatron.elastic.plan.search.graph import GraphOptions, candidate_shapes
from megatron.elastic.plan.search.shapes import shape_plan
from megatron.elastic.plan.search.steady import DecisionOptions, decide, steady_plan
from megatron.elastic.plan.tensor import crowded, packed, parked, raised, reduced_cells, spread, tensor_options
from megatron.elastic.plan.topology import regular_topology, without_cells

UNITS = 8
PROFILE = uniform_profile(UNITS)
HEAVY = Profile((UnitCost(1_000_000, 2_000_000, 1_000_000, 1_000, 2_000, 100, 0),) * UNITS, latency_ns=0)
LONG = 10**18


def topology(
    dp: int, pp: int, small: dict[int, int], lost: set[int] | None = None, waves: int = 1, memory_bytes: int = 1 << 62
) -> Topology:
    """Cells of four ranks; those of ``small`` have so many ranks left, and as much of the speed and memory."""
    regular = regular_topology(dp, pp, UNITS, waves=waves, tp=4, memory_bytes=memory_bytes)
    whole = without_cells(regular, lost or set())
    cells = tuple(
        replace(
            cell,
            ranks=cell.ranks[: small[cell.id]],
            nominal_ppm=PPM * small[cell.id] // 4,
            memory_bytes=cell.memory_bytes * small[cell.id] // 4,
        )
        if cell.id in small
        else cell
        for cell in whole.cells
    )
    return replace(whole, cells=cells)


def chosen(cells: Topology, profile: Profile = PROFILE) -> Plan:
    return choice_of(ElasWave())(cells, profile)


def computing(plan: Plan) -> set[int]:
    return {piece.cell for piece in plan.pieces}


@st.composite
def damages(draw: st.DrawFn) -> Topology:
    dp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    cells = st.integers(0, dp * pp - 1)
    small = draw(st.dictionaries(cells, st.integers(1, 3), max_size=4))
    lost = draw(st.sets(cells, max_size=2)) - small.keys()
    return topology(dp, pp, small, lost, waves=draw(st.integers(1, 6)))


@settings(max_examples=80, deadline=None)
@given(damages(), st.booleans())
def test_the_instant_plan_is_valid_moves_nothing_and_is_no_slower_than_any_option(cells: Topology, split: bool) -> None:
    try:
        plan = choice_of(ElasWave(), split)(cells, PROFILE)
    except PlanError:
        for option in tensor_options(cells):
            with pytest.raises(PlanError):
                instant_plan(option, PROFILE)
        return
    validate_plan(plan, UNITS, PROFILE)
    assert plan.cells == cells.cells and plan.parked == cells.parked
    before = {(s.cell, s.first, s.end) for replica in cells.replicas for s in replica.segments}
    assert {(s.cell, s.first, s.end) for replica in plan.replicas for s in replica.segments} <= before
    for option in (cells, parked(cells, reduced_cells(cells)), packed(cells) if reduced_cells(cells) else cells):
        try:
            other = instant_plan(option, PROFILE, split_backward=split)
        except PlanError:
            continue
        assert plan_time(plan, PROFILE) <= plan_time(other, PROFILE)


@settings(max_examples=40, deadline=None)
@given(damages(), st.booleans())
def test_the_axis_never_slows_a_decision_and_off_no_reduced_cell_computes(cells: Topology, split: bool) -> None:
    options = DecisionOptions(horizon_ns=LONG, split_backward=split)
    try:
        off = decide(cells, PROFILE, replace(options, tensor=False))
    except PlanError:
        off = None
    if off is not None:
        on = decide(cells, PROFILE, options)
        assert on.steady_ns <= off.steady_ns
        assert on.instant_ns <= off.instant_ns or not off.instant_ns
        answer = off.steady or off.instant
        plan = answer if isinstance(answer, Plan) else shape_plan(cells, answer, PROFILE, split)  # type: ignore[arg-type]
        assert not computing(plan) & set(reduced_cells(cells))


@given(damages())
def test_packing_keeps_what_each_cell_holds_and_lets_slow_ones_share_pipelines(cells: Topology) -> None:
    after = packed(cells)
    rate = {cell.id: cell.rate_ppm for cell in cells.cells}

    def spans(some: Topology) -> list[tuple[int, int, int]]:
        return sorted((s.cell, s.first, s.end) for replica in some.replicas for s in replica.segments)

    def slowest(some: Topology) -> list[int]:
        return sorted(min(rate.get(s.cell, 0) for s in replica.segments) for replica in some.replicas)

    assert spans(after) == spans(cells) and packed(after) == after
    assert all(a >= b for a, b in zip(slowest(after), slowest(cells), strict=True))


def test_slow_cells_of_two_replicas_share_one_pipeline() -> None:
    """As they are, each pipeline is as slow as its slow cell; packed, only one is."""
    cells = topology(2, 2, {0: 2, 3: 2}, waves=12)
    assert [[s.cell for s in replica.segments] for replica in packed(cells).replicas] == [[0, 3], [2, 1]]
    plan = chosen(cells)
    assert {frozenset((plan.pieces[e.source].cell, plan.pieces[e.target].cell)) for e in plan.edges} == {
        frozenset((0, 3)),
        frozenset((1, 2)),
    }
    assert plan_time(plan, PROFILE) < plan_time(instant_plan(cells, PROFILE), PROFILE) * 3 // 4


@given(damages())
def test_spreading_keeps_what_each_cell_holds_and_lets_no_pipeline_lack_much_more_than_another(cells: Topology) -> None:
    after = spread(cells)
    rate = {cell.id: cell.rate_ppm for cell in cells.cells}

    def lacking(some: Topology) -> list[int]:
        return [sum(PPM - rate.get(s.cell, 0) for s in replica.segments) for replica in some.replicas]

    assert {(s.cell, s.first, s.end) for replica in after.replicas for s in replica.segments} == {
        (s.cell, s.first, s.end) for replica in cells.replicas for s in replica.segments
    }
    assert sum(lacking(after)) == sum(lacking(cells)) and max(lacking(after)) - min(lacking(after)) <= PPM


def test_damage_of_one_replica_is_spread_where_layers_can_be_cut_anew() -> None:
    """Two cells of three ranks: a pipeline with one of them hides it, since its layers do not divide evenly."""
    cells = topology(2, 3, {0: 3, 1: 3}, waves=24)
    assert [[s.cell for s in replica.segments] for replica in spread(cells).replicas] == [[0, 4, 2], [3, 1, 5]]
    options = DecisionOptions(horizon_ns=LONG)
    assert tensor_options(cells, cut=True) != tensor_options(cells)
    assert decide(cells, PROFILE, options).steady_ns < decide(cells, PROFILE, replace(options, graph=None)).steady_ns


def test_one_damaged_replica_keeps_its_cells() -> None:
    cells = topology(3, 4, {5: 3}, waves=4)
    assert packed(cells) == cells


def test_a_reduced_cell_lives_on_where_micro_batches_are_many() -> None:
    cells = topology(2, 2, {0: 3}, waves=16)
    plan = chosen(cells)
    assert 0 in computing(plan)
    assert plan_time(plan, PROFILE) < plan_time(instant_plan(parked(cells, [0]), PROFILE), PROFILE) * 3 // 4


def test_a_reduced_cell_is_parked_where_it_would_hold_its_pipeline_up() -> None:
    """One rank of four and one micro-batch a replica: the peers of its stage are done sooner."""
    cells = topology(3, 2, {0: 1}, waves=1)
    plan = chosen(cells)
    assert computing(plan) == {1, 2, 3, 4, 5}
    assert plan_time(plan, PROFILE) < plan_time(instant_plan(cells, PROFILE), PROFILE)
    validate_plan(plan, UNITS, PROFILE)


def test_a_reduced_cell_without_the_memory_is_parked_or_gets_fewer_layers() -> None:
    """It holds two of eight layers and has memory for one of them."""
    whole = topology(2, 4, {}, waves=8)
    need = max(memory_peaks(instant_plan(whole, HEAVY), HEAVY).values())
    cells = topology(2, 4, {1: 3}, waves=8, memory_bytes=need * 3 // 2)
    assert not crowded(chosen(cells, HEAVY), HEAVY) and 1 in computing(chosen(cells, HEAVY))
    tight = replace(cells, cells=tuple(replace(c, memory_bytes=need // 2) if c.id == 1 else c for c in cells.cells))
    assert crowded(instant_plan(tight, HEAVY), HEAVY) == (1,)
    assert 1 not in computing(chosen(tight, HEAVY))
    decision = decide(tight, HEAVY, DecisionOptions(horizon_ns=LONG))
    assert decision.steady is not None
    validate_plan(shape_plan(tight, decision.steady, HEAVY), UNITS, HEAVY)
    assert decision.steady_ns < decision.instant_ns
    held = [s.end - s.first for pipeline in decision.steady.pipelines for s in pipeline.segments if s.cell == 1]
    assert held == [1]


def test_without_memory_and_without_a_peer_there_is_no_instant_plan() -> None:
    cells = topology(1, 2, {0: 2}, waves=4, memory_bytes=1)
    with pytest.raises(PlanError, match=r"cells \[0\] lack the memory"):
        chosen(cells, HEAVY)


def test_each_axis_shortens_the_steady_step_after_a_rank_is_lost() -> None:
    """Eight of nine layers' work fits beside a cell of three ranks: the others take the rest."""
    cells = topology(2, 4, {1: 3}, waves=16)
    full = DecisionOptions(horizon_ns=LONG, split_backward=True)

    def steady(options: DecisionOptions) -> int:
        return decide(cells, PROFILE, options).steady_ns

    assert steady(full) < steady(replace(full, tensor=False))
    assert steady(full) <= steady(replace(full, graph=None))
    still = replace(full, graph=None, reroute=False, resize=False)
    assert steady(still) < steady(replace(still, tensor=False))


def test_a_decision_at_any_size_lets_cells_live_on() -> None:
    """256 replicas: too many pieces for tables, shapes are timed by their closed form."""
    cells = topology(256, 8, {8 * n: 3 for n in range(64)}, waves=8)
    found = decide(cells, PROFILE, DecisionOptions(horizon_ns=LONG, graph=GraphOptions(recut=False, pool=False)))
    assert found.instant is not None and not isinstance(found.instant, Plan) and found.instant.kind == "stay"
    dropped = decide(cells, PROFILE, DecisionOptions(horizon_ns=LONG, tensor=False))
    assert found.instant_ns < dropped.instant_ns


@pytest.mark.parametrize(("memory", "stays"), [(16_000, False), (20_000, True)])
def test_a_cell_with_several_stages_stays_with_the_memory_for_all_of_them(memory: int, stays: bool) -> None:
    """Two stages of two units each take 9,200 bytes, and half a cell has 8,000 or 10,000 bytes."""
    cells = topology(2, 2, {0: 2}, waves=4, memory_bytes=memory)
    spans = [(first, first + 2) for first in range(0, UNITS, 2)]
    replicas = (
        Replica(tuple(Segment(2 * number + stage % 2, *span) for stage, span in enumerate(spans)))
        for number in range(2)
    )
    only = GraphOptions(alike=False, recut=False, pool=False)
    shapes = candidate_shapes(replace(cells, replicas=tuple(replicas)), HEAVY, only)
    computing = {s.cell for shape in shapes for one in shape.pipelines if one.quota for s in one.segments}
    assert computing == {2, 3, *((0, 1) if stays else ())}


@given(damages(), st.integers(PPM, 2 * PPM))
def test_a_raised_cell_keeps_up_with_a_whole_one_at_most(cells: Topology, gain: int) -> None:
    for before, after in zip(cells.cells, raised(cells, gain).cells, strict=True):
        assert after.nominal_ppm == before.nominal_ppm
        if before.nominal_ppm == PPM:
            assert after == before
        else:
            assert before.rate_ppm <= after.rate_ppm <= PPM
            assert after.rate_ppm >= min(PPM, before.rate_ppm * gain // PPM) - 1


def test_a_clock_does_not_fall_by_being_raised() -> None:
    with pytest.raises(ValueError, match="gains at least nothing"):
        raised(topology(1, 1, {0: 2}), PPM - 1)


def test_without_a_reduced_cell_nothing_changes() -> None:
    for lost in (set(), {3}):
        cells = topology(2, 4, {}, lost, waves=4)
        assert tensor_options(cells) == (cells,)
        assert chosen(cells) == instant_plan(cells, PROFILE)
        assert steady_plan(cells, PROFILE) == steady_plan(cells, PROFILE, DecisionOptions(tensor=False))
