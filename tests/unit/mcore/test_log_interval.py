"""A newcomer that prints the next log line has the sums of the members since the last one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from megatron.core.timers import Timers
from megatron.training import global_vars

from megatron.elastic.mcore.loop.log_interval import LogInterval, numbers

pytestmark = pytest.mark.usefixtures("cpu_as_device")


@pytest.fixture
def cpu_as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


class Loop:
    """The part of Megatron's loop that adds up and prints, with a timer of its own."""

    def __init__(self, interval: LogInterval, patch: pytest.MonkeyPatch) -> None:
        self.interval, self._patch, self.sums = interval, patch, dict[str, Any]()
        self.timers = Timers(0, "minmax")
        self.timers("interval-time", log_level=0).start()
        patch.setattr(global_vars, "_GLOBAL_TIMERS", self.timers)

    def step(self, loss: float) -> None:
        self._patch.setattr(global_vars, "_GLOBAL_TIMERS", self.timers)
        self.interval.step()
        self.interval.before_log(self.sums)
        self.sums["lm loss"] = self.sums.get("lm loss", torch.tensor([0.0])) + torch.tensor(loss)
        self.sums["advanced iterations"] = self.sums.get("advanced iterations", 0) + 1
        self.interval.after_log(self.sums)


def test_a_newcomer_goes_on_with_the_sums_and_the_time_of_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Loop(LogInterval(), monkeypatch)
    member.step(1.5)
    member.step(2.25)
    member.interval.step()
    member.timers("interval-time", log_level=0).set_elapsed(100.0)
    told = json.loads(json.dumps(member.interval.for_newcomer()))
    assert told["sums"] == {"lm loss": [3.75, 0.0], "advanced iterations": [2.0, 1.0]} and told["seconds"] >= 100.0

    newcomer = Loop(LogInterval(), monkeypatch)
    newcomer.interval.take(told)
    monkeypatch.setattr(global_vars, "_GLOBAL_TIMERS", newcomer.timers)
    again = newcomer.interval.for_newcomer()
    assert json.loads(json.dumps(again["sums"])) == told["sums"] and again["seconds"] >= told["seconds"], (
        "it may tell another newcomer"
    )
    member.step(4.0)
    newcomer.step(4.0)
    assert newcomer.sums == member.sums and member.sums["lm loss"].item() == 7.75
    monkeypatch.setattr(global_vars, "_GLOBAL_TIMERS", newcomer.timers)
    assert 100.0 <= newcomer.timers("interval-time").elapsed() < 200.0
    newcomer.step(1.0)
    assert newcomer.sums["advanced iterations"] == 4, "once"


def test_sums_are_those_of_the_begin_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer's loop begins with the step that the members are in, or have just finished."""
    member = Loop(LogInterval(), monkeypatch)
    member.step(1.5)
    member.step(2.25)
    assert member.interval.for_newcomer()["sums"] == {"lm loss": (1.5, 0.0), "advanced iterations": (1.0, 1.0)}


def test_a_newcomer_knows_whether_the_first_step_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line is a phase of all ranks: if one leaves it out, they wait for each other."""
    member, newcomer = Loop(LogInterval(), monkeypatch), LogInterval()
    member.interval.step()
    newcomer.take(member.interval.for_newcomer())
    assert newcomer.first
    member.step(1.5)
    newcomer.take(member.interval.for_newcomer())
    assert newcomer.first, "its loop begins with the first step"
    member.interval.step()
    newcomer.take(member.interval.for_newcomer())
    assert not newcomer.first and not member.interval.first


def test_a_line_that_is_repeated_has_the_times_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Loop(LogInterval(), monkeypatch)
    member.interval.step()
    running, ended = (member.timers(name, log_level=0) for name in ("interval-time", "forward-backward"))
    running.set_elapsed(100.0)
    ended.set_elapsed(50.0)
    member.interval.begin_line()
    assert running.elapsed() >= 100.0 and ended.elapsed() == 50.0, "the line, in which a rank is lost"
    assert member.interval.for_newcomer()["seconds"] >= 100.0, "a newcomer may print it"
    member.interval.restore_times()
    assert running.elapsed() >= 100.0 and ended.elapsed() == 50.0
    member.interval.after_log({})
    assert member.interval.for_newcomer()["seconds"] < 100.0


@pytest.mark.parametrize("first", [True, False])
def test_a_newcomer_that_passes_a_line_goes_on_as_the_members_do(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """The job's first line resets nothing; after another one the sums are 0 and the time begins anew."""
    told = {"sums": {"lm loss": (3.5, 0.0)}, "seconds": 100.0, "first": first}
    after = {"lm loss": torch.tensor([4.5 if first else 0.0]), "advanced iterations": 2 if first else 0}
    newcomer = Loop(LogInterval(), monkeypatch)
    newcomer.interval.take(told)
    newcomer.interval.step()
    newcomer.interval.before_log(newcomer.sums)
    newcomer.interval.begin_line()
    newcomer.interval.pass_line(newcomer.sums, numbers(after))
    newcomer.interval.after_log(newcomer.sums)
    assert newcomer.sums == after and isinstance(newcomer.sums["advanced iterations"], int)
    assert (newcomer.interval.for_newcomer()["seconds"] >= 100.0) == first
