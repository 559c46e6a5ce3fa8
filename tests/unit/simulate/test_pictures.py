"""A table opens in Perfetto and as a picture, and shows what the plan does."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.observe.trace import Span, chrome_trace, draw_spans
from megatron.elastic.plan.planner import instant_plan
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.topology import regular_topology, without_cells
from megatron.elastic.simulate.__main__ import main
from megatron.elastic.simulate.charts import draw_goodput, draw_scenarios, shares_of_time
from megatron.elastic.simulate.goodput import Goodput
from megatron.elastic.simulate.pictures import plan_spans, track_names
from megatron.elastic.simulate.scenarios import Scenario, layer_profile, run_scenario


def test_trace_holds_every_action_once_without_overlap_on_a_track() -> None:
    profile = layer_profile(8)
    plan = instant_plan(without_cells(regular_topology(3, 4, 8, waves=5), [6]), profile, split_backward=True)
    spans = plan_spans(plan, profile)
    assert len(spans) == 3 * len(plan.pieces)
    assert max(span.end for span in spans) == plan_time(plan, profile)
    for track in {span.track for span in spans}:
        mine = sorted((span.start, span.end) for span in spans if span.track == track)
        assert all(a[1] <= b[0] for a, b in pairwise(mine))


def test_chrome_trace_is_what_perfetto_reads() -> None:
    spans = [Span(0, "F0", 0, 1000, "F", 0), Span(1, "F0", 1000, 3000, "F", 0), Span(1, "killed", 3000, 3000, "loss")]
    events = json.loads(chrome_trace(spans, {1: "rank 1"}))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["tid"], e["ts"], e["dur"]) for e in complete] == [(0, 0, 1), (1, 1, 2), (1, 3, 0)]
    assert [event["ph"] for event in events if event.get("cat") == "flow"] == ["s", "t"]
    named = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert named == {0: "cell 0", 1: "rank 1"}


def test_command_line_draws_a_table(tmp_path: Path) -> None:
    chart, trace = tmp_path / "table.png", tmp_path / "table.json"
    for kind in ("reroute", "resize", "steady"):
        command = ["table", "--lost", "2", "--waves", "3", "--plan", kind, "--chart", str(chart), "--trace", str(trace)]
        assert main(command) == 0
        assert chart.read_bytes()[:4] == b"\x89PNG"
        assert json.loads(trace.read_text())["traceEvents"]
        chart.unlink()


def test_picture_names_what_each_cell_holds(tmp_path: Path) -> None:
    profile = layer_profile(4)
    plan = instant_plan(regular_topology(1, 2, 4, waves=2), profile)
    assert track_names(plan) == {0: "cell 0 [0, 2)", 1: "cell 1 [2, 4)"}
    draw_spans(tmp_path / "a.svg", plan_spans(plan, profile), track_names(plan))
    assert "cell 1 [2, 4)" in (tmp_path / "a.svg").read_text()


def test_a_picture_of_a_run_marks_the_loss_and_how_long_its_recovery_took(tmp_path: Path) -> None:
    spans = [
        Span(0, "decide", 3_000_000, 5_000_000, "recovery"),
        Span(1, "settle", 4_000_000, 45_000_000, "recovery"),
        Span(2, "lost: signal SIGKILL", 3_000_000, 3_000_000, "loss"),
        Span(0, "F0", 0, 2_000_000, "F"),
    ]
    draw_spans(tmp_path / "run.svg", spans, {0: "rank 0 events", 1: "rank 1 events", 2: "rank 2 events"})
    drawn = (tmp_path / "run.svg").read_text()
    for text in ("lost: signal SIGKILL", "recovery 42 ms", "forward", "rank 2 events"):
        assert f"<!-- {text} -->" in drawn


SHARE = st.floats(0.0, 1.0)


@given(st.floats(-0.2, 1.0), SHARE, SHARE)
def test_shares_of_time_add_up_to_all_of_it(effective: float, stalled: float, redone: float) -> None:
    """A run that redoes more than it keeps has no effective time, rather than a bar below the axis."""
    shares = shares_of_time(Goodput("one", effective, stalled, redone, 1.0, 3, 0.0))
    assert min(shares.values()) >= 0.0
    measured = max(0.0, effective) + stalled + redone
    assert sum(shares.values()) == pytest.approx(max(1.0, measured))
    assert (shares["stalled"], shares["redone"]) == (stalled, redone)


def texts(path: Path) -> list[str]:
    """The texts of a drawing, which matplotlib also writes as comments."""
    return re.findall("<!-- (.*?) -->", path.read_text(encoding="utf-8"))


def test_a_chart_of_goodput_has_a_bar_a_policy(tmp_path: Path) -> None:
    results = [Goodput(name, 0.5, 0.2, 0.1, 0.9, 3, 0.0) for name in ("elaswave", "restart")]
    draw_goodput(results, tmp_path / "chart.svg", "8 devices")
    drawn = texts(tmp_path / "chart.svg")
    assert {"elaswave", "restart", "8 devices", *shares_of_time(results[0])} <= set(drawn)


def test_a_chart_of_scenarios_shows_those_of_so_many_spread_losses(tmp_path: Path) -> None:
    rows = [run_scenario(Scenario(dp, 2, 8, losses, "spread", waves=4)) for dp, losses in ((2, 1), (3, 1), (4, 2))]
    draw_scenarios(rows, tmp_path / "chart.svg", losses=1)
    drawn = texts(tmp_path / "chart.svg")
    assert [text.split()[0] for text in drawn if re.match(r"\dx\d", text)] == ["2x2", "3x2"]
    assert "throughput after 1 loss, before = 1" in drawn
    assert {"elaswave", "recycle", "torchft, batch shrinks", "bound"} <= set(drawn)
