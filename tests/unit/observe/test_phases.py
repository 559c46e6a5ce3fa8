"""Phases of a step add up to the step, and an overdue phase is noticed from another thread."""

from __future__ import annotations

import threading
import time

from megatron.elastic.observe.phases import PhaseTimer


def test_phases_add_up_to_the_step():
    timer = PhaseTimer()
    began = time.monotonic_ns()
    timer.begin(3, "prepare")
    first = timer.current.since_ns
    timer.enter("compute")
    time.sleep(0.01)
    with timer.phase("wait"):
        time.sleep(0.01)
    timer.enter("reduce")
    spent = timer.finish()
    ended = time.monotonic_ns()
    assert list(spent) == ["prepare", "compute", "wait", "reduce"]
    assert sum(spent.values()) == timer.current.since_ns - first <= ended - began
    assert spent["wait"] >= 10_000_000 and spent["compute"] >= 10_000_000


def test_a_block_ends_its_phase_also_when_it_raises():
    timer = PhaseTimer()
    timer.begin(1, "compute")
    try:
        with timer.phase("reduce"):
            raise KeyError
    except KeyError:
        pass
    assert timer.current.phase == "compute" and timer.current.step == 1


def test_changes_are_published_with_their_step():
    seen = []
    timer = PhaseTimer(on_change=lambda moment: seen.append((moment.step, moment.phase)))
    timer.begin(8, "compute")
    timer.enter("reduce")
    timer.finish()
    assert seen == [(8, "compute"), (8, "reduce"), (8, "idle")]


def test_an_abandoned_attempt_leaves_no_trace():
    timer = PhaseTimer()
    timer.begin(1, "compute")
    timer.enter("reduce")
    timer.begin(1, "compute")
    assert set(timer.finish()) == {"compute"}


def test_usual_time_is_the_median_of_recent_steps_and_sets_the_allowance(monkeypatch):
    now = [0]
    monkeypatch.setattr("megatron.elastic.observe.phases.time.monotonic_ns", lambda: now[0])
    timer = PhaseTimer(history=5)
    assert timer.usual_ns("compute") is None and timer.allowance_ns("compute", 100, 3.0) == 100
    for nanoseconds in (9000, 10, 20, 30, 40, 5000):  # the first falls out of the history
        timer.begin(1, "compute")
        now[0] += nanoseconds
        timer.finish()
    assert timer.usual_ns("compute") == 30 and timer.profile() == {"compute": 30}
    assert timer.allowance_ns("compute", 1, 3.0) == 90 and timer.allowance_ns("compute", 1000, 3.0) == 1000
    assert not timer.overdue(0, 3.0)  # idle is never overdue
    timer.begin(2, "compute")
    now[0] += 91
    assert timer.overdue(1, 3.0) and not timer.overdue(1000, 3.0)


def test_a_watching_thread_sees_the_phase_that_hangs():
    timer = PhaseTimer()
    noticed = threading.Event()

    def watch():
        while not noticed.is_set():
            if timer.overdue(floor_ns=20_000_000, factor=5.0):
                noticed.set()
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        timer.begin(1, "reduce")
        assert noticed.wait(timeout=30)
    finally:
        noticed.set()
        watcher.join()
