"""Plans after any damage are complete, acyclic and the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.elastic.plan.dataflow import PlanError, apportion, deal, row_groups
from megatron.elastic.plan.model import Op, Plan, Profile, Replica, Segment, Topology, UnitCost
from megatron.elastic.plan.planner import draft_instant, instant_plan, nominal_plan
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.schedule.validate import InvalidPlan, held_rows_peak, validate_plan
from megatron.elastic.plan.topology import regular_topology, without_cells, without_ranks


def regular(dp: int, pp: int, layers: int, mbs: int = 1, waves: int = 4) -> Topology:
    return regular_topology(dp, pp, layers, mbs, waves)


def without(topology: Topology, *lost: int) -> Topology:
    return without_cells(topology, lost)


@st.composite
def damaged(draw: st.DrawFn) -> Topology:
    dp, pp = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    layers = draw(st.integers(pp, 12))
    topology = regular(dp, pp, layers, draw(st.integers(1, 3)), draw(st.integers(1, 6)))
    if draw(st.booleans()):
        replicas = []
        for r in range(dp):
            inner = st.sets(st.integers(1, max(1, layers - 1)), min_size=pp - 1, max_size=pp - 1)
            cuts = [0, *sorted(draw(inner)), layers]
            replicas.append(Replica(tuple(Segment(r * pp + s, cuts[s], cuts[s + 1]) for s in range(pp))))
        topology = replace(topology, replicas=tuple(replicas))
    lost = draw(st.sets(st.integers(0, dp * pp - 1), max_size=dp * pp - 1))
    speeds = draw(st.lists(st.sampled_from([500_000, 900_000, 1_000_000]), min_size=dp * pp, max_size=dp * pp))
    cells = tuple(replace(c, speed_ppm=speeds[c.id]) for c in topology.cells if c.id not in lost)
    return replace(topology, cells=cells)


@settings(max_examples=150, deadline=None, print_blob=True)
@given(damaged(), st.sampled_from(["reroute", "resize"]), st.booleans(), st.booleans())
def test_instant_plans_of_random_damage_are_valid(topology: Topology, flow: str, mix: bool, split: bool) -> None:
    try:
        plan = instant_plan(topology, None, flow, mix, split)  # type: ignore[arg-type]
    except PlanError as error:
        assert "no living holder" in str(error)
        assume(False)
        return
    validate_plan(plan, topology.units)
    if not mix:
        assert all(len(row_groups(plan.grid, piece)) == 1 for piece in plan.pieces)


@settings(max_examples=100, deadline=None, print_blob=True)
@given(damaged(), st.sampled_from(["reroute", "resize"]), st.booleans(), st.integers(0, 10**6))
def test_a_draft_tells_the_time_of_its_tables_and_writes_some_of_them(
    topology: Topology, flow: str, split: bool, latency: int
) -> None:
    units = tuple(UnitCost(1000 + 7 * unit, 2000, 900, 1, 1, 100, 1) for unit in range(topology.units))
    profile = Profile(units, latency_ns=latency)
    try:
        draft = draft_instant(topology, profile, flow, False, split)  # type: ignore[arg-type]
    except PlanError:
        assume(False)
        return
    assert draft.time_ns == plan_time(draft.plan, profile)
    tables = dict(draft.plan.tables)
    for cell in tables:
        some = dict(draft.beside([cell]).tables)
        assert cell in some and all(tables[other] == table for other, table in some.items())
        sends = {action.edge for table in some.values() for action in table if action.op is Op.SEND_FORWARD}
        assert sends == {action.edge for table in some.values() for action in table if action.op is Op.RECV_FORWARD}


def test_nominal_plan_is_megatrons_grid_and_1f1b() -> None:
    plan = nominal_plan(regular(dp=2, pp=3, layers=6, mbs=2, waves=4))
    validate_plan(plan, 6)
    for piece in plan.pieces:
        microbatch = piece.rows[0] // 2
        assert piece.rows == (2 * microbatch, 2 * microbatch + 1)
        assert piece.cell // 3 == microbatch % 2
    compute = [a for a in plan.table(1) if a.op in (Op.FORWARD, Op.BACKWARD)]
    order = [(a.op.value, plan.pieces[a.piece].rows[0] // 4) for a in compute]
    assert order == [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("F", 3), ("B", 2), ("B", 3)]
    assert [held_rows_peak(plan, cell) // 2 for cell in range(3)] == [3, 2, 1]


def test_reroute_leaves_other_stages_alone_and_shares_evenly() -> None:
    topology = regular(dp=4, pp=2, layers=4, waves=6)
    before, after = nominal_plan(topology), instant_plan(without(topology, 3))
    kept = {(p.cell, p.first, p.rows) for p in before.pieces if p.cell != 3}
    assert kept <= {(p.cell, p.first, p.rows) for p in after.pieces}
    rows = {c: sum(len(p.rows) for p in after.pieces if p.cell == c) for c in (1, 5, 7)}
    assert rows == {1: 8, 5: 8, 7: 8}


def test_resize_cuts_a_microbatch_over_peers_in_every_wave() -> None:
    topology = regular(dp=3, pp=2, layers=4, mbs=4, waves=3)
    plan = instant_plan(without(topology, 1), None, "resize")
    validate_plan(plan, 4)
    for wave in range(3):
        rows = [sum(len(p.rows) for p in plan.pieces if p.cell == c and p.rows[0] // 12 == wave) for c in (3, 5)]
        assert rows == [6, 6]
    mixed = instant_plan(without(topology, 1), None, "resize", mix_microbatches=True)
    validate_plan(mixed, 4)
    assert len(mixed.pieces) < len(plan.pieces)
    assert {g.microbatch for p in mixed.pieces for g in row_groups(mixed.grid, p)} == set(range(9))


def test_a_slow_holder_takes_fewer_rows() -> None:
    topology = without(regular(dp=3, pp=1, layers=1, waves=30), 0)
    topology = replace(topology, cells=(topology.cells[0], replace(topology.cells[1], speed_ppm=800_000)))
    plan = instant_plan(topology)
    rows = [sum(len(p.rows) for p in plan.pieces if p.cell == c) for c in (1, 2)]
    assert rows == [50, 40]


def test_the_other_ranks_of_a_broken_tensor_parallel_group_are_parked() -> None:
    plan = instant_plan(without_ranks(regular_topology(2, 2, 4, waves=2, tp=2), [5]))
    validate_plan(plan, 4)
    assert plan.parked == (4,)
    assert [cell.id for cell in plan.cells] == [0, 1, 3]


def test_a_unit_without_holder_is_named() -> None:
    with pytest.raises(PlanError, match=r"units \[2, 4\) have no living holder"):
        instant_plan(without(regular(dp=2, pp=2, layers=4), 1, 3))


def test_a_digest_is_the_same_in_another_process_and_differs_for_another_plan() -> None:
    topology = without(regular(dp=3, pp=4, layers=8), 5)
    code = (
        "from megatron.elastic.plan import planner, topology as t; "
        "print(planner.instant_plan(t.without_cells(t.regular_topology(3, 4, 8, 1, 4), [5])).digest)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    mine = instant_plan(topology).digest
    assert out.stdout.strip() == mine
    assert instant_plan(topology, None, "resize", True).digest != nominal_plan(regular(3, 4, 8)).digest
    assert instant_plan(without(regular(dp=3, pp=4, layers=8), 6)).digest != mine


def _broken(plan: Plan) -> list[tuple[str, Plan]]:
    """The same plan, damaged in one way each."""
    cell, table = plan.tables[0]
    rest = plan.tables[1:]
    forward = next(a for a in table if a.op is Op.FORWARD)
    backward = next(a for a in table if a.op is Op.BACKWARD)
    swapped = tuple(backward if a is forward else forward if a is backward else a for a in table)
    first = plan.pieces[0]
    return [
        ("dropped action", replace(plan, tables=((cell, table[1:]), *rest))),
        ("backward first", replace(plan, tables=((cell, swapped), *rest))),
        ("doubled action", replace(plan, tables=((cell, (*table, table[0])), *rest))),
        ("lost piece", replace(plan, pieces=plan.pieces[:-1], tables=plan.tables)),
        ("lost edge", replace(plan, edges=plan.edges[:-1])),
        ("wrong rows", replace(plan, pieces=(replace(first, rows=(first.rows[0] + 1,)), *plan.pieces[1:]))),
        ("dead cell", replace(plan, cells=plan.cells[1:])),
        ("reversed", replace(plan, tables=((cell, tuple(reversed(table))), *rest))),
    ]


@pytest.mark.parametrize("case", range(8))
def test_validator_refuses_a_broken_plan(case: int) -> None:
    _, plan = _broken(nominal_plan(regular(dp=2, pp=2, layers=4)))[case]
    with pytest.raises((InvalidPlan, IndexError)):
        validate_plan(plan, 4)


def test_validator_finds_a_deadlock() -> None:
    """Stage 0 wants the first gradient before it sends the second micro-batch, stage 1 runs both forwards first."""
    plan = nominal_plan(regular(dp=1, pp=2, layers=2, waves=2))
    tables = dict(plan.tables)
    ops = {(a.op.value, a.piece): a for t in tables.values() for a in t}
    first = [p.id for p in plan.pieces if p.cell == 0]
    last = [p.id for p in plan.pieces if p.cell == 1]
    stage0 = [ops[o, p] for p in first for o in ("F", "SF", "RB", "B")]
    stage1 = [ops[o, p] for p in last for o in ("RF", "F")] + [ops[o, p] for p in last for o in ("B", "SB")]
    with pytest.raises(InvalidPlan, match="deadlock"):
        validate_plan(replace(plan, tables=((0, tuple(stage0)), (1, tuple(stage1)))), 2)


@given(st.integers(0, 200), st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 9))
def test_apportionment_is_exact_and_close(total: int, weights: list[int], rotation: int) -> None:
    assume(sum(weights))
    parts = apportion(total, weights, rotation)
    assert sum(parts) == total
    assert all(abs(p * sum(weights) - total * w) < sum(weights) for p, w in zip(parts, weights, strict=True))
    order = deal(total, parts, rotation)
    assert [order.count(h) for h in range(len(parts))] == list(parts)
