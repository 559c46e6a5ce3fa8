"""Fault scripts: what they mean, that they happen, and that bad ones are one clear line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.config import ConfigError
from megatron.elastic.engine.inject import KILL_POINTS, STEP_POINTS, Effects, InjectedFault, Injector, parse


def fires(injector: Injector, point: str, step: int) -> bool:
    try:
        injector.reach(point, step)
    except InjectedFault:
        return True
    return False


def test_a_script_is_read_as_written():
    kill, stop, leave = parse(
        "kill:rank=2,step=5,point=after_reduce; stop:rank=0|1 ;exit:code=7,step=3|4,incarnation=*"
    )
    assert (kill.kind, kill.ranks, kill.steps, kill.points) == ("kill", {2}, {5}, ("after_reduce",))
    assert (stop.kind, stop.ranks, stop.steps, stop.points) == ("stop", {0, 1}, frozenset(), ("before_step",))
    assert (leave.code, leave.steps, leave.incarnations) == (7, {3, 4}, frozenset())
    assert kill.incarnations == {0}
    assert parse(None) == parse("") == parse(" ; ") == ()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("explode:rank=1", "unknown fault 'explode'"),
        ("kill:rank=x", "rank='x' is not a whole number"),
        ("kill:rank=-1", "must be 0 or more"),
        ("kill:point=nowhere", "unknown point 'nowhere'"),
        ("kill:rank", "'rank' is not field=value"),
        ("kill:rank=", "is not field=value"),
        ("kill:colour=red", "kill has no field 'colour'"),
        ("kill:code=3", "kill has no field 'code'"),
        ("kill:rank=1,rank=2", "rank is given twice"),
        ("exit:code=256", "255 or less"),
        ("random:seed=1", "random needs seed= and rate="),
        ("random:seed=1,rate=2", "between 0 and 1"),
        ("random:seed=1,rate=0.1,kinds=random", "unknown kind 'random'"),
        ("delay:seconds=nan", "between 0 and"),
        ("kill:nth=0", "must be 1 or more"),
    ],
)
def test_a_bad_script_is_one_line_that_names_the_flag(script, says):
    with pytest.raises(ConfigError) as caught:
        parse(script)
    text = str(caught.value)
    assert text.startswith("--elastic-inject: ") and says in text and "\n" not in text


def test_a_rank_that_a_job_never_has_is_refused():
    (kill, slow) = parse("kill:rank=3;slow:factor=2", ranks=4)
    assert (kill.ranks, slow.ranks) == ({3}, frozenset())
    with pytest.raises(ConfigError, match=r"--elastic-inject: rank=4 is not in this job: name ranks from 0 to 3$"):
        parse("kill:rank=3;stop:rank=0|9|4,step=2", ranks=4)


@given(st.text(max_size=60))
def test_any_text_is_a_script_or_a_refusal(text):
    try:
        parse(text)
    except ConfigError as refusal:
        assert str(refusal).startswith("--elastic-inject: ")


@pytest.mark.parametrize("point", KILL_POINTS)
def test_every_named_point_can_be_chosen_and_only_it_fires(point):
    injector = Injector(parse(f"raise:rank=1,step=5,point={point}"), rank=1)
    for step in (4, 5):
        for other in KILL_POINTS:
            assert fires(injector, other, step) == ((other, step) == (point, 5))


def test_rank_incarnation_nth_and_count_narrow_a_fault():
    def which(script: str, rank: int = 0, **who: Any) -> list[int]:
        injector = Injector(parse(script), rank, **who)
        return [n for n in range(1, 7) if fires(injector, "mid_forward", 3)]

    base = "raise:rank=0|2,step=3,point=mid_forward"
    assert which(base) == [1]
    assert which(base, rank=1) == [] and which(base, rank=2) == [1]
    assert which(base, incarnation=1) == []
    assert which(base + ",incarnation=1", incarnation=1) == [1]
    assert which(base + ",incarnation=*", incarnation=3) == [1]
    assert which(base + ",nth=3") == [3]
    assert which(base + ",count=2") == [1, 2]
    assert which(base + ",count=0,nth=5") == [5, 6]


def test_without_faults_for_this_process_a_point_is_not_even_looked_up():
    Injector((), rank=0).reach("no such point", 1)
    Injector(parse("raise:rank=1"), rank=0).reach("no such point", 1)
    with pytest.raises(ValueError, match="not a named point"):
        Injector(parse("raise:rank=0"), rank=0).reach("no such point", 1)


def test_delay_makes_a_straggler():
    injector = Injector(parse("delay:rank=0,step=1,seconds=0.05,count=0"), rank=0)
    began = time.monotonic()
    injector.reach("before_step", 1)
    injector.reach("before_step", 1)
    assert time.monotonic() - began >= 0.1


def test_who_lingers_for_a_missing_rank_goes_on_once_it_asks_to_be_admitted():
    class Slept(Effects):
        def __init__(self) -> None:
            self.seconds = 0.0

        def sleep(self, seconds: float) -> None:
            self.seconds += seconds

    for asked_after, expected in ((0.0, 0.0), (0.5, 0.5), (9.0, 3.0)):
        slept = Slept()
        injector = Injector(parse("delay:missing=1,count=0,seconds=3"), rank=0, effects=slept)
        injector.is_asked = lambda after=asked_after, slept=slept: slept.seconds >= after  # type: ignore[misc]
        injector.reach("before_step", 1)
        assert slept.seconds == pytest.approx(expected, abs=0.03)


def test_a_slowed_rank_takes_a_multiple_of_its_own_time_and_only_in_its_steps():
    injector = Injector(parse("slow:rank=0,step=2-3,factor=3"), rank=0)
    spent = {}
    for step in (1, 2, 3, 4):
        started = time.monotonic()
        injector.drag(step, lambda: 20_000_000)
        spent[step] = time.monotonic() - started
    assert min(spent[2], spent[3]) >= 0.04
    assert max(spent[1], spent[4]) < min(spent[2], spent[3])
    injector.reach("before_step", 2)  # it is no fault of a point


@pytest.mark.parametrize(
    "script", ["slow:rank=0", "slow:factor=0.5", "slow:factor=2,point=mid_forward", "kill:step=5-3"]
)
def test_a_slow_fault_that_makes_no_sense_is_refused(script):
    with pytest.raises(ConfigError, match="--elastic-inject"):
        parse(script)


def test_random_faults_follow_their_seed_and_rate():
    def trace(seed: int, rank: int, rate: float = 0.2, incarnation: int = 0) -> list[tuple[int, str]]:
        script = f"random:seed={seed},rate={rate},kinds=raise,count=0,incarnation=*"
        injector = Injector(parse(script), rank=rank, incarnation=incarnation)
        return [(step, point) for step in range(400) for point in STEP_POINTS if fires(injector, point, step)]

    assert trace(1, 0) == trace(1, 0)
    assert len({tuple(trace(1, 0)), tuple(trace(2, 0)), tuple(trace(1, 1)), tuple(trace(1, 0, incarnation=1))}) == 4
    assert 40 < len(trace(1, 0)) < 130  # 80 expected, 8 standard deviation
    assert {point for _, point in trace(3, 0, rate=1.0)} == set(STEP_POINTS)
    assert trace(1, 0, rate=0.0) == []


CHILD = """
import sys
from megatron.elastic.engine.inject import Injector, parse
print("alive", flush=True)
Injector(parse(sys.argv[1]), rank=2).reach("after_vote", 7)
print("survived", flush=True)
"""


def child(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("kind", "code", "says"),
    [
        ("kill", -signal.SIGKILL, "injected kill: rank 2, step 7, after_vote"),
        ("exit:code=7,", 7, "injected exit: rank 2, step 7, after_vote"),
        ("raise", 1, "InjectedFault: injected raise: rank 2, step 7, after_vote"),
        ("oom", 1, "can't allocate memory"),
    ],
)
def test_a_process_really_ends_as_the_script_says(kind, code, says):
    script = (kind if ":" in kind else kind + ":") + "rank=2,step=7,point=after_vote"
    process = child(script)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert says in err and "survived" not in out


def test_a_stopped_process_stays_until_someone_ends_it():
    process = child("stop:rank=2,step=7,point=after_vote")
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and "survived" in out and "injected stop" in err
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_another_rank_of_the_same_script_goes_on():
    process = child("kill:rank=1,step=7,point=after_vote")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "survived" in out


def test_losses_are_ordered_by_how_many_went_before():
    """One script for many lives: a fault waits for all ranks to be back from the losses before it."""
    script = parse("raise:rank=1,losses=2,point=mid_forward;raise:rank=1,rejoin=3,point=in_recovery_edit")
    injector = Injector(script, rank=1, incarnation=1)
    assert not fires(injector, "mid_forward", 5), "nobody said who is present"
    injector.enter([1, 0, 1], slots=4)
    injector.settle()
    assert not fires(injector, "mid_forward", 6), "a rank is missing"
    injector.enter([1, 0, 1, 0], slots=4)
    assert not fires(injector, "mid_forward", 6), "work has not begun in that generation"
    injector.settle()
    assert not fires(injector, "mid_forward", 6), "copies are not in place"
    injector.restore()
    assert fires(injector, "mid_forward", 7) and not fires(injector, "mid_forward", 8), "once"
    injector.enter([1, 0, 1], slots=4)
    assert not fires(injector, "in_recovery_edit", 8)
    injector.settle()
    injector.enter([1, 1, 1, 0], slots=4)
    assert fires(injector, "in_recovery_edit", 9)


def test_a_fault_can_wait_for_steps_with_all_ranks_or_act_while_one_is_missing():
    injector = Injector(parse("raise:wait=2,point=after_vote;raise:missing=1,point=after_step,count=0"), rank=0)
    assert fires(injector, "after_step", 1)
    injector.enter([0, 0], slots=2)
    injector.settle()
    injector.restore()
    assert not fires(injector, "after_step", 1)
    hits = []
    for step in (1, 2, 3, 4):
        injector.reach("before_step", step)
        hits.append(fires(injector, "after_vote", step))
    assert hits == [False, False, True, False]
