"""Tables of every kind: Megatron's orders where regular, good and within memory where not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron.elastic.plan.cost import plan_costs
from megatron.elastic.plan.model import Cell, Grid, Op, Plan, Profile, Replica, Segment, Topology, UnitCost
from megatron.elastic.plan.planner import instant_plan, nominal_plan
from megatron.elastic.plan.schedule.listing import Scheduler
from megatron.elastic.plan.schedule.table import index_edges, interleaved, one_f_one_b, tables_from_orders
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.schedule.validate import held_rows_peak, validate_plan
from megatron.elastic.plan.topology import regular_topology, without_cells


def even_profile(units: int, latency_ns: int = 0) -> Profile:
    """A layer: forward 1, backward 2 (half of it weight gradient), in microseconds."""
    unit = UnitCost(1000, 2000, 1000, 0, 0, 1, 0)
    return Profile((unit,) * units, latency_ns=latency_ns)


def looped(stages: int, chunks: int, waves: int, dp: int = 1) -> Topology:
    """Replicas whose cells hold ``chunks`` model chunks each, one unit a chunk."""
    units = stages * chunks
    cells = tuple(Cell(i, (i,)) for i in range(dp * stages))
    replicas = tuple(
        Replica(tuple(Segment(r * stages + u % stages, u, u + 1) for u in range(units))) for r in range(dp)
    )
    return Topology(Grid(dp * waves, 1, dp), units, cells, replicas)


def compute_order(plan: Plan, cell: int) -> list[str]:
    """'F2.0' = forward of the cell's micro-batch 2, unit 0."""
    kept = [a for a in plan.table(cell) if a.op in (Op.FORWARD, Op.BACKWARD)]
    return [f"{a.op.value}{plan.pieces[a.piece].rows[0]}.{plan.pieces[a.piece].first}" for a in kept]


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (4, 2), (4, 4), (4, 9)])
def test_1f1b_time_is_the_textbook_formula(stages: int, count: int) -> None:
    plan = nominal_plan(regular_topology(1, stages, stages, waves=count), even_profile(stages))
    assert plan_time(plan, even_profile(stages)) == (count + stages - 1) * 3000


def test_warm_up_is_megatrons() -> None:
    order = [op for op, _ in one_f_one_b(range(6), stage=1, stages=4)]
    assert order[:4] == [Op.FORWARD, Op.FORWARD, Op.FORWARD, Op.BACKWARD]
    assert order[-2:] == [Op.BACKWARD, Op.BACKWARD]


def test_interleaved_order_is_megatrons_on_two_stages_and_two_chunks() -> None:
    """Worked by hand from arXiv 2104.04473, section 2.2: warm-up 2(2-0-1)+(2-1)2 = 4 forwards on stage 0."""
    plan = nominal_plan(looped(stages=2, chunks=2, waves=4), even_profile(4))
    validate_plan(plan, 4)
    assert compute_order(plan, 0)[:8] == ["F0.0", "F1.0", "F0.2", "F1.2", "F2.0", "B0.2", "F3.0", "B1.2"]
    assert compute_order(plan, 1)[:6] == ["F0.1", "F1.1", "F0.3", "B0.3", "F1.3", "B1.3"]


def test_interleaving_shrinks_the_bubble_by_the_number_of_chunks() -> None:
    stages, waves, chunks = 4, 8, 2
    plan = nominal_plan(looped(stages, chunks, waves), even_profile(stages * chunks))
    validate_plan(plan, stages * chunks)
    assert plan_time(plan, even_profile(8)) == (waves * chunks + stages - 1) * 3000


def test_interleaved_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match="multiple"):
        interleaved([[0, 1, 2], [3, 4, 5]], 0, 2)


@pytest.mark.parametrize("waves", [4, 8, 16])
def test_split_backward_fills_bubbles_without_holding_more_rows(waves: int) -> None:
    """ZB-H1 (arXiv 2401.10241): the neediest stage's memory for all, a third of 1F1B's bubble when F = BI = BW."""
    stages = 4
    topology, profile = regular_topology(1, stages, stages, waves=waves), even_profile(stages)
    plain, split = nominal_plan(topology, profile), instant_plan(topology, profile, split_backward=True)
    validate_plan(split, stages)
    work = waves * 3000
    assert plan_time(plain, profile) - work == (stages - 1) * 3000
    assert plan_time(split, profile) - work == (stages - 1) * 1000
    assert all(held_rows_peak(split, c) <= held_rows_peak(plain, 0) for c in range(stages))


@pytest.mark.parametrize("lost", range(8))
def test_rerouting_with_split_backward_comes_close_to_the_bottleneck(lost: int) -> None:
    """The cell with twice the work bounds the step: 32 micro-batches of 4 layers, plus filling up to its stage."""
    profile = even_profile(32)
    topology = without_cells(regular_topology(2, 8, 32, waves=16), [lost])
    plan = instant_plan(topology, profile, split_backward=True)
    validate_plan(plan, 32)
    bottleneck = 32 * 12_000 + lost * 4_000
    assert plan_time(plan, profile) <= bottleneck * 1.11
    whole = instant_plan(topology, profile)
    assert plan_time(whole, profile) <= 32 * 12_000 + lost * 12_000 + 24_000


def test_ragged_replicas_get_their_own_1f1b() -> None:
    seed = 20261121
    rng = random.Random(seed)
    for _ in range(20):
        lengths = [rng.randint(1, 5) for _ in range(3)]
        cells, replicas, at = [], [], 0
        for length in lengths:
            cuts = [0, *sorted(rng.sample(range(1, 8), length - 1)), 8]
            replicas.append(Replica(tuple(Segment(at + i, cuts[i], cuts[i + 1]) for i in range(length))))
            cells += [Cell(at + i, (at + i,)) for i in range(length)]
            at += length
        topology = Topology(Grid(18, 2, 3), 8, tuple(cells), tuple(replicas))
        plan = nominal_plan(topology, even_profile(8))
        validate_plan(plan, 8)
        for length, replica in zip(lengths, replicas, strict=True):
            peaks = [held_rows_peak(plan, s.cell) // 2 for s in replica.segments]
            assert peaks == [min(3, length - i) for i in range(length)], f"seed {seed}"


def test_a_cell_twice_in_a_broken_interleaved_replica_still_runs() -> None:
    topology = looped(stages=3, chunks=2, waves=5, dp=2)
    profile = even_profile(6, latency_ns=50)
    for lost in range(6):
        damaged = replace(topology, cells=tuple(c for c in topology.cells if c.id != lost))
        for split in (False, True):
            validate_plan(instant_plan(damaged, profile, split_backward=split), 6)


@pytest.mark.parametrize("split", [False, True])
def test_tables_take_no_longer_than_the_list_scheduler_foresaw(split: bool) -> None:
    """Two independent clocks, the scheduler's events and the table walk, agree on damaged plans with transfers."""
    profile = even_profile(12, latency_ns=70)
    for lost in ([1], [1, 6], [4, 8]):
        topology = without_cells(regular_topology(3, 4, 12, 2, 6), lost)
        plan = instant_plan(topology, profile, "resize", split_backward=split)
        index = index_edges(plan.pieces, plan.edges)
        costs = plan_costs(plan.pieces, plan.edges, plan.cells, profile)
        everything = [piece.id for piece in plan.pieces]
        waves = [plan.grid.nominal_microbatch(piece.rows[0]) // 3 for piece in plan.pieces]
        caps = {cell.id: 16 for cell in plan.cells}
        listing = Scheduler(everything, plan.pieces, plan.edges, index, waves, costs).run(caps, split)
        tables = tables_from_orders(listing.orders(), index)
        assert listing.forced == 0
        assert plan_time(replace(plan, tables=tables), profile) == listing.makespan
        validate_plan(replace(plan, tables=tables), 12)
