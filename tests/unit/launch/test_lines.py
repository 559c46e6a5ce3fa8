"""The launcher's own lines: whole, at once, and while it waits at growing intervals."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress

import pytest

from megatron.elastic.launch.messages import say, waiting_for
from tests.cluster.scheduler import ClusterThreads, Process, Scheduler


def test_a_line_has_its_details_indented_below(capsys: pytest.CaptureFixture[str]) -> None:
    say("rank 3 was lost", ["Traceback", "  in step 7"])
    assert capsys.readouterr().err == "[launch] rank 3 was lost\n    | Traceback\n    |   in step 7\n"


def test_a_console_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    gone = os.fdopen(writing, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", gone)
    say("nobody reads this")
    with suppress(BrokenPipeError):
        gone.close()
    say("nor this")


def test_what_is_waited_for_is_said_more_and_more_seldom_until_it_has_come(capsys: pytest.CaptureFixture[str]) -> None:
    scheduler, process = Scheduler(0), Process("agent")
    threads = ClusterThreads(scheduler, process)

    def agent() -> None:
        with waiting_for("nodes 1 and 2", threads):
            for _ in range(30):
                threads.sleep(10.0)
        threads.sleep(50.0)

    scheduler.spawn(process, "waits", agent)
    scheduler.run()
    seconds = [int(found) for found in re.findall(r"waiting for nodes 1 and 2 \((\d+) s\)", capsys.readouterr().err)]
    assert seconds == [3, 9, 21, 45, 93, 153, 213, 273]


def test_what_has_come_at_once_is_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting_for("nothing"):
        pass
    assert capsys.readouterr().err == ""
