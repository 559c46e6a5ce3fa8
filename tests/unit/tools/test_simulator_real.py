"""The comparison with real training shows no error where jobs take what the cost model says, and the one put in."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest

from megatron.elastic.plan.model import Piece
from megatron.elastic.plan.schedule.timing import execute
from megatron.elastic.simulate.calibrate import (
    OPS,
    Between,
    Line,
    Stage,
    StepTrace,
    TracedAction,
    TracedJob,
    Unit,
    calibrated,
)
from tools.bench.simulator_real import LAYOUTS, Layout, Row, Seen, compare

TRUE = {"F": Unit(3e6, 7e6, 5e6, 6e6), "B": Unit(4e6, 15e6, 9e6, 2e6)}
"""ns of embedding, a layer, head, and of a piece."""
LIES = Between({"F": Line(100_000, 0), "B": Line(50_000, 40_000)}, Line(400_000, 60_000), 300_000)
JITTER = (0.9, 1.0, 1.1)


def usual(layout: Layout) -> Mapping[tuple[str, Stage], float]:
    """The times that actions of a layout take."""
    cuts = layout.cuts()
    stages = [Stage(first, end, layout.units) for first, end in pairwise(cuts)]
    return {(op, stage): TRUE[op].of(stage) for op in OPS for stage in stages}


def ideal(layout: Layout, slower: float = 1.0, jitter: tuple[float, ...] = (1.0,)) -> Seen:
    """A job that takes what its tables say, a step for each of ``jitter``; its compute phases ``slower`` times that."""
    jobs = {}
    costs = usual(layout)
    for lost in (False, True)[: 1 + layout.loses]:
        plan, steps = layout.plan(lost), []
        for ratio in jitter:

            def took(op: str, piece: Piece, ratio: float = ratio) -> float:
                return costs[op, Stage(piece.first, piece.end, layout.units)] * ratio

            run = execute(plan, LIES.costs(plan, layout.units, took), record=True)
            work: dict[int, list[TracedAction]] = {cell.id: [] for cell in plan.cells}
            for at in run.intervals:
                piece, op = plan.pieces[at.piece], at.op.value
                stop = at.end - round(LIES.after[op].of(Stage(piece.first, piece.end, layout.units)))
                work[at.cell].append(TracedAction(op, piece.id, piece.first, piece.end, at.start, stop))
            phase = round(slower * LIES.makespan(plan, layout.units, took))
            steps.append({cell: StepTrace(tuple(done), phase) for cell, done in work.items()})
        jobs[lost] = TracedJob(layout.units, tuple(steps))
    return Seen(jobs)


def test_jobs_that_are_as_simulated_show_no_error() -> None:
    rows: dict[str, Row] = {}
    ratios: list[tuple[float, float]] = []
    compare({layout: ideal(layout) for layout in LAYOUTS}, rows, ratios)
    assert len(rows) == len(LAYOUTS) + 1
    for name, row in rows.items():
        assert row.error().median == pytest.approx(0.0, abs=2e-3), name
        assert row.replay_error().median == pytest.approx(0.0, abs=2e-3), name
    assert ratios == [(pytest.approx(2.0, rel=0.01), pytest.approx(2.0, rel=0.01))]


def test_a_job_that_takes_longer_than_its_pieces_shows_it() -> None:
    rows: dict[str, Row] = {}
    slow = next(layout for layout in LAYOUTS if layout.pipeline == 2 and layout.layers == 12)
    compare({layout: ideal(layout, 1.25 if layout == slow else 1.0) for layout in LAYOUTS}, rows, [])
    assert rows[str(slow)].error().median == pytest.approx(1 / 1.25 - 1, abs=5e-3)
    assert rows[str(slow)].replay_error().median == pytest.approx(1 / 1.25 - 1, abs=5e-3)


def test_what_a_piece_costs_is_told_from_what_its_ends_do() -> None:
    found = calibrated([ideal(layout).jobs[False] for layout in LAYOUTS])
    for op in OPS:
        assert found.pieces[op] == pytest.approx(TRUE[op], rel=1e-3)
    assert found.between.after["B"] == pytest.approx(LIES.after["B"], rel=1e-2)
    assert found.between.across == pytest.approx(LIES.across, rel=1e-2)


def test_jobs_that_are_all_pipelines_do_not_tell_them_apart() -> None:
    pipelines = [ideal(layout).jobs[False] for layout in LAYOUTS if layout.pipeline == 2]
    with pytest.raises(ValueError, match="without a pipeline"):
        calibrated(pipelines)


def test_a_step_lasts_as_long_as_the_slower_of_two_that_vary() -> None:
    """Steps in which a rank is a tenth faster or slower are as frequent as others: of two ranks, the slower counts."""
    plain = Layout(1, 6, 4)
    steady = calibrated([ideal(layout).jobs[False] for layout in LAYOUTS])
    varying = calibrated([ideal(layout, jitter=JITTER).jobs[False] for layout in LAYOUTS])
    base = steady.compute_ns(plain.plan(False), plain.units)
    assert varying.compute_ns(plain.plan(False), plain.units) > 1.04 * base, "the slower of two draws"
    assert varying.compute_ns(plain.plan(True), plain.units) == pytest.approx(base * 2, rel=0.02), "of one, the median"
