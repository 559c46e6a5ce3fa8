"""Hangs, broken links and silent departures: who is blamed, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.launcher_cluster import Cluster, cluster

PROGRAM = """
import json, os, sys, time
from megatron.elastic.comm.errors import GenerationChanged
from megatron.elastic.comm.address import Address
from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.control.membership import Activity

m = WorkerMembership.from_env()

def say(event, **fields):
    who = {"event": event, "rank": m.rank, "incarnation": m.incarnation, "pid": os.getpid()}
    os.write(1, json.dumps({**who, **fields}).encode() + b"\\n")

def agree():
    while True:
        try:
            d = m.decide(Address(m.rank, m.incarnation, m.host), "", 100)
        except GenerationChanged:
            continue
        say("decided", generation=d.generation, members=list(d.members), lost=[[l.rank, l.cause] for l in d.lost])
        return d

m.start(lambda g: say("freeze", generation=g))
say("begin")
d = agree()
for step in range(20):  # so that phases have a profile
    m.publish(Activity(step, "compute"))
    time.sleep(0.01)
    m.publish(Activity(step, "reduce"))
    time.sleep(0.01)
"""

HANG = """
# A chain: 0 waits for 1, 1 for 2; 2 does nothing for ever, and all are alive.
if m.incarnation == 0:
    m.publish(Activity(20, "compute") if m.rank == 2 else Activity(20, "reduce", (m.rank + 1,)))
while m.frozen() == d.generation:
    time.sleep(0.01)
    if m.rank == 2 and m.incarnation == 0: time.sleep(600)
d = agree()
m.publish(Activity(21, "compute"))  # waits for nobody any more: the other may end first
m.finish(0)
"""

CIRCLE = """
while True:
    m.publish(Activity(20, "reduce", ((m.rank + 1) % 3,)))
    while m.frozen() == d.generation: time.sleep(0.01)
    d = agree()
"""

NATIVE = """
import ctypes
waits = [None]
m.sample(lambda: waits[0])
for _ in range(3):  # so that waits have a profile
    waits[0] = Activity(-1, "communication", ((m.rank + 1) % 3,))
    time.sleep(0.6)
    waits[0] = None
    time.sleep(0.6)
waits[0] = Activity(-1, "communication", (0,) if m.rank else (1, 2))
time.sleep(0.6)
# The waits of ranks 1 and 2 are over, but no thread of theirs can tell: native code holds the interpreter's lock.
ctypes.PyDLL(None).sleep(15) if m.rank else time.sleep(15)
waits[0] = None
say("through", generation=m.frozen())
m.finish(0)
"""

LINK = """
say("ready")
for _ in range(2):
    if m.rank in (0, 1): m.suspect(1 - m.rank, "link broken")
    while m.frozen() == d.generation: time.sleep(0.01)
    d = agree()
m.finish(0)
"""

DEPARTURE = """
if m.rank == 1: os._exit(0)
time.sleep(1.0)
if m.rank == 0: m.suspect(1, "connection lost")
while m.frozen() == d.generation: time.sleep(0.01)
d = agree()
m.finish(0)
"""

DEATH = """
if m.rank == 2:
    os.kill(os.getpid(), 9)
m.suspect(2, "connection lost")
if m.rank == 0: m.suspect(1, "nothing arrives: it waits for the dead one")
while m.frozen() == d.generation: time.sleep(0.01)
d = agree()
time.sleep(1.0)  # longer than the grace of a suspicion
say("still", generation=m.frozen())
m.finish(0)
"""


def job(tmp_path: Path, body: str, *options: str) -> Cluster:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + body)
    settings = ("--elastic-detection-timeout", "0.2")
    return Cluster(3, command=[str(program), "--elastic"], options=("--no-respawn", *options), script_options=settings)


def run(tmp_path: Path, body: str) -> tuple[Cluster, int]:
    made = job(tmp_path, body)
    try:
        return made, made.exit_code()
    finally:
        made.close()


def test_the_sink_of_a_hang_is_executed_and_those_who_wait_are_not(tmp_path: Path) -> None:
    done, code = run(tmp_path, HANG)
    after = done.of("decided", generation=2)
    assert code == 0, done.text()
    assert {event["rank"] for event in after} == {0, 1}
    assert all(event["lost"][0][0] == 2 and event["lost"][0][1].startswith("hung in 'compute'") for event in after)


@pytest.mark.slow
def test_a_circle_is_formed_anew_once_and_then_ends_the_job(tmp_path: Path) -> None:
    done, code = run(tmp_path, CIRCLE)
    assert code == 5, done.text()
    again = done.of("decided", generation=2)
    assert {event["rank"] for event in again} == {0, 1, 2} and all(event["lost"] == [] for event in again)
    assert "none is at fault, for the second time" in done.text()


@pytest.mark.slow
def test_native_code_that_holds_the_interpreters_lock_is_no_wait_for_others(tmp_path: Path) -> None:
    done, code = run(tmp_path, NATIVE)
    assert code == 0, done.text()
    assert {(event["rank"], event["generation"]) for event in done.of("through")} == {(0, 1), (1, 1), (2, 1)}


def test_two_living_ranks_that_blame_each_other_reconnect_and_then_the_higher_goes(tmp_path: Path) -> None:
    done, code = run(tmp_path, LINK)
    assert code == 0, done.text()
    assert all(event["lost"] == [] and event["members"] == [0, 1, 2] for event in done.of("decided", generation=2))
    last = done.of("decided", generation=3)
    assert {event["rank"] for event in last} == {0, 2}
    assert all(event["lost"][0][0] == 1 and "link broken again" in event["lost"][0][1] for event in last)


def test_a_rank_that_left_with_code_0_is_a_loss_once_it_is_missed(tmp_path: Path) -> None:
    done, code = run(tmp_path, DEPARTURE)
    assert code == 0, done.text()
    assert all(event["lost"] == [[1, "exit code 0"]] for event in done.of("decided", generation=2))


def test_a_dead_peer_costs_no_healthy_one(tmp_path: Path) -> None:
    """On a busy machine the death may become known after the grace of suspicions: a generation is then formed twice."""
    done, code = run(tmp_path, DEATH)
    assert code == 0, done.text()
    after = [event for event in done.of("decided") if event["lost"]]
    assert {event["rank"] for event in after} == {0, 1}
    assert all((event["members"], event["lost"]) == ([0, 1], [[2, "signal SIGKILL"]]) for event in after)
    decided = {(event["rank"], event["generation"]) for event in after}
    assert {(event["rank"], event["generation"]) for event in done.of("still")} == decided, done.text()


def test_workers_start_by_exec_where_a_preloaded_module_keeps_a_thread(tmp_path: Path) -> None:
    (tmp_path / "megatron_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    environ = {"PYTHONPATH": f"{Path(__file__).resolve().parents[2]}:{tmp_path}"}
    options = ("--preload", "megatron_thread")
    with cluster(2, options=options, environ=environ, script_options=("--seconds", "600")) as made:
        made.wait_members([0, 1])
        assert "preloading megatron_thread started 1 thread(s)" in made.text()
        made.kill(1)
        made.wait_members([0, 1], minimum=3)
