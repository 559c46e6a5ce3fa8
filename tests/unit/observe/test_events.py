"""An event written is the event read, whoever else writes and however the writer ends."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.observe.event_kinds import (
    EVENT_KINDS,
    BeginEvent,
    CertificateEvent,
    ClockEvent,
    EndEvent,
    ExpertsEvent,
    GenerationEvent,
    LostStateEvent,
    MigrationEvent,
    PhasesEvent,
    PlanEvent,
    ProtectionEvent,
    RankLostEvent,
    ReadyEvent,
    RecordEvent,
    RecoveryEvent,
    ReportEvent,
    SlowRankEvent,
    StepEvent,
    SubstitutionEvent,
    ToleranceEvent,
    TraceEvent,
)
from megatron.elastic.observe.events import EventLog, clock_name, read_events

EVENTS = [
    GenerationEvent(3, "loss", (0, 1, 3), lost=(2,), parked=(3,)),
    RankLostEvent(2, 0, "node-a", "signal SIGKILL", 7, ("Traceback", "boom ü"), (2, 3), stage=1, replica=0),
    PlanEvent(7, "ab12", ((0, 1, 0, 4), (1, 2, 0, 4)), {"1": 6, "2": 2}, ("instant",), 0.002),
    ReadyEvent(0.05),
    PhasesEvent(7, {"compute": 12_000_000, "reduce": 5}, applied=((7, 6, 3, 0),)),
    RecoveryEvent(7, "re-run", {"decide": 0.01, "edit": 0.2}),
    MigrationEvent(8, 6, 2, 4, 595_200, 0.29, 0.001),
    ProtectionEvent(9, 0.412, 1, 12),
    CertificateEvent(7, "recovery", True, 96, 96, 0.004, 12, "ab", ("block (0, 0, 1) has no owner",)),
    StepEvent(7, (56, 64), 0.3, {"lm loss": 3.5}, grad_norm=math.inf, learning_rate=1e-4, attempts=2, ledger="ff"),
    ToleranceEvent(8, 2, 1, (1,), (("a", "b"), ("a", "c")), 3, "state now survives", "cd", ((0, 1), (1, 2))),
    SubstitutionEvent("--transformer-impl", "transformer_engine", "local", "no CUDA"),
    ExpertsEvent(16, {"1": (8, 0, 3)}, 1.25),
    SlowRankEvent(9, 4, 500_000),
    ClockEvent(9, 1_500_000, 1_755_000, 1_740_000, True, 250_000),
    BeginEvent("job", "boot time:[1]"),
    RecordEvent(8, "vote", "cd", "ab", (56, 64), (7, 3, 0), "ff", 0.5),
    RecordEvent(8, "vote", "cd", placement="ef", homes=((0, 1), (1, 3)), oldest=7, retained=2, coming=True, short=3),
    RecordEvent(8, "decision", "cd", members=(0, 1, 3), resolution="revote", again=(8, 3, 1)),
    ReportEvent(8, 7, 8, ((7, 3, 0),), ((8, 3, 1, 0, 16),), "ef", torn=1, admitted=True),
    LostStateEvent(8, 2, ((0, 0, 1, 8, ((8, 3, 0),)),)),
    EndEvent(8, 3, "drained"),
    TraceEvent(9, (("compute", 5, 90), ("vote", 90, 100)), (("F", 0, 0, 3, 6, 20), ("BW", 0, 0, 3, 50, 70))),
]


def test_every_kind_survives_the_log(tmp_path):
    assert {event.kind for event in EVENTS} == set(EVENT_KINDS)
    log = EventLog(tmp_path / "new" / "events", rank=4, incarnation=2)
    assert log.enabled
    log.generation = 3
    for event in EVENTS:
        log.write(event)
    log.close()
    log.close()
    records = read_events(tmp_path / "new" / "events")
    assert [record.event for record in records] == EVENTS
    assert {(r.rank, r.incarnation, r.generation) for r in records} == {(4, 2, 3)}
    times = [(r.wall, r.monotonic_ns) for r in records]
    assert times == sorted(times)


def test_lines_are_plain_json(tmp_path):
    log = EventLog(tmp_path, rank=0)
    log.write(StepEvent(1, (0, 8), 0.1, {"lm loss": math.nan}, grad_norm=-math.inf))
    (file,) = tmp_path.iterdir()

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    assert json.loads(file.read_text(), parse_constant=refuse)["event"]["losses"] == {"lm loss": "nan"}
    (record,) = read_events(tmp_path)
    assert isinstance(record.event, StepEvent)
    assert math.isnan(record.event.losses["lm loss"]) and record.event.grad_norm == -math.inf


@given(st.floats(), st.lists(st.text()), st.dictionaries(st.text(), st.integers(-(2**63), 2**63)))
def test_any_value_survives_the_log(tmp_path_factory, number, lines, nanoseconds):
    directory = tmp_path_factory.mktemp("events")
    log = EventLog(directory, rank=0)
    events = [
        RankLostEvent(0, 0, "h", "c", 1, tuple(lines)),
        PhasesEvent(1, nanoseconds),
        CertificateEvent(1, "t", True, 1, 1, number),
    ]
    for event in events:
        log.write(event)
    log.close()
    back = [record.event for record in read_events(directory)]
    assert back[:2] == events[:2]
    assert isinstance(back[2], CertificateEvent)
    assert back[2].seconds == number or (math.isnan(back[2].seconds) and math.isnan(number))


def test_processes_of_one_machine_share_a_clock_and_name_it_alike():
    code = "from megatron.elastic.observe.events import clock_name; print(clock_name())"
    told = {subprocess.check_output([sys.executable, "-c", code], text=True).strip() for _ in range(2)}
    assert told == {clock_name()}


def test_without_a_directory_nothing_is_written():
    log = EventLog(None, rank=0)
    assert not log.enabled
    log.write(EVENTS[0])


WRITER = """
import sys
from megatron.elastic.observe.event_kinds import StepEvent
from megatron.elastic.observe.events import EventLog
log = EventLog(sys.argv[1], rank=int(sys.argv[2]), incarnation=int(sys.argv[3]))
step = 0
while True:
    step += 1
    log.write(StepEvent(step, (0, 8), 0.1, {"x" * 200: 1.0}))
    if step == 10:
        print("ready", flush=True)
"""


def test_killed_writers_leave_whole_lines_and_a_successor_appends(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(rank), str(life)], stdout=subprocess.PIPE)
        for rank, life in ((0, 0), (1, 0), (0, 1))  # two lives of rank 0 at once: harsher than any real run
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        while len(list(tmp_path.iterdir())) < 2 or min(f.stat().st_size for f in tmp_path.iterdir()) < 50_000:
            assert all(writer.poll() is None for writer in writers)
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    log = EventLog(tmp_path, rank=1, incarnation=1)
    log.write(EVENTS[0])
    log.close()
    records = read_events(tmp_path)
    assert {(r.rank, r.incarnation) for r in records} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for who in ((0, 0), (0, 1), (1, 0)):
        steps = [r.event.step for r in records if (r.rank, r.incarnation) == who and isinstance(r.event, StepEvent)]
        assert steps == list(range(1, len(steps) + 1))


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path, capfd):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    log = EventLog(tmp_path, rank=6)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
        for _ in range(50):
            log.write(EVENTS[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and "--elastic-event-log" in said[0] and "rank 6" in said[0]
    assert not log.enabled
    (file,) = tmp_path.iterdir()
    assert file.read_bytes().endswith(b"}}\n")  # no half line stays
    records = read_events(tmp_path)
    assert 3 < len(records) < 50 and all(record.event == EVENTS[0] for record in records)


@pytest.mark.parametrize("kept", [1, 9, 60, -2])
def test_a_line_torn_by_a_kill_costs_only_itself(tmp_path, kept):
    first = EventLog(tmp_path, rank=0)
    for step in (1, 2):
        first.write(PhasesEvent(step, {"compute": 5}))
    first.close()
    (file,) = tmp_path.iterdir()
    whole, torn, _ = file.read_bytes().split(b"\n")
    file.write_bytes(whole + b"\n" + torn[:kept])
    assert [record.event for record in read_events(tmp_path)] == [PhasesEvent(1, {"compute": 5})]
    second = EventLog(tmp_path, rank=0, incarnation=1)
    second.write(PhasesEvent(2, {"compute": 6}))
    second.close()
    expected = [PhasesEvent(1, {"compute": 5}), PhasesEvent(2, {"compute": 6})]
    assert [record.event for record in read_events(tmp_path)] == expected
    if kept >= len(b'{"kind":') or kept < 0:  # and when the two ran together
        glued = file.read_bytes().split(b"\n")
        file.write_bytes(glued[0] + b"\n" + glued[1] + glued[2] + b"\n")
        assert [record.event for record in read_events(tmp_path)] == expected


def test_foreign_lines_are_named_and_unknown_kinds_kept(tmp_path):
    log = EventLog(tmp_path, rank=0)
    log.write(EVENTS[3])
    (file,) = tmp_path.iterdir()
    line = json.loads(file.read_text())
    newer = {**line, "kind": "weather", "event": {"rain": 3}}
    extended = {**line, "event": {**line["event"], "new_field": 1}}
    file.write_text("".join(json.dumps(one) + "\n" for one in (line, newer, extended)))
    first, second, third = read_events(tmp_path)
    assert first.event == third.event == EVENTS[3]
    assert second.event is None and second.fields == {"rain": 3}
    file.write_text("garbage\n")
    with pytest.raises(ValueError, match=r"rank00000\.jsonl:1: not an event"):
        read_events(tmp_path)
    with pytest.raises(FileNotFoundError, match="no event log directory"):
        read_events(tmp_path / "elsewhere")


def test_a_clock_set_back_does_not_reorder_a_rank(tmp_path):
    log = EventLog(tmp_path, rank=0)
    for step in (1, 2, 3):
        log.write(PhasesEvent(step, {}))
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1]["wall"] -= 3600
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [record.event for record in read_events(tmp_path)] == [PhasesEvent(step, {}) for step in (1, 2, 3)]


def test_descriptors_do_not_leak_into_children(tmp_path):
    log = EventLog(tmp_path, rank=0)
    opened = [int(fd) for fd in os.listdir("/proc/self/fd") if _is(fd, str(tmp_path / "rank00000.jsonl"))]
    assert len(opened) == 1 and not os.get_inheritable(opened[0])
    log.close()


def test_a_log_that_cannot_be_opened_costs_one_line_not_the_rank(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    log = EventLog(tmp_path / "file", rank=2)
    log.write(PhasesEvent(1, {}))
    log.close()
    assert not log.enabled
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("--elastic-event-log: rank 2 logs no more events: ")


def _is(descriptor: str, path: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == path
    except OSError:
        return False
