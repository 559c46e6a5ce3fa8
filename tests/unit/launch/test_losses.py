"""The kind of a loss is what the worker wrote and the kernel reports, whatever its last lines look like."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from megatron.elastic.comm.errors import CommTimeout, PeerLost
from megatron.elastic.comm.vendor.library import RESPAWN_EXIT_CODE, VendorError, VendorHang
from megatron.elastic.config import ConfigError
from megatron.elastic.control.events import JobEnded, Lost
from megatron.elastic.control.exits import Ending, ExitCode, ExitReason
from megatron.elastic.control.slot import Slot
from megatron.elastic.launch.agent.losses import classify, input_error
from megatron.elastic.launch.workers.pool import Worker
from megatron.elastic.launch.workers.worker import reason_of

LOOKS_LIKE_COMMUNICATION = "megatron.elastic.comm.errors.PeerLost: rank 1: connection lost"


@pytest.fixture
def worker() -> Iterator[Worker]:
    fd, slot = Slot.create("test")
    mine, theirs = socket.socketpair()
    yield Worker(1, 3, 3, 0, mine, slot)
    mine.close()
    theirs.close()
    os.close(fd)


def ending(worker: Worker, status: int) -> Ending:
    event = classify(worker, status, "host", True, True, (), 0.0)
    assert isinstance(event, Lost)
    return event.losses[0].ending


@pytest.mark.parametrize("error", [PeerLost(1), CommTimeout(1.0), VendorError("refused"), VendorHang("abort")])
def test_every_error_of_communication_says_so_also_as_a_cause(error: Exception) -> None:
    assert reason_of(error) is ExitReason.COMMUNICATION
    try:
        raise RuntimeError("while saving") from error
    except RuntimeError as raised:
        assert reason_of(raised) is ExitReason.COMMUNICATION
    try:
        try:
            raise error
        except Exception:
            raise ValueError("an error of its own, met on the way out")  # noqa: B904 - without a cause
    except ValueError as raised:
        assert reason_of(raised) is ExitReason.ERROR


def test_bad_input_and_the_programs_own_errors() -> None:
    assert reason_of(ConfigError("--flag")) is ExitReason.INPUT
    assert reason_of(KeyError("x")) is ExitReason.ERROR


def test_the_words_of_an_error_decide_nothing(worker: Worker) -> None:
    worker.slot.record_error(LOOKS_LIKE_COMMUNICATION, ExitReason.ERROR)
    assert ending(worker, 1 << 8) is Ending.ERROR and input_error(worker) == ""
    worker.slot.record_error("plain words", ExitReason.COMMUNICATION)
    assert ending(worker, 1 << 8) is Ending.COMMUNICATION
    worker.slot.record_error("some.Error: the flag", ExitReason.INPUT)
    assert input_error(worker) == "the flag"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, Ending.ERROR),
        (ExitCode.FELL_BACK, Ending.FALL_BACK),
        (ExitCode.BEGUN_ANEW, Ending.BEGIN_ANEW),
        (RESPAWN_EXIT_CODE, Ending.COMMUNICATION),
    ],
)
def test_exit_codes_by_which_a_worker_says_why_it_ends(worker: Worker, code: int, kind: Ending) -> None:
    assert ending(worker, code << 8) is kind


def test_a_killed_rank_did_not_end_by_its_own_error(worker: Worker) -> None:
    worker.slot.record_error("an error it was still handling", ExitReason.ERROR)
    assert ending(worker, 9) is Ending.KILLED
    worker.killed_for = "stopped"
    assert ending(worker, 1 << 8) is Ending.KILLED


def test_before_the_first_step_an_error_of_its_own_ends_the_job_and_one_of_communication_does_not(
    worker: Worker,
) -> None:
    worker.slot.record_error("x", ExitReason.COMMUNICATION)
    assert isinstance(classify(worker, 1 << 8, "host", False, True, (), 0.0), Lost)
    worker.slot.record_error("x", ExitReason.ERROR)
    assert isinstance(classify(worker, 1 << 8, "host", False, True, (), 0.0), JobEnded)
