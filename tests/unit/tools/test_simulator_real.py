"""The comparison with real training shows no error where jobs take what the cost model says, and the one put in."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megatron.elastic.plan.timing import plan_time
from tools.bench.simulator_real import LAYOUTS, Layout, Row, Seen, compare, profile_of

TRUE = {"F": (3e6, 7e6, 5e6), "B": (4e6, 15e6, 9e6)}
"""ns of embedding, a layer, head."""
GAP, HOP = 400_000, 900_000


def ideal(layout: Layout, slower: float = 1.0) -> Seen:
    """A job that takes what its tables say at these costs; its compute phase ``slower`` times as long."""
    there, back = TRUE["F"], TRUE["B"]
    middle = [(there[1], back[1])] * layout.layers
    units = [(there[0], back[0]), *middle, (there[2], back[2])]
    pieces = {
        (op, span): sum(unit[at] for unit in units[span[0] : span[1]])
        for at, op in enumerate(("F", "B"))
        for span in pairwise(layout.cuts())
    }
    bare = Seen({}, pieces, [GAP], [HOP])
    profile = profile_of(layout, units, [bare])
    compute = {
        lost: slower * plan_time(layout.plan(profile, lost), profile) for lost in (False, True)[: 1 + layout.loses]
    }
    return Seen(compute, pieces, [GAP], [HOP])


def test_jobs_that_are_as_simulated_show_no_error() -> None:
    rows: dict[str, Row] = {}
    ratios: list[tuple[float, float]] = []
    compare({layout: ideal(layout) for layout in LAYOUTS}, rows, ratios)
    assert len(rows) == len(LAYOUTS) + 1
    for name, row in rows.items():
        assert row.error().median == pytest.approx(0.0, abs=1e-3), name
        assert row.own_error().median == pytest.approx(0.0, abs=1e-3), name
    assert ratios == [(pytest.approx(2.0), pytest.approx(2.0))]


def test_a_job_that_takes_longer_than_its_pieces_shows_it() -> None:
    rows: dict[str, Row] = {}
    slow = LAYOUTS[1]
    compare({layout: ideal(layout, 1.25 if layout == slow else 1.0) for layout in LAYOUTS}, rows, [])
    assert rows[str(slow)].error().median == pytest.approx(1 / 1.25 - 1, abs=1e-3)
    assert rows[str(LAYOUTS[0])].error().median == pytest.approx(0.0, abs=1e-3)
