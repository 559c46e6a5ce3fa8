"""The launcher's own lines: whole, at once, and while it waits at growing intervals."""

from __future__ import annotations

import os
import re
import sys
import threading
from contextlib import suppress

import pytest

from megatron.elastic.launch.messages import Console, say, waiting_for
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


class Paused:
    """A console that takes messages only when it is read."""

    def __init__(self) -> None:
        self.read, self.begun = threading.Event(), threading.Event()
        self.texts: list[str] = []

    def write(self, text: str) -> None:
        self.begun.set()
        self.read.wait()
        self.texts.append(text)


def test_a_console_that_is_not_read_delays_no_caller_and_takes_what_fits_later() -> None:
    paused = Paused()
    console = Console(paused.write, most=2)
    console.write_apart()
    console.put("0")
    paused.begun.wait()
    for number in range(1, 6):  # two wait behind the one that is being written
        console.put(str(number))
    console.flush(0.01)
    assert not paused.texts
    paused.read.set()
    console.flush(60.0)
    console.put("6")
    console.flush(60.0)
    dropped = "[launch] 3 messages were dropped: the console was not read\n"
    assert paused.texts == ["0", "1", "2", dropped, "6"]


def test_dropped_messages_are_told_before_those_that_come_after_them() -> None:
    paused = Paused()
    console = Console(paused.write, most=1)
    console.write_apart()
    console.put("0")
    paused.begun.wait()
    console.put("1")
    console.put("2")
    paused.read.set()
    console.flush(60.0)
    assert [text.split()[-1] for text in paused.texts] == ["0", "1", "read"]


def test_a_console_without_a_thread_of_its_own_is_written_to_at_once() -> None:
    texts = list[str]()
    console = Console(texts.append)
    console.put("now")
    assert texts == ["now"]
