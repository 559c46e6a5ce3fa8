"""Phases of a step add up to the step."""

from __future__ import annotations

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
