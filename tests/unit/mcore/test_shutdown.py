"""Each error that the engine cannot recover from has one exit status and one line, wherever it is raised."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import global_vars

from megatron.elastic.config import ConfigError
from megatron.elastic.control.exits import ExitCode
from megatron.elastic.control.membership import Released
from megatron.elastic.engine.failures import CommunicationFault, NotFinite, SilentCorruption
from megatron.elastic.engine.transaction.agreement import StateLost
from megatron.elastic.mcore.loop.shutdown import Shutdown
from megatron.elastic.observe.event_kinds import EndEvent, RecoveryEvent
from megatron.elastic.observe.events import EventLog, read_events
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.runtime.start import JobGone
from megatron.elastic.state.certificate import CertificateError


class Ended(BaseException):
    """The process has ended at once, with this status."""


class Process:
    """One rank that logs: how it ended, what it said, and what it told its agent."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, saved: str | None, respawn: bool) -> None:
        self.said: list[str] = []
        self.told: list[tuple[Any, ...]] = []
        self.closed = 0
        self.events = folder / "events"
        if saved is not None:
            (folder / "latest_checkpointed_iteration.txt").write_text(saved)
        unset = {"finetune": False, "ckpt_step": None, "pretrained_checkpoint": None}
        patch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(load=str(folder), **unset))
        patch.setattr(os, "_exit", self._exit)
        membership = SimpleNamespace(
            finish=lambda code: self.told.append(("finish", code)),
            give_up=lambda code, why: self.told.append(("give up", code, why)),
        )
        setup: Any = SimpleNamespace(
            built=True,
            engine=SimpleNamespace(close=self._close, record=SimpleNamespace(version=9)),
            links=SimpleNamespace(
                membership=membership, fabric=SimpleNamespace(rank=3), events=EventLog(self.events, 3)
            ),
            notice=self.said.append,
        )
        self.shutdown = Shutdown(setup, respawn)

    def _exit(self, code: int) -> None:
        self.told.append(("exit", code))
        raise Ended

    def _close(self) -> None:
        self.closed += 1

    def end(self, error: BaseException, proven: bool = False) -> tuple[Any, ...]:
        """Raise ``error`` in a replaced function of Megatron."""

        def train(*_: object) -> None:
            raise error

        make = self.shutdown.proven if proven else self.shutdown.named
        symbol, reason, made = make(("megatron.x", "because", lambda original: original))
        assert (symbol, reason) == ("megatron.x", "because")
        with pytest.raises((SystemExit, Ended, type(error))) as caught:
            made(train)("any", "arguments")
        if caught.value is not error:
            assert self.closed == 1
        return self.told[-1] if self.told else ()


Start = Callable[..., Process]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    return lambda saved=None, respawn=True: Process(monkeypatch, tmp_path, saved, respawn)


def lost(version: int) -> StateLost:
    error = StateLost.__new__(StateLost)
    Exception.__init__(error, "blocks 1, 2 are lost")
    error.version = version
    return error


@pytest.mark.parametrize("error", [CertificateError(("block 3 differs",)), SilentCorruption("block 3 differs")])
def test_wrong_state_ends_every_rank_as_deterministic(start: Start, error: Exception) -> None:
    process = start(saved="5")
    assert process.end(error) == ("finish", ExitCode.DETERMINISTIC)
    assert process.said == [str(error)] and "block 3 differs" in str(error)


def test_before_the_first_step_only_a_failed_certificate_ends_the_job(start: Start) -> None:
    assert start().end(CertificateError(("x",)), proven=True) == ("finish", ExitCode.DETERMINISTIC)
    process = start()
    assert process.end(PlanError("no cell"), proven=True) == () and process.closed == 0


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PlanError("no cell is left"), ExitCode.STATE_LOST, "no cell is left"),
        (CommunicationFault("twice"), ExitCode.DETERMINISTIC, "twice"),
        (ConfigError("--x is wrong"), ExitCode.FAILED, "error: --x is wrong"),
    ],
)
def test_an_error_that_other_ranks_may_not_see_ends_the_job_by_the_launcher(
    start: Start, error: Exception, code: int, text: str
) -> None:
    assert start(saved="5").end(error) == ("give up", code, text)


def test_lost_state_goes_back_to_the_checkpoint_and_says_which_steps_are_computed_again(start: Start) -> None:
    process = start(saved="6")
    assert process.end(lost(9)) == ("exit", ExitCode.BEGUN_ANEW)
    (line,) = process.said
    assert "blocks 1, 2 are lost" in line and "of step 6" in line and "steps 7 to 9 are computed again" in line
    event, end = (record.event for record in read_events(process.events))
    assert isinstance(event, RecoveryEvent) and (event.step, event.lost_steps) == (7, 3)
    assert end == EndEvent(9, ExitCode.BEGUN_ANEW, "blocks 1, 2 are lost")


@pytest.mark.parametrize(("saved", "respawn"), [(None, True), ("6", False)])
def test_without_a_way_back_lost_state_ends_the_job(start: Start, saved: str | None, respawn: bool) -> None:
    process = start(saved, respawn)
    kind, code, why = process.end(lost(9))
    assert (kind, code) == ("give up", ExitCode.STATE_LOST) and "--load" in why and process.said == []


def test_a_gradient_that_is_not_finite_twice_goes_back_or_is_raised(start: Start) -> None:
    error = NotFinite("step 10: a gradient is not finite")
    process = start(saved="9")
    assert process.end(error) == ("exit", ExitCode.FELL_BACK)
    assert "also when computed again" in process.said[0] and "no step is lost" in process.said[0]
    (saved_before,) = (process.events.parent.glob("latest*"),)
    for tracker in saved_before:
        tracker.unlink()
    plain = start()
    assert plain.end(error) == () and plain.closed == 0, "Megatron's own error, with its traceback"


@pytest.mark.parametrize(
    ("saved", "anew", "end"),
    [
        (None, True, ("exit", ExitCode.BEGUN_ANEW)),
        ("4", False, ("exit", ExitCode.BEGUN_ANEW)),
        (None, False, ("finish", ExitCode.STATE_LOST)),
    ],
)
def test_a_newcomer_whose_job_has_gone_starts_with_it_or_ends_with_it(
    start: Start, saved: str | None, anew: bool, end: tuple[str, int]
) -> None:
    assert start(saved).end(JobGone(begins_anew=anew)) == end


def test_a_rank_that_was_asked_to_leave_ends_well(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert start().end(Released.__new__(Released)) == ("finish", 0)
    assert capsys.readouterr().out == "rank 3 leaves as requested; the other ranks go on\n"
