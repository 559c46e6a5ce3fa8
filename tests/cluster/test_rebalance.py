"""Measured speeds change the plan at the same boundary on every rank, and the next vote finds all plans equal."""

from __future__ import annotations

from dataclasses import replace

from megatron.elastic.engine.compute.vote import Tally
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.transaction.rebalance import Rebalancer
from megatron.elastic.plan.pace import Range
from megatron.elastic.plan.profile import PPM
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, Program, RankProcess, run
from tests.cluster.test_migrate import engine_of

SECOND, STEPS = 10**9, 8
SLOW_CELL = 1
"""Of replica 0, second stage."""


def rebalancer_of(rank: RankProcess) -> Rebalancer:
    return engine_of(rank)._rebalancer


def rows_of(engine: Engine, cell: int) -> int:
    return len({row for piece in engine.view.plan.pieces if piece.cell == cell for row in piece.rows})


def times_of(engine: Engine, slowdown: float) -> dict[Range, tuple[int, int]]:
    """Times of a step in which all cells take a second a row, and one of them ``slowdown`` times as long."""
    rows: dict[Range, int] = {}
    for piece in engine.view.plan.pieces:
        key = (piece.cell, piece.first, piece.end)
        rows[key] = rows.get(key, 0) + len(piece.rows)
    spent = {key: round(SECOND * count * (slowdown if key[0] == SLOW_CELL else 1.0)) for key, count in rows.items()}
    return {key: (time // 3, time - time // 3) for key, time in spent.items()}


def let_votes_measure(rank: RankProcess, slowdown: float, until: int, unsteady: int = 0) -> None:
    """From now on, votes up to step ``until`` carry these times; ``unsteady`` ranks have no clock to rely on."""
    engine, rebalancer = engine_of(rank), rebalancer_of(rank)
    observe = rebalancer.observe

    def measured(total: Tally) -> None:
        if engine.record.version < until:
            total = replace(total, times=times_of(engine, slowdown), steady=total.voters - unsteady)
        observe(total)

    rebalancer.observe = measured  # type: ignore[method-assign]


def observing(slowdown: float, unsteady: int = 0) -> tuple[list[int], Cluster]:
    """Rows of the slow cell after each step, the same on all ranks, where votes from step 3 on measure ``slowdown``."""
    rows: dict[int, set[int]] = {}

    def fenced(rank: RankProcess, step: int) -> None:
        if step == 2:
            let_votes_measure(rank, slowdown, STEPS, unsteady)
        rows.setdefault(step, set()).add(rows_of(engine_of(rank), SLOW_CELL))

    cluster = run(f"pp2dp3 steps={STEPS} seed=1", Program(fenced=fenced))
    check(cluster)  # votes compare the plans: a rank that planned by itself would end the job
    assert all(len(seen) == 1 for seen in rows.values()), f"ranks differ: {rows}"
    return [rows[step].pop() for step in sorted(rows)], cluster


def test_a_slow_cell_is_given_fewer_samples_from_the_boundary_after_the_vote_on() -> None:
    rows, cluster = observing(3.0)
    changed = next(step for step, count in enumerate(rows) if count != 2)
    assert rows[:changed] == [2] * changed and changed >= 3, "not in the step that measured it"
    assert all(count < 2 for count in rows[changed:]), rows
    speeds = {engine_of(process).record.speeds for process in cluster.finished}
    assert len(speeds) == 1, "the record has them, for ranks that join"
    assert [(cell, round(speed, -4)) for cell, speed in speeds.pop()] == [(SLOW_CELL, 330_000)]


def test_no_plan_changes_for_times_that_some_rank_could_not_measure() -> None:
    rows, cluster = observing(3.0, unsteady=1)
    assert set(rows) == {2} and all(rebalancer_of(process).measured is None for process in cluster.finished)


def test_no_plan_changes_for_small_differences() -> None:
    rows, cluster = observing(1.1)
    assert set(rows) == {2}
    assert all(rebalancer_of(process).measured is not None for process in cluster.finished), "costs are known though"


def test_a_new_generation_keeps_the_speeds_and_forgets_what_they_were_measured_from() -> None:
    def fenced(rank: RankProcess, step: int) -> None:
        if step == 2:
            let_votes_measure(rank, 3.0, until=6)

    fault = "kill:rank=0,step=7,point=before_reduce"
    cluster = run(f"pp2dp3 steps=7 seed=1 back=never {fault}", Program(fenced=fenced))
    check(cluster)
    for process in cluster.finished:
        rebalancer, record = rebalancer_of(process), engine_of(process).record
        assert rebalancer.measured is None
        assert rebalancer.pace.speeds() == record.speeds and dict(record.speeds).keys() == {SLOW_CELL}


def test_a_cell_whose_slow_rank_is_drained_counts_as_fast() -> None:
    """The vote that names the cell's new ranks names no speed of the old ones, and no later one does."""
    measured = set[int]()

    def fenced(rank: RankProcess, step: int) -> None:
        if step == 2:
            let_votes_measure(rank, 3.0, until=7)
        measured.update(cell for cell, _ in engine_of(rank).record.speeds)

    scenario = "tp4dp2 tensor=live-on steps=12 seed=1 back=never mirrors=1 drain:rank=6,step=8"
    cluster = run(scenario, Program(fenced=fenced))
    check(cluster)
    assert measured == {SLOW_CELL}
    assert not any(cell.speed_ppm < PPM for process in cluster.finished for cell in process.plans[-1].cells)
    for process in cluster.finished:
        assert len(engine_of(process).view.plan.cells[SLOW_CELL].ranks) == 3
        assert engine_of(process).record.speeds == rebalancer_of(process).pace.speeds() == ()


def test_without_the_frequency_axis_no_clock_is_told_or_kept() -> None:
    def fenced(rank: RankProcess, step: int) -> None:
        rebalancer, tally = rebalancer_of(rank), Tally()
        assert rebalancer.clocked_cells() == ()
        rebalancer.add_to(tally)
        assert tally == Tally()
        rebalancer.at_boundary()
        assert engine_of(rank).view.plan.frequencies_khz == ()

    check(run("steps=2", Program(fenced=fenced)))
