"""The comparison with real training shows no error where jobs take what the cost model says, and the one put in."""

from __future__ import annotations

import pytest

from megatron.elastic.plan.cost import plan_costs
from megatron.elastic.plan.timing import execute
from tools.bench.simulator_real import LAYOUTS, Layout, Row, Seen, Work, compare, profile_of, summed_up

TRUE = {"F": (3e6, 7e6, 5e6), "B": (4e6, 15e6, 9e6)}
"""ns of embedding, a layer, head."""
GAP, HOP = 400_000, 900_000


def ideal(layout: Layout, slower: float = 1.0) -> Seen:
    """A job that takes what its tables say at these costs, as traced; its compute phase ``slower`` times as long."""
    there, back = TRUE["F"], TRUE["B"]
    units = [(there[0], back[0]), *[(there[1], back[1])] * layout.layers, (there[2], back[2])]
    profile = profile_of(layout, units, [Seen({}, {}, {}, GAP, HOP)])
    slowest: dict[int, int] = {}
    traces: dict[int, dict[int, list[Work]]] = {}
    for step, lost in enumerate((False, True)[: 1 + layout.loses]):
        plan = layout.plan(profile, lost)
        run = execute(plan, plan_costs(plan.pieces, plan.edges, plan.cells, profile), record=True)
        slowest[step] = round(slower * run.makespan)
        traces[step] = {cell.id: [] for cell in plan.cells}
        for at in run.intervals:
            piece = plan.pieces[at.piece]
            work = Work(at.op.value, piece.id, piece.first, piece.end, at.start, at.end - GAP)
            traces[step][at.cell].append(work)
    return summed_up(layout, {bool(step): [step] for step in slowest}, slowest, traces)


def test_jobs_that_are_as_simulated_show_no_error() -> None:
    rows: dict[str, Row] = {}
    ratios: list[tuple[float, float]] = []
    compare({layout: ideal(layout) for layout in LAYOUTS}, rows, ratios)
    assert len(rows) == len(LAYOUTS) + 1
    for name, row in rows.items():
        assert row.error().median == pytest.approx(0.0, abs=1e-3), name
        assert row.replay_error().median == pytest.approx(0.0, abs=1e-3), name
    assert ratios == [(pytest.approx(2.0), pytest.approx(2.0))]


def test_a_job_that_takes_longer_than_its_pieces_shows_it() -> None:
    rows: dict[str, Row] = {}
    slow = LAYOUTS[1]
    compare({layout: ideal(layout, 1.25 if layout == slow else 1.0) for layout in LAYOUTS}, rows, [])
    assert rows[str(slow)].error().median == pytest.approx(1 / 1.25 - 1, abs=1e-3)
    assert rows[str(slow)].replay_error().median == pytest.approx(1 / 1.25 - 1, abs=1e-3)
    assert rows[str(LAYOUTS[0])].error().median == pytest.approx(0.0, abs=1e-3)
