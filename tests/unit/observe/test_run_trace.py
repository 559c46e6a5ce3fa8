"""A run's event log becomes a trace that Perfetto reads, with every recovery in it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.elastic.observe.event_kinds import BeginEvent, PhasesEvent, RankLostEvent, RecoveryEvent, TraceEvent
from megatron.elastic.observe.events import EventLog
from megatron.elastic.observe.phases import PhaseTimer
from megatron.elastic.observe.run_trace import main
from megatron.elastic.observe.timeline import Timeline

PHASES = {"B", "E", "X", "I", "i", "M", "s", "t", "f", "C", "b", "n", "e"}


def check_trace_format(text: str) -> list[dict[str, object]]:
    """The rules of the JSON object format: required fields by event type, finite times, spans that nest on a track."""
    document = json.loads(text)
    events = document["traceEvents"]
    for event in events:
        assert event["ph"] in PHASES
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["args"]
            continue
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    for track in {event["tid"] for event in events if event["ph"] == "X"}:
        spans = sorted((e["ts"], -e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == track)
        for (start, length), (later, _) in pairwise(spans):
            assert later >= start - length - 1e-3 or length == 0, f"spans cross on track {track}"
    return events


def write_run(folder: Path) -> None:
    """Two ranks; rank 1 dies in step 2, rank 0 traces what it does."""
    log, timeline = EventLog(folder, 0), Timeline(enabled=True)
    timer = PhaseTimer(timeline.moved)
    for step in (1, 2):
        timer.begin(step, "prepare")
        with timer.phase("compute"):
            start = timer.current.since_ns
            timeline.computed("F", 0, 0, 3, start, start + 100)
            timeline.computed("B", 0, 0, 3, start + 100, start + 300)
        if step == 2:
            timer.enter("recover")
            log.write(RankLostEvent(1, 0, "here", "signal SIGKILL", step))
            log.write(RecoveryEvent(step, "re-run", {"decide": 0.001, "edit": 0.002}))
        spent = timer.finish()
        log.write(PhasesEvent(step, spent))
        phases, work = timeline.take()
        log.write(TraceEvent(step, phases, work))
    other = EventLog(folder, 1)
    other.write(PhasesEvent(1, {"prepare": 1000, "compute": 5000}))


def test_a_run_with_a_loss_is_a_valid_trace_that_shows_the_recovery(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    out, picture = tmp_path / "trace.json", tmp_path / "run.png"
    assert main([str(tmp_path / "run"), "--out", str(out), "--png", str(picture)]) == 0
    events = check_trace_format(out.read_text())
    names = {(event["tid"], event["name"]) for event in events if event["ph"] == "X"}
    assert {(0, "decide"), (0, "edit"), (3, "lost: signal SIGKILL")} <= names
    assert {(1, "prepare"), (1, "compute"), (1, "recover"), (2, "F0"), (2, "B0"), (4, "compute")} <= names
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}  # type: ignore[index]
    assert tracks[2] == "rank 0 computes" and tracks[3] == "rank 1 events"
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_steps_can_be_cut_out(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    out = tmp_path / "trace.json"
    assert main([str(tmp_path / "run"), "--out", str(out), "--steps", "1"]) == 0
    assert not any(event["name"] == "decide" for event in check_trace_format(out.read_text()))


def test_two_launches_in_one_folder_are_drawn_apart(tmp_path: Path) -> None:
    """As a job that is queued again leaves them: ranks, incarnations and steps are the same, the machine is another."""
    elsewhere = 10**15
    for launch in ("first", "second"):
        log = EventLog(tmp_path / launch, 0)
        log.write(BeginEvent(launch, "clock"))
        log.write(PhasesEvent(1, {"compute": 1000}))
        log.generation = 1
        log.write(RankLostEvent(1, 0, "here", "signal SIGKILL", 2))
        log.write(RecoveryEvent(2, "re-run", {"decide": 0.001}))
        if launch == "first":
            log.write(TraceEvent(1, (("compute", 1, 2),), ()))
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "second" / "rank00000.jsonl").read_text().splitlines()]
    with (tmp_path / "first" / "rank00000.jsonl").open("a") as both:
        for line in lines:
            later = {"wall": line["wall"] + 100, "monotonic_ns": line["monotonic_ns"] + elsewhere}
            both.write(json.dumps({**line, **later}, separators=(",", ":")) + "\n")
    assert main([str(tmp_path / "first"), "--out", str(tmp_path / "trace.json")]) == 0
    events = [event for event in check_trace_format((tmp_path / "trace.json").read_text()) if event["ph"] == "X"]
    assert sum(event["name"] == "compute" for event in events) == 2
    for name in ("decide", "lost: signal SIGKILL"):
        first, second = sorted(float(str(event["ts"])) for event in events if event["name"] == name)
        assert 99e6 < second - first < 101e6, "the second began 100 s later, by the wall clock"


def test_nothing_to_draw_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), "--out", str(tmp_path / "x.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_place_that_cannot_be_written_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    nowhere, good = str(tmp_path / "no" / "x.json"), str(tmp_path / "x.json")
    for places in (["--out", nowhere], ["--out", good, "--png", str(tmp_path / "x.nothing")]):
        assert main([str(tmp_path / "run"), *places]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and said.startswith("--out or --png: "), said


def test_a_timeline_that_is_off_keeps_nothing() -> None:
    timeline = Timeline()
    PhaseTimer(timeline.moved).begin(1, "prepare")
    timeline.computed("F", 0, 0, 1, 0, 1)
    assert timeline.take() == ((), ())
